//! A request's way to a rank.

use std::collections::hash_map::Entry;

use super::super::event::{Action, Nanos, Peer, Request, Share, Side};
use super::{Actions, Core, Place, Refusal};
use crate::dispatch::{DispatchError, Dispatched, LoadBalanceMethod, Prompt};
use crate::wire::{Rid, TextOptions};

impl<F: Share> Core<F> {
    pub(super) fn request(&mut self, from: Peer, request: Request<F>, now: Nanos, actions: &mut Actions<F>) {
        let rid = request.rid;
        if !self.admit(Side::Worker, from, actions) || !self.own_id(from, rid, actions) {
            return;
        }
        if self.table.contains_key(&rid) {
            self.counters.duplicates += 1;
            self.complain(Side::Worker, from.number, actions, || format!("request {:#x} is live already", rid.0));
            return;
        }
        self.counters.requests += 1;
        let refusal = match &request.text {
            Err(reason) => Some((400, reason.clone())),
            Ok(_) => self.full(rid, u64::from(request.tokens)).or_else(|| self.take_room(&request)),
        };
        if let Some(refusal) = refusal {
            self.refuse(request, refusal, actions);
        } else if let Some(request) = self.place(request, actions) {
            self.wait(request, now);
        }
    }

    fn wait(&mut self, request: Request<F>, since: Nanos) {
        self.waiting.push_back(request.rid);
        self.waiting_tokens += u64::from(request.tokens);
        self.enter(request.rid, Place::Waiting { since, request: Box::new(request) });
    }

    fn enter(&mut self, rid: Rid, place: Place<F>) {
        self.table.insert(rid, place);
        if let Some(count) = self.per_worker.get_mut(usize::from(rid.worker())) {
            *count += 1;
        }
    }

    /// Takes a request out of the table, and nothing else.
    pub(super) fn leave(&mut self, rid: Rid) -> Option<Place<F>> {
        let place = self.table.remove(&rid)?;
        if let Some(count) = self.per_worker.get_mut(usize::from(rid.worker())) {
            *count -= 1;
        }
        Some(place)
    }

    /// Why the request of so many prompt tokens can't be taken now.
    fn full(&self, rid: Rid, tokens: u64) -> Option<Refusal> {
        if let Some(message) = &self.closed {
            return Some((503, message.clone()));
        }
        if self.table.len() >= self.running.saturating_add(self.config.max_queued) {
            return Some((503, format!("the server is busy: {} requests are in flight", self.table.len())));
        }
        if self.per_worker.get(usize::from(rid.worker())).is_some_and(|count| *count >= self.config.max_per_worker) {
            let most = self.config.max_per_worker;
            return Some((503, format!("the server is busy: {most} requests of one HTTP worker are in flight")));
        }
        let queued = self.queued_tokens();
        // What no queue has room for is taken when nothing else waits: to wait longer would not help it.
        (queued > 0 && queued.saturating_add(tokens) > self.config.max_queued_tokens)
            .then(|| (503, format!("the server is busy: {queued} prompt tokens wait to be computed")))
    }

    /// Counts anew what the active ranks run at once: one of them has changed.
    pub(super) fn count_running(&mut self) {
        let active = self.budget.ranks().iter().zip(&self.ranks).filter(|(budget, _)| budget.active());
        self.running = active.map(|(_, rank)| rank.max_running).sum();
    }

    /// Notes which request is in a room; the refusal of one whose room is taken.
    fn take_room(&mut self, request: &Request<F>) -> Option<Refusal> {
        let room = request.room?;
        match self.rooms.entry(room) {
            Entry::Occupied(_) => Some((400, format!("bootstrap_room {room} is in use by a request in flight"))),
            Entry::Vacant(entry) => {
                entry.insert(request.rid);
                None
            }
        }
    }

    /// Empties the room of a request, if that is its own.
    pub(super) fn leave_room(&mut self, rid: Rid, room: Option<u64>) {
        if let Some(room) = room
            && self.rooms.get(&room) == Some(&rid)
        {
            self.rooms.remove(&room);
        }
    }

    pub(super) fn refuse(&mut self, mut request: Request<F>, (status, message): Refusal, actions: &mut Actions<F>) {
        self.counters.refused += 1;
        self.leave_room(request.rid, request.room);
        if let Some(group) = &request.group {
            self.groups.settle(request.rid, group, None);
        }
        actions.push(open(&mut request, None));
        actions.push(Action::Fail { rid: request.rid, status, kind: "error", message });
    }

    /// Sends a request to a rank or refuses it; gives it back when no rank is active.
    pub(super) fn place(&mut self, mut request: Request<F>, actions: &mut Actions<F>) -> Option<Request<F>> {
        match self.choose(&request) {
            Ok(Dispatched { rank, dispatch }) => {
                let rid = request.rid;
                if let Some(group) = &request.group {
                    self.groups.settle(rid, group, Some(rank));
                }
                self.counters.dispatched += 1;
                self.ranks[rank].in_flight += 1;
                self.ranks[rank].dispatched += 1;
                let kept = self.keep(&mut request);
                self.enter(rid, Place::Rank { rank, dispatch, aborted: false, room: request.room, kept });
                let receiver_epoch = self.ranks[rank].epoch;
                actions.push(open(&mut request, Some(rank)));
                actions.push(Action::Send { rid, rank, receiver_epoch, attempt: 1, dispatch, frame: request.frame });
                None
            }
            Err(DispatchError::NoActiveRank) => Some(request),
            Err(error) => {
                let status = match error {
                    DispatchError::RankInactive(_) | DispatchError::NoActiveRank => 503,
                    DispatchError::NoSuchRank { .. } | DispatchError::NoRoom | DispatchError::UnknownMethod(_) => 400,
                };
                let message = match error {
                    DispatchError::RankInactive(rank) => format!("{error}: {}", self.ranks[rank].reason),
                    _ => error.to_string(),
                };
                self.refuse(request, (status, message), actions);
                None
            }
        }
    }

    pub(super) fn choose(&mut self, request: &Request<F>) -> Result<Dispatched, DispatchError> {
        let method = self.config.method;
        let mut prompt = Prompt { tokens: u64::from(request.tokens), room: request.room, prefixes: &[] };
        if method == LoadBalanceMethod::CacheAware {
            prompt.prefixes = &request.prefixes;
        }
        if request.rank >= 0 {
            return self.budget.credit(i64::from(request.rank), prompt);
        }
        if method != LoadBalanceMethod::FollowBootstrapRoom
            && let Some(group) = &request.group
            && let Some(rank) = self.groups.rank(request.rid, group)
            && let Ok(dispatched) = self.budget.credit(rank as i64, prompt)
        {
            return Ok(dispatched);
        }
        self.budget.dispatch(method, prompt)
    }

    pub(super) fn place_waiting(&mut self, actions: &mut Actions<F>) {
        for _ in 0..self.waiting.len() {
            let Some(rid) = self.waiting.pop_front() else { break };
            let Some(Place::Waiting { since, request }) = self.leave(rid) else { continue };
            self.waiting_tokens -= u64::from(request.tokens);
            if let Some(request) = self.place(*request, actions) {
                self.wait(request, since);
            }
        }
    }

    pub(super) fn expire(&mut self, now: Nanos, actions: &mut Actions<F>) {
        while self.deadline().is_some_and(|deadline| deadline <= now) {
            let Some(&rid) = self.waiting.front() else { break };
            self.counters.expired += 1;
            let waited = self.config.rank_wait.as_secs_f64();
            self.fail(rid, (503, format!("no rank became active within {waited} s")), actions);
        }
    }
}

/// The action that makes a request known to its shard.
pub(super) fn open<F>(request: &mut Request<F>, rank: Option<usize>) -> Action<F> {
    let text = std::mem::replace(&mut request.text, Ok(TextOptions::default())).unwrap_or_default();
    Action::Open { rid: request.rid, rank, text, stream: request.stream }
}
