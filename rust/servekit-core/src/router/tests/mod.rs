//! What the router promises, told as events and the actions that follow.

mod bounds;
mod operators;
mod promises;

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use super::*;
use crate::dispatch::LoadBalanceMethod;
use crate::log::Level;
use crate::wire::{Group, Load, Rid, Route, TextOptions};

const SECOND: Nanos = 1_000_000_000;

/// Rows as (request, finished).
struct TestRows(Vec<(Rid, bool)>);

impl Rows for TestRows {
    fn rows(&self) -> usize {
        self.0.len()
    }
    fn rid(&self, row: usize) -> Rid {
        self.0[row].0
    }
    fn finished(&self, row: usize) -> bool {
        self.0[row].1
    }
}

/// A core, its links' counters, and what has become of each request.
struct World {
    core: Core<u64>,
    now: Nanos,
    seqs: HashMap<(bool, u16), u64>,
    opened: HashMap<Rid, u32>,
    failed: HashMap<Rid, (u16, String)>,
    sent: HashMap<Rid, (usize, u64)>,
    aborts: Vec<Rid>,
    minted: u64,
    finished: HashSet<Rid>,
}

fn config(ranks: usize, workers: usize) -> CoreConfig {
    CoreConfig {
        epoch: 1,
        schema: 99,
        method: LoadBalanceMethod::TotalRequests,
        rank_epochs: vec![1; ranks],
        worker_epochs: vec![1; workers],
        rank_wait: Duration::from_secs(30),
        max_queued: 8,
        max_queued_tokens: u64::MAX,
        max_per_worker: usize::MAX,
        resume_memory: 100_000,
    }
}

impl World {
    fn new(config: CoreConfig) -> Self {
        let workers = config.worker_epochs.len();
        let core = Core::new(config);
        let mut world = Self {
            core,
            now: SECOND,
            seqs: HashMap::new(),
            opened: HashMap::new(),
            failed: HashMap::new(),
            sent: HashMap::new(),
            aborts: Vec::new(),
            minted: 0,
            finished: HashSet::new(),
        };
        (0..workers).for_each(|worker| drop(world.hello(Side::Worker, worker as u16, 1)));
        world
    }

    /// A world whose ranks are all active and run up to 4 requests each.
    fn ready(config: CoreConfig) -> Self {
        let ranks = config.rank_epochs.len();
        let mut world = Self::new(config);
        for rank in 0..ranks {
            world.hello(Side::Rank, rank as u16, 1);
            world.rank_state(rank, true);
        }
        world
    }

    fn peer(&mut self, side: Side, number: u16) -> Peer {
        let seq = self.seqs.entry((side == Side::Rank, number)).or_insert(1);
        *seq += 1;
        let epoch = match side {
            Side::Rank => self.core.ranks()[usize::from(number)].epoch,
            Side::Worker => self.core.workers().nth(usize::from(number)).unwrap().0,
        };
        Peer { number, epoch, receiver_epoch: 1, seq: *seq }
    }

    fn handle(&mut self, event: Event<'_, u64>) -> Vec<Action<u64>> {
        let mut actions = Vec::new();
        self.core.handle(event, self.now, &mut actions);
        for action in &actions {
            match action {
                Action::Open { rid, .. } => *self.opened.entry(*rid).or_default() += 1,
                Action::Fail { rid, status, message, .. } => {
                    assert!(self.opened.contains_key(rid), "failed before it was opened");
                    let before = self.failed.insert(*rid, (*status, message.clone()));
                    assert!(before.is_none() && !self.finished.contains(rid), "two terminal events");
                }
                Action::Send { rid, rank, dispatch, attempt, .. } => {
                    assert!(!self.failed.contains_key(rid), "sent after its end");
                    assert_eq!(*attempt, 1);
                    assert_eq!(self.sent.insert(*rid, (*rank, *dispatch)), None, "sent twice");
                }
                Action::Abort { rid, .. } => self.aborts.push(*rid),
                _ => {}
            }
        }
        actions
    }

    fn hello(&mut self, side: Side, number: u16, epoch: u32) -> Vec<Action<u64>> {
        self.seqs.insert((side == Side::Rank, number), 1);
        let from = Peer { number, epoch, receiver_epoch: 0, seq: 1 };
        self.handle(Event::Hello { side, from, schema: 99, name: "test".to_owned() })
    }

    fn rank_state(&mut self, rank: usize, active: bool) -> Vec<Action<u64>> {
        let reason = "killed by signal 9".to_owned();
        self.handle(Event::RankState { rank, epoch: None, active, reason, max_running: 4 })
    }

    fn mint(&mut self, worker: u16) -> Rid {
        self.minted += 1;
        Rid::mint(worker, self.core.workers().nth(usize::from(worker)).unwrap().0, self.minted)
    }

    fn request_with(&mut self, change: impl Fn(&mut Request<u64>)) -> Rid {
        self.request_of_with(0, change)
    }

    fn request_of(&mut self, worker: u16) -> Rid {
        self.request_of_with(worker, |_| {})
    }

    fn request_of_with(&mut self, worker: u16, change: impl Fn(&mut Request<u64>)) -> Rid {
        let rid = self.mint(worker);
        let from = self.peer(Side::Worker, worker);
        let mut request = Request {
            rid,
            rank: -1,
            tokens: 10,
            stream: true,
            group: None,
            room: None,
            prefixes: Vec::new(),
            text: Ok(TextOptions::default()),
            bytes: 100,
            frame: rid.0,
        };
        change(&mut request);
        self.handle(Event::Request { from, request });
        rid
    }

    fn request(&mut self) -> Rid {
        self.request_with(|_| {})
    }

    fn abort(&mut self, rid: Rid) {
        let from = self.peer(Side::Worker, rid.worker());
        self.handle(Event::Abort { from, rid });
    }

    /// A step of a rank that ends `finished` and reports an empty rank that has seen every dispatch to it.
    fn step(&mut self, rank: u16, rows: &[(Rid, bool)]) -> Vec<Action<u64>> {
        let last_dispatch =
            self.sent.values().filter(|(at, _)| *at == usize::from(rank)).map(|(_, number)| *number).max().unwrap_or(0);
        let from = self.peer(Side::Rank, rank);
        let rows = TestRows(rows.to_vec());
        let actions = self.handle(Event::Batch { from, last_dispatch, load: Some(Load::default()), rows: Ok(&rows) });
        for (rid, _) in rows.0.into_iter().filter(|(_, finished)| *finished) {
            // A row of a request that has ended already says nothing to anybody.
            if self.sent.get(&rid).is_some_and(|(at, _)| *at == usize::from(rank)) && !self.failed.contains_key(&rid) {
                self.finished.insert(rid);
            }
        }
        actions
    }

    /// Nothing is left: no entry, no wait, no group, no charge.
    fn assert_empty(&self) {
        assert_eq!((self.core.in_flight(), self.core.waiting(), self.core.open_groups()), (0, 0, 0));
        assert_eq!(self.core.rooms(), 0);
        for (budget, view) in self.core.budget().ranks().iter().zip(self.core.ranks()) {
            assert_eq!((budget.requests(), budget.tokens(), view.in_flight), (0, 0, 0));
        }
    }

    fn status(&self, rid: Rid) -> Option<u16> {
        self.failed.get(&rid).map(|(status, _)| *status)
    }
}
