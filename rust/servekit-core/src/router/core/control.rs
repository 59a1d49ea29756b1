//! Messages of operators: from one worker to every rank, and to whom else they concern.

use super::super::event::{Action, Ask, Peer, Share, Side};
use super::super::frames::worker_party;
use super::{Actions, Core};
use crate::wire::{Rid, Route};

impl<F: Share> Core<F> {
    pub(super) fn control(&mut self, from: Peer, id: Rid, ask: Ask, frame: F, actions: &mut Actions<F>) {
        if !self.admit(Side::Worker, from, actions) {
            return;
        }
        if let Ask::Unknown(kind) = ask {
            self.counters.unknown += 1;
            self.complain(Side::Worker, from.number, actions, || format!("kind {kind} does not belong here"));
        }
        if !self.own_id(from, id, actions) {
            return;
        }
        let refusal = match &ask {
            Ask::Unknown(kind) => Some(format!("the control process does not know messages of kind {kind}")),
            Ask::Refused(why) => Some(why.clone()),
            Ask::State | Ask::FlushCache | Ask::LogLevel(_) | Ask::Ranks | Ask::Workers => None,
        };
        if refusal.is_some() {
            actions.push(Action::Answer { id, refusal, asked: Vec::new(), state: false });
            return;
        }
        self.counters.control += 1;
        let budget = self.budget.ranks();
        let for_ranks = ask != Ask::Workers;
        let active = self.ranks.iter().enumerate().filter(|(rank, _)| for_ranks && budget[*rank].active());
        let ranks: Vec<_> = active.map(|(rank, view)| (rank, view.epoch)).collect();
        if ask == Ask::FlushCache {
            self.budget.forget_prefixes();
        }
        let mut workers = Vec::new();
        if matches!(ask, Ask::LogLevel(_) | Ask::Workers) {
            let greeted = (0..).zip(&self.worker_links).filter(|(_, link)| link.greeted);
            workers = greeted.map(|(worker, link)| Route { worker, epoch: (link.epoch & 0xFFF) as u16 }).collect();
        }
        if let Ask::LogLevel(level) = ask {
            actions.push(Action::SetLogLevel(level));
        }
        let parties = ranks.iter().map(|&(rank, _)| rank as i32);
        let asked = parties.chain(workers.iter().map(|route| worker_party(route.worker))).collect();
        // The answer that names them goes first, so that theirs are expected.
        actions.push(Action::Answer { id, refusal: None, asked, state: ask == Ask::State });
        actions.push(Action::Control { ranks, workers, frame });
    }
}
