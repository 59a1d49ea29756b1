//! A request's ends, all of which free what it was charged with.

use super::super::event::{Action, Peer, Share, Side};
use super::requests::open;
use super::{Actions, Core, Place, Refusal, at_rank};
use crate::wire::Rid;

impl<F: Share> Core<F> {
    /// Forgets a request with all that it was charged with, and returns where it was.
    pub(super) fn remove(&mut self, rid: Rid) -> Option<Place<F>> {
        let mut place = self.leave(rid)?;
        match &mut place {
            Place::Waiting { request, .. } => {
                self.leave_room(rid, request.room);
                self.waiting.retain(|waiting| *waiting != rid);
                self.waiting_tokens -= u64::from(request.tokens);
                if let Some(group) = &request.group {
                    self.groups.settle(rid, group, None);
                }
            }
            Place::Rank { rank, dispatch, kept, room, .. } => {
                self.keeper.release(kept.take());
                self.leave_room(rid, *room);
                self.budget.release(*rank, *dispatch);
                self.ranks[*rank].in_flight = self.ranks[*rank].in_flight.saturating_sub(1);
            }
        }
        Some(place)
    }

    /// Ends a request with an error, at its shard and at its rank.
    pub(super) fn fail(&mut self, rid: Rid, (status, message): Refusal, actions: &mut Actions<F>) {
        self.abort_at_rank(rid, actions);
        if let Some(place) = self.remove(rid) {
            self.counters.failed += 1;
            end(place, Action::Fail { rid, status, kind: "error", message }, actions);
        }
    }

    pub(super) fn fail_where(
        &mut self,
        refusal: &Refusal,
        actions: &mut Actions<F>,
        which: impl Fn(Rid, &Place<F>) -> bool,
    ) {
        for rid in self.select(which) {
            self.fail(rid, refusal.clone(), actions);
        }
    }

    pub(super) fn select(&self, which: impl Fn(Rid, &Place<F>) -> bool) -> Vec<Rid> {
        self.table.iter().filter(|(rid, place)| which(**rid, place)).map(|(&rid, _)| rid).collect()
    }

    /// Tells the rank of a request to end it, once. Returns whether it was told now.
    pub(super) fn abort_at_rank(&mut self, rid: Rid, actions: &mut Actions<F>) -> bool {
        let Some(Place::Rank { rank, aborted, .. }) = self.table.get_mut(&rid) else { return false };
        if std::mem::replace(aborted, true) {
            return false;
        }
        actions.push(Action::Abort { rid, rank: *rank, receiver_epoch: self.ranks[*rank].epoch });
        true
    }

    /// Ends a request whose client is gone: at its rank, whose finished row closes it, or here while it waits.
    pub(super) fn abort(&mut self, rid: Rid, actions: &mut Actions<F>) {
        match self.table.get(&rid) {
            None => {}
            Some(Place::Rank { .. }) => {
                let told = self.abort_at_rank(rid, actions);
                self.counters.aborts += u64::from(told);
            }
            Some(Place::Waiting { .. }) => {
                self.counters.aborts += 1;
                if let Some(place) = self.remove(rid) {
                    let message = "aborted".to_owned();
                    end(place, Action::Fail { rid, status: 0, kind: "abort", message }, actions);
                }
            }
        }
    }

    pub(super) fn client_abort(&mut self, from: Peer, rid: Rid, actions: &mut Actions<F>) {
        if self.admit(Side::Worker, from, actions) && self.own_id(from, rid, actions) {
            self.abort(rid, actions);
        }
    }

    pub(super) fn fail_all(&mut self, message: String, actions: &mut Actions<F>) {
        self.fail_where(&(503, message.clone()), actions, |_, _| true);
        self.closed = Some(message);
    }

    /// A rank's finished row: it ends a request that is at that rank, and nothing else.
    pub(super) fn finish(&mut self, rid: Rid, at: usize) {
        if self.table.get(&rid).is_some_and(|place| at_rank(place, at)) {
            self.remove(rid);
            self.counters.finished += 1;
        } else {
            self.counters.stray += 1;
        }
    }
}

/// Ends a request at its shard, which does not know yet of one that waits.
fn end<F>(place: Place<F>, fail: Action<F>, actions: &mut Actions<F>) {
    if let Place::Waiting { mut request, .. } = place {
        actions.push(open(&mut request, None));
    }
    actions.push(fail);
}
