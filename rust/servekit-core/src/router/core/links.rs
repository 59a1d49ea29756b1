//! Which frames count, and the greeting that opens a link.

use super::super::event::{Action, Nanos, Peer, Share, Side};
use super::super::link::{Link, Verdict};
use super::{Actions, Core, word};
use crate::log::Level;
use crate::wire::Rid;

impl<F: Share> Core<F> {
    pub(super) fn links(&mut self, side: Side) -> &mut Vec<Link> {
        match side {
            Side::Worker => &mut self.worker_links,
            Side::Rank => &mut self.rank_links,
        }
    }

    pub(super) fn admit(&mut self, side: Side, from: Peer, actions: &mut Actions<F>) -> bool {
        let epoch = self.config.epoch;
        let verdict = self.links(side).get_mut(usize::from(from.number)).map(|link| link.judge(epoch, from));
        match verdict {
            None => self.counters.malformed += 1,
            Some(Verdict::Fenced) => self.counters.fenced += 1,
            Some(Verdict::Replayed) => self.counters.replayed += 1,
            Some(Verdict::Take { missing: 0 }) => return true,
            Some(Verdict::Take { missing }) => {
                self.counters.gaps = self.counters.gaps.saturating_add(missing);
                self.complain(side, from.number, actions, || format!("{missing} frames are missing"));
                if side == Side::Rank {
                    self.tokens_lost(usize::from(from.number), "frames are missing", actions);
                }
                return true;
            }
        }
        false
    }

    /// Logs the first thing that is wrong with a peer; the rest is only counted.
    pub(super) fn complain(&mut self, side: Side, number: u16, actions: &mut Actions<F>, what: impl Fn() -> String) {
        if let Some(link) = self.links(side).get_mut(usize::from(number))
            && !std::mem::replace(&mut link.complained, true)
        {
            actions.push(Action::Log(Level::Warning, format!("{} {number}: {}", word(side), what())));
        }
    }

    pub(super) fn hello(
        &mut self,
        side: Side,
        from: Peer,
        schema: u64,
        name: &str,
        now: Nanos,
        actions: &mut Actions<F>,
    ) {
        let (own_epoch, number) = (self.config.epoch, usize::from(from.number));
        let Some(link) = self.links(side).get_mut(number) else {
            self.counters.malformed += 1;
            return;
        };
        let (newer, serving) = (from.epoch > link.epoch, link.greeted);
        let verdict = link.clone().greet(own_epoch, from);
        match verdict {
            Verdict::Fenced => self.counters.fenced += 1,
            Verdict::Replayed => self.counters.replayed += 1,
            Verdict::Take { .. } if schema != self.config.schema => {
                let own = self.config.schema;
                let what = format!("({name}) speaks message schema {schema:#x}, this control process {own:#x}");
                if serving {
                    // Whoever claims to follow a peer that works ends nobody's work.
                    self.counters.malformed += 1;
                    self.complain(side, from.number, actions, || what.clone());
                } else {
                    actions.push(Action::Fatal(format!("{} {number} {what}", word(side))));
                }
            }
            Verdict::Take { .. } => {
                // A newer life before supervision told of the old one's end.
                match side {
                    Side::Worker if newer => self.worker_down(number, None, actions),
                    Side::Rank if newer => self.rank_down(number, None, "it was replaced".to_owned(), now, actions),
                    Side::Worker | Side::Rank => {}
                }
                self.links(side)[number].greet(own_epoch, from);
                match side {
                    Side::Worker => actions.push(Action::HelloWorker { worker: number, receiver_epoch: from.epoch }),
                    Side::Rank => {
                        let rank = &mut self.ranks[number];
                        (rank.epoch, rank.greeted, rank.able, rank.seen) = (from.epoch, true, true, now);
                        actions.push(Action::HelloRank { rank: number, receiver_epoch: from.epoch });
                        self.refresh_rank(number, now, actions);
                    }
                }
            }
        }
    }

    /// Whether an id leads back to the worker that sent it.
    pub(super) fn own_id(&mut self, from: Peer, rid: Rid, actions: &mut Actions<F>) -> bool {
        let own = rid.worker() == from.number && u32::from(rid.epoch()) == from.epoch & 0xFFF;
        if !own {
            self.counters.forged += 1;
            self.complain(Side::Worker, from.number, actions, || format!("id {:#x} leads elsewhere", rid.0));
        }
        own
    }
}
