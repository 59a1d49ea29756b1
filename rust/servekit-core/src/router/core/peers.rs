//! What ranks and workers do, and what becomes of them.

use super::super::event::{Action, Nanos, Peer, Rows, Share, Side};
use super::super::groups::life;
use super::{Actions, Core, at_rank, life_of};
use crate::dispatch::Report;
use crate::log::Level;
use crate::wire::{Load, Route};

impl<F: Share> Core<F> {
    pub(super) fn batch(
        &mut self,
        from: Peer,
        last_dispatch: u64,
        load: Option<Load>,
        rows: Result<&dyn Rows, String>,
        now: Nanos,
        actions: &mut Actions<F>,
    ) {
        if !self.admit(Side::Rank, from, actions) {
            return;
        }
        let rank = usize::from(from.number);
        self.ranks[rank].seen = now;
        if let Some(load) = load {
            self.set_load(rank, load);
            let report = Report::of(last_dispatch, load);
            if !self.budget.update(rank, report) {
                self.counters.reports_ignored += 1;
            }
        }
        match rows {
            Ok(rows) if rows.rows() > 0 => {
                self.counters.batches += 1;
                for row in (0..rows.rows()).filter(|&row| rows.finished(row)) {
                    self.finish(rows.rid(row), rank);
                }
                actions.push(Action::Deliver);
            }
            Ok(_) => {}
            Err(reason) => {
                self.counters.malformed += 1;
                self.complain(Side::Rank, from.number, actions, || format!("broken batch: {reason}"));
                self.tokens_lost(rank, "it sent a broken batch", actions);
            }
        }
    }

    /// Ends what a rank had. Nobody can say whose tokens were lost: what these requests went on to say would be wrong,
    /// and one whose last row was among them would never end.
    pub(super) fn tokens_lost(&mut self, rank: usize, why: &str, actions: &mut Actions<F>) {
        let refusal = (500, format!("output of rank {rank} was lost: {why}"));
        self.fail_where(&refusal, actions, |_, place| at_rank(place, rank));
    }

    fn set_load(&mut self, rank: usize, load: Load) {
        let before = std::mem::replace(&mut self.ranks[rank].load, load).pending_tokens;
        self.pending_tokens = self.pending_tokens.saturating_sub(before).saturating_add(load.pending_tokens);
    }

    /// Supervision takes a life of a rank as ready.
    pub(super) fn rank_up(
        &mut self,
        rank: usize,
        epoch: Option<u32>,
        max_running: usize,
        now: Nanos,
        actions: &mut Actions<F>,
    ) {
        let (Some(view), Some(link)) = (self.ranks.get_mut(rank), self.rank_links.get(rank)) else { return };
        (view.told, view.max_running) = (epoch.unwrap_or(link.epoch), max_running);
        self.count_running();
        self.refresh_rank(rank, now, actions);
    }

    /// A life of a rank is over: ends what it had. What it still has under way is of another life now.
    pub(super) fn rank_down(
        &mut self,
        rank: usize,
        epoch: Option<u32>,
        reason: String,
        now: Nanos,
        actions: &mut Actions<F>,
    ) {
        let (Some(view), Some(link)) = (self.ranks.get_mut(rank), self.rank_links.get_mut(rank)) else { return };
        if epoch.is_some_and(|epoch| epoch < link.epoch) {
            // A later life has said hello, which ended this one.
            return;
        }
        link.end();
        (view.greeted, view.max_running) = (false, 0);
        view.reason = if reason.is_empty() { "it is down".to_owned() } else { reason };
        let refusal = (503, format!("rank {rank} is not active: {}", view.reason));
        self.refresh_rank(rank, now, actions);
        self.fail_where(&refusal, actions, |_, place| at_rank(place, rank));
        self.budget.reset(rank);
        self.set_load(rank, Load::default());
        actions.push(Action::ForgetRank { rank });
    }

    /// Makes a rank active exactly when it has said hello, supervision says so, and its peers do not object.
    pub(super) fn refresh_rank(&mut self, rank: usize, now: Nanos, actions: &mut Actions<F>) {
        let view = &self.ranks[rank];
        let active = view.greeted && view.told == view.epoch && view.able;
        if active == self.budget.ranks()[rank].active() {
            return;
        }
        self.budget.set_active(rank, active);
        self.count_running();
        let (level, text) = if active { (Level::Info, "active") } else { (Level::Warning, "not active") };
        actions.push(Action::Log(level, format!("rank {rank} is {text}")));
        if active {
            self.expire(now, actions);
            self.place_waiting(actions);
        }
    }

    pub(super) fn worker_down(&mut self, worker: usize, epoch: Option<u32>, actions: &mut Actions<F>) {
        let Some(link) = self.worker_links.get_mut(worker) else { return };
        if epoch.is_some_and(|epoch| epoch < link.epoch) {
            // A later life has said hello, which ended this one.
            return;
        }
        let life_number = life_of(worker, link.epoch);
        link.end();
        actions.push(Action::ForgetWorker { worker });
        for rid in self.select(|rid, _| life(rid) == life_number) {
            self.abort(rid, actions);
        }
        self.groups.forget_worker(life_number);
    }

    pub(super) fn worker_cut(&mut self, route: Route, actions: &mut Actions<F>) {
        let life_number = life_of(usize::from(route.worker), u32::from(route.epoch));
        let refusal = (503, "the HTTP worker reads too slowly".to_owned());
        self.fail_where(&refusal, actions, |rid, _| life(rid) == life_number);
    }
}
