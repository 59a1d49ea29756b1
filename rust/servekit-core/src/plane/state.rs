//! What the control process holds, for `/debug/state` and for the state page.

use serde_json::{Map, Value, json};

use crate::fanout::PeerCounters;
use crate::router::frames::Frames;
use crate::router::{Core, Event};
use crate::state_page::{Control, Rank, StatePage};

/// What the threads beside the router hold.
pub(super) struct Queues<'a> {
    /// Each shard.
    pub(super) shards: Vec<Value>,
    /// Tasks that wait for the fan-out.
    pub(super) fanout: usize,
    /// Messages that wait, by rank.
    pub(super) backlogs: Vec<usize>,
    /// Counters by worker.
    pub(super) peers: &'a [PeerCounters],
}

/// The state as JSON.
pub(super) fn snapshot(core: &Core<Frames>, queues: &Queues<'_>) -> Value {
    let ranks = core.ranks().iter().zip(core.budget().ranks()).zip(&queues.backlogs).enumerate();
    let ranks: Vec<Value> = ranks
        .map(|(rank, ((view, budget), backlog))| {
            json!({
                "rank": rank,
                "epoch": view.epoch,
                "active": budget.active(),
                "greeted": view.greeted,
                "in_flight": view.in_flight,
                "dispatched": view.dispatched,
                "requests": budget.requests(),
                "tokens": budget.tokens(),
                "unseen_tokens": budget.unseen_tokens(),
                "last_dispatch_seen": budget.report().last_dispatch,
                "backlog": backlog,
            })
        })
        .collect();
    let workers: Vec<Value> = core
        .workers()
        .zip(queues.peers)
        .enumerate()
        .map(|(worker, ((epoch, greeted), peer))| {
            let mut state = json!({ "worker": worker, "epoch": epoch, "greeted": greeted });
            for (name, count) in peer.named() {
                state[name] = count.into();
            }
            state
        })
        .collect();
    let counters: Map<String, Value> =
        core.counters().named().map(|(name, count)| (name.to_owned(), count.into())).collect();
    json!({
        "epoch": core.config().epoch,
        "pid": std::process::id(),
        "method": core.config().method.name(),
        "in_flight": core.in_flight(),
        "waiting_for_rank": core.waiting(),
        "queued_tokens": core.queued_tokens(),
        "kept_bytes": core.kept_bytes(),
        "open_groups": core.open_groups(),
        "ranks": ranks,
        "workers": workers,
        "shards": queues.shards,
        "fanout_queued": queues.fanout,
        "counters": counters,
    })
}

/// Which ranks have to be shown anew: with hundreds of them, all would cost more than a message.
#[derive(Debug, Default)]
pub(super) struct Changed {
    all: bool,
    /// Some may be there twice.
    ranks: Vec<usize>,
}

impl Changed {
    /// What an event changes by itself; a request changes the rank that it is sent to.
    pub(super) fn by(&mut self, event: &Event<'_, Frames>) {
        match event {
            Event::Request { .. } | Event::Acknowledge { .. } => {}
            Event::Batch { from, .. } => self.rank(usize::from(from.number)),
            _ => self.all = true,
        }
    }

    /// One rank.
    pub(super) fn rank(&mut self, rank: usize) {
        self.ranks.push(rank);
    }
}

/// Writes totals and the loads that have changed where every process can read them.
pub(super) fn publish(core: &Core<Frames>, page: &StatePage, changed: &mut Changed) {
    let counters = core.counters();
    for (field, value) in [
        (Control::InFlight, core.in_flight() as u64),
        (Control::Waiting, core.waiting() as u64),
        (Control::QueuedTokens, core.queued_tokens()),
        (Control::Dropped, counters.dropped()),
        (Control::Fenced, counters.fenced),
        (Control::Refused, counters.refused),
        (Control::Aborts, counters.aborts),
    ] {
        page.set_control(field, value);
    }
    if std::mem::take(&mut changed.all) {
        changed.ranks.clear();
        changed.ranks.extend(0..core.ranks().len());
    }
    for rank in changed.ranks.drain(..) {
        let (Some(view), Some(budget)) = (core.ranks().get(rank), core.budget().ranks().get(rank)) else { continue };
        for (field, value) in [
            (Rank::Active, u64::from(budget.active())),
            (Rank::Running, u64::from(view.load.running)),
            (Rank::Waiting, u64::from(view.load.waiting)),
            (Rank::HeldTokens, view.load.held_tokens),
            (Rank::PendingTokens, view.load.pending_tokens),
            (Rank::PoolTokens, view.load.pool_tokens),
            (Rank::Dispatched, view.dispatched),
            (Rank::LastBeatNs, view.seen),
            (Rank::Requests, budget.requests()),
        ] {
            page.set_rank(rank, field, value);
        }
    }
}
