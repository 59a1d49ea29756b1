//! The control process's parts in virtual time, between workers and ranks that fail and links that lose.

use std::cmp::{Ordering, Reverse};
use std::collections::{BinaryHeap, HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use servekit_core::detok::{Shard, ShardOutput, shard_of};
use servekit_core::dispatch::LoadBalanceMethod;
use servekit_core::log::Level;
use servekit_core::router::{Action, Ask, Core, CoreConfig, Event, Peer, Request, Rows, Side};
use servekit_core::wire::{Load, Rid, Route, ScannedBatch};

use super::bodies::{VOCABULARY, text_rows};
use super::ledger::Ledger;
use super::peers::{Link, MAX_RUNNING, Rank, Worker};
use super::random::Random;

pub(crate) const MS: u64 = 1_000_000;
const SCHEMA: u64 = 99;
const MAX_QUEUED: usize = 8;
const MAX_QUEUED_TOKENS: u64 = 10_000;
const RESUME_MEMORY: usize = 100_000;

/// How hard a life is; each number is "once in so many", 0 for never.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Chaos {
    pub(crate) lost: u64,
    pub(crate) twice: u64,
    pub(crate) late: u64,
    /// Steps in which a rank names a request of somebody else.
    pub(crate) strays: u64,
    /// Steps that report an old load, or none.
    pub(crate) stale: u64,
    /// Requests that the pipe to a rank does not take.
    pub(crate) unsent: u64,
}

impl Chaos {
    pub(crate) const NONE: Self = Self { lost: 0, twice: 0, late: 0, strays: 0, stale: 0, unsent: 0 };
}

/// A message to the control process.
#[derive(Clone)]
pub(crate) enum Up {
    Hello,
    Request(Request<u64>),
    Abort(Rid),
    Ask(Rid),
    Reply(Rid),
    Mask(Vec<bool>),
    Batch { last_dispatch: u64, load: Option<Load>, body: Option<Arc<ScannedBatch>> },
}

/// A message of the control process.
#[derive(Clone)]
pub(crate) enum Down {
    Hello,
    Request { rid: Rid, dispatch: u64 },
    Abort(Rid),
    Ask(Rid),
    Text(Vec<u8>),
    Answer,
}

/// Something that will happen.
#[derive(Clone)]
pub(crate) enum What {
    Up {
        side: Side,
        number: usize,
        link: Link,
        message: Up,
    },
    ToRank {
        rank: usize,
        link: Link,
        message: Down,
    },
    ToWorker {
        route: Route,
        link: Link,
        message: Down,
    },
    Step {
        rank: usize,
        epoch: u32,
    },
    Ask {
        worker: usize,
    },
    ClientGone {
        rid: Rid,
    },
    StopMatch {
        control: u32,
        rid: Rid,
    },
    Kill {
        side: Side,
        number: usize,
    },
    Freeze {
        side: Side,
        number: usize,
    },
    /// Supervision tells of an end.
    Down {
        side: Side,
        number: usize,
        epoch: u32,
    },
    Start {
        side: Side,
        number: usize,
        epoch: u32,
    },
    /// Supervision tells that a rank is ready.
    Ready {
        rank: usize,
        epoch: u32,
    },
    RestartControl,
    MeetControl {
        side: Side,
        number: usize,
        epoch: u32,
        control: u32,
    },
    Mask,
    Cut {
        worker: usize,
    },
    Settle,
}

struct Entry {
    at: u64,
    order: u64,
    what: What,
}

impl PartialEq for Entry {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}
impl Eq for Entry {}
impl PartialOrd for Entry {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Entry {
    fn cmp(&self, other: &Self) -> Ordering {
        (self.at, self.order).cmp(&(other.at, other.order))
    }
}

/// A link, in one direction; arrivals keep their order unless chaos says otherwise.
#[derive(PartialEq, Eq, Hash)]
enum Pipe {
    Up(bool, usize),
    Rank(usize),
    Worker(Route),
}

pub(crate) struct World {
    pub(crate) random: Random,
    pub(crate) now: u64,
    pub(crate) core: Core<u64>,
    pub(crate) control: u32,
    pub(crate) workers: Vec<Worker>,
    pub(crate) ranks: Vec<Rank>,
    pub(crate) ledger: Ledger,
    pub(crate) method: LoadBalanceMethod,
    pub(crate) chaos: Chaos,
    /// Events that happened.
    pub(crate) events: u64,
    shards: Vec<Shard>,
    out: ShardOutput,
    queue: BinaryHeap<Reverse<Entry>>,
    orders: u64,
    last: HashMap<Pipe, u64>,
    rank_seqs: Vec<u64>,
    /// Worker lives that may be sent to, and the last number on their links.
    greeted: HashMap<Route, (u32, u64)>,
    cut: HashSet<Route>,
    fails: u64,
}

impl World {
    pub(crate) fn new(seed: u64, ranks: usize, workers: usize, shards: usize, method: LoadBalanceMethod) -> Self {
        let worker = |_| Worker {
            epoch: 1,
            alive: true,
            frozen_until: 0,
            seq: 0,
            incoming: Default::default(),
            minted: 0,
            live: Default::default(),
        };
        let mut world = Self {
            random: Random::new(seed),
            now: 1000 * MS,
            core: core(1, method, vec![1; ranks], vec![1; workers]),
            control: 1,
            workers: (0..workers).map(worker).collect(),
            ranks: (0..ranks).map(|_| Rank::new(1, 1)).collect(),
            ledger: Ledger::default(),
            method,
            chaos: Chaos::NONE,
            events: 0,
            shards: (0..shards).map(|index| Shard::new(index, shards, Some(VOCABULARY.clone()))).collect(),
            out: ShardOutput::default(),
            queue: BinaryHeap::new(),
            orders: 0,
            last: HashMap::new(),
            rank_seqs: vec![0; ranks],
            greeted: HashMap::new(),
            cut: HashSet::new(),
            fails: 0,
        };
        for number in 0..workers {
            world.workers[number].incoming.meet(1);
            world.send_up(Side::Worker, number, Up::Hello);
        }
        for rank in 0..ranks {
            world.send_up(Side::Rank, rank, Up::Hello);
            world.after(5 * MS, What::Ready { rank, epoch: 1 });
        }
        world
    }

    pub(crate) fn after(&mut self, delay: u64, what: What) {
        self.at(self.now + delay, what);
    }

    fn at(&mut self, at: u64, what: What) {
        self.orders += 1;
        self.queue.push(Reverse(Entry { at, order: self.orders, what }));
    }

    /// Lets everything happen that is due, and what follows from it.
    pub(crate) fn run(&mut self) {
        loop {
            let next = self.queue.peek().map(|Reverse(entry)| entry.at);
            match (self.core.deadline(), next) {
                (Some(deadline), next) if next.is_none_or(|next| deadline <= next) => {
                    self.now = self.now.max(deadline);
                    self.tell(Event::Tick, None);
                }
                (_, Some(_)) => {
                    let Some(Reverse(entry)) = self.queue.pop() else { return };
                    self.now = entry.at;
                    self.happen(entry.what);
                }
                (_, None) => return,
            }
        }
    }

    // Links

    fn transmit(&mut self, pipe: Pipe, what: What) {
        let delay = self.random.between(10_000, 2 * MS);
        let last = self.last.entry(pipe).or_default();
        let mut at = (self.now + delay).max(*last);
        if self.random.once_in(self.chaos.lost) {
            return;
        }
        if self.random.once_in(self.chaos.late) {
            at += self.random.between(MS, 20 * MS);
        } else {
            *last = at;
        }
        if self.random.once_in(self.chaos.twice) {
            let again = at + self.random.below(20 * MS);
            self.at(again, what.clone());
        }
        self.at(at, what);
    }

    pub(crate) fn send_up(&mut self, side: Side, number: usize, message: Up) {
        let (seq, epoch, control) = match side {
            Side::Worker => {
                let worker = &mut self.workers[number];
                (&mut worker.seq, worker.epoch, worker.incoming.control_epoch)
            }
            Side::Rank => {
                let rank = &mut self.ranks[number];
                (&mut rank.seq, rank.epoch, rank.incoming.control_epoch)
            }
        };
        *seq += 1;
        let receiver_epoch = if matches!(message, Up::Hello) { 0 } else { control };
        let link = Link { sender_epoch: epoch, receiver_epoch, seq: *seq };
        self.transmit(Pipe::Up(side == Side::Rank, number), What::Up { side, number, link, message });
    }

    fn send_to_rank(&mut self, rank: usize, receiver_epoch: u32, message: Down) {
        self.rank_seqs[rank] += 1;
        let link = Link { sender_epoch: self.control, receiver_epoch, seq: self.rank_seqs[rank] };
        self.transmit(Pipe::Rank(rank), What::ToRank { rank, link, message });
    }

    fn send_to_worker(&mut self, route: Route, message: Down) {
        let Some((epoch, seq)) = self.greeted.get_mut(&route) else { return };
        *seq += 1;
        let link = Link { sender_epoch: self.control, receiver_epoch: *epoch, seq: *seq };
        if self.cut.remove(&route) {
            return;
        }
        self.transmit(Pipe::Worker(route), What::ToWorker { route, link, message });
    }

    // Events

    fn happen(&mut self, what: What) {
        let frozen = match &what {
            What::ToRank { rank, .. } | What::Step { rank, .. } => self.ranks[*rank].frozen_until,
            What::ToWorker { route, .. } => self.workers[usize::from(route.worker)].frozen_until,
            What::Ask { worker } => self.workers[*worker].frozen_until,
            _ => 0,
        };
        if frozen > self.now {
            return self.at(frozen, what);
        }
        self.events += 1;
        match what {
            What::Up { side, number, link, message } => self.arrive(side, number, link, message),
            What::ToRank { rank, link, message } => self.at_rank(rank, link, message),
            What::ToWorker { route, link, message } => self.at_worker(route, link, message),
            What::Step { rank, epoch } => self.step(rank, epoch),
            What::Ask { worker } => self.ask(worker),
            What::ClientGone { rid } => {
                let worker = usize::from(rid.worker());
                if self.workers[worker].alive && self.workers[worker].live.remove(&rid) {
                    self.send_up(Side::Worker, worker, Up::Abort(rid));
                }
            }
            What::StopMatch { control, rid } if control == self.control => self.tell(Event::StopMatch { rid }, None),
            What::StopMatch { .. } => {}
            What::Cut { worker } => {
                let route = Route { worker: worker as u16, epoch: self.workers[worker].epoch as u16 };
                self.cut.insert(route);
                self.tell(Event::WorkerCut { route }, None);
            }
            What::Mask => {
                let rank = self.random.below(self.ranks.len() as u64) as usize;
                let mask = (0..self.ranks.len()).map(|_| !self.random.once_in(3)).collect();
                if self.ranks[rank].alive {
                    self.send_up(Side::Rank, rank, Up::Mask(mask));
                }
            }
            What::Settle => self.settle(),
            what => self.supervise(what),
        }
    }

    fn arrive(&mut self, side: Side, number: usize, link: Link, message: Up) {
        let from = Peer {
            number: number as u16,
            epoch: link.sender_epoch,
            receiver_epoch: link.receiver_epoch,
            seq: link.seq,
        };
        match message {
            Up::Hello => self.tell(Event::Hello { side, from, schema: SCHEMA, name: "simulated".to_owned() }, None),
            Up::Request(request) => self.tell(Event::Request { from, request }, None),
            Up::Abort(rid) => self.tell(Event::Abort { from, rid }, None),
            Up::Ask(id) => {
                let ask = if id.0 % 2 == 0 { Ask::State } else { Ask::LogLevel(Level::Info) };
                self.tell(Event::Control { from, id, ask, frame: id.0 }, None);
            }
            Up::Reply(id) => self.tell(Event::Reply { side, from, id, frame: id.0 }, None),
            Up::Mask(active) => self.tell(Event::ActiveRanks { from, active }, None),
            Up::Batch { last_dispatch, load, body } => {
                let rows: &dyn Rows = match &body {
                    Some(batch) => &**batch,
                    None => &servekit_core::router::frames::NoRows,
                };
                self.tell(
                    Event::Batch { from, last_dispatch, load, rows: Ok(rows) },
                    body.as_ref().map(|body| (from.number, body)),
                );
            }
        }
    }

    /// Tells the core, does what it asks for, and looks whether everything still holds.
    pub(crate) fn tell(&mut self, event: Event<'_, u64>, batch: Option<(u16, &Arc<ScannedBatch>)>) {
        let mut actions = Vec::new();
        self.core.handle(event, self.now, &mut actions);
        while !actions.is_empty() {
            let mut unsent = Vec::new();
            for action in std::mem::take(&mut actions) {
                self.act(action, batch, &mut unsent);
            }
            for rid in unsent {
                self.core.handle(Event::Unsent { rid }, self.now, &mut actions);
            }
        }
        self.check();
    }

    fn act(&mut self, action: Action<u64>, batch: Option<(u16, &Arc<ScannedBatch>)>, unsent: &mut Vec<Rid>) {
        match action {
            Action::Open { rid, rank, text, stream } => {
                self.ledger.opened(rid, self.control);
                let shard = shard_of(rid.0, self.shards.len());
                self.shards[shard].open_at(rank.map(|rank| rank as u16), rid.0, text, stream);
            }
            Action::Fail { rid, status, kind, message } => {
                self.fails += 1;
                let shard = shard_of(rid.0, self.shards.len());
                self.shards[shard].fail(rid.0, status, kind, &message, &mut self.out);
                self.deliver();
            }
            Action::Send { rid, rank, receiver_epoch, attempt, dispatch, frame } => {
                assert_eq!((frame, attempt), (rid.0, 1));
                if self.random.once_in(self.chaos.unsent) {
                    return unsent.push(rid);
                }
                self.ledger.sent(rid, self.control, rank, receiver_epoch);
                self.send_to_rank(rank, receiver_epoch, Down::Request { rid, dispatch });
            }
            Action::Abort { rid, rank, receiver_epoch } => self.send_to_rank(rank, receiver_epoch, Down::Abort(rid)),
            Action::Control { ranks, workers, frame } => {
                workers.into_iter().for_each(|route| self.send_to_worker(route, Down::Ask(Rid(frame))));
                ranks.into_iter().for_each(|(rank, epoch)| self.send_to_rank(rank, epoch, Down::Ask(Rid(frame))));
            }
            Action::Answer { id, .. } | Action::Forward { id, .. } => self.send_to_worker(id.route(), Down::Answer),
            Action::Deliver => {
                let (rank, batch) = batch.expect("a batch to deliver");
                for shard in &mut self.shards {
                    shard.batch_of(rank, batch, &mut self.out);
                }
                self.deliver();
            }
            Action::HelloRank { rank, receiver_epoch } => {
                self.rank_seqs[rank] = 0;
                self.send_to_rank(rank, receiver_epoch, Down::Hello);
            }
            Action::HelloWorker { worker, receiver_epoch } => {
                let route = Route { worker: worker as u16, epoch: receiver_epoch as u16 };
                self.greeted.insert(route, (receiver_epoch, 0));
                self.send_to_worker(route, Down::Hello);
            }
            Action::Acknowledge { .. } | Action::SetLogLevel(_) | Action::ForgetRank { .. } | Action::Log(..) => {}
            Action::ForgetWorker { worker } => self.greeted.retain(|route, _| usize::from(route.worker) != worker),
            Action::Fatal(reason) => panic!("fatal: {reason}"),
        }
    }

    /// What shards said goes to the workers, and stop matches back to the router.
    fn deliver(&mut self) {
        for rid in std::mem::take(&mut self.out.aborts) {
            let delay = self.random.below(3 * MS);
            self.after(delay, What::StopMatch { control: self.control, rid: Rid(rid) });
        }
        for frame in std::mem::take(&mut self.out.frames) {
            for row in text_rows(frame.body.as_ref()) {
                self.ledger.row(&row, self.control, frame.route);
            }
            self.send_to_worker(frame.route, Down::Text(frame.body.as_ref().to_vec()));
        }
    }

    /// What holds after every event.
    fn check(&self) {
        let (core, counters) = (&self.core, self.core.counters());
        let at_ranks: usize = core.ranks().iter().map(|rank| rank.in_flight).sum();
        assert_eq!(at_ranks + core.waiting(), core.in_flight(), "a request is nowhere, or twice");
        let ended = self.fails + counters.finished;
        assert_eq!(core.in_flight() as u64 + ended, counters.requests, "a request was lost, or ended twice");
        let bound = self.ranks.len() * MAX_RUNNING + MAX_QUEUED;
        assert!(core.in_flight() <= bound, "{} requests in flight, {bound} were allowed", core.in_flight());
        let live: usize = self.shards.iter().map(Shard::live).sum();
        assert_eq!(live, at_ranks, "shards and router know of different requests");
        for (budget, rank) in core.budget().ranks().iter().zip(core.ranks()) {
            let unseen = budget.requests() - budget.report().requests;
            assert!(unseen <= rank.in_flight as u64, "{unseen} dispatches are booked, {} live", rank.in_flight);
            assert!(unseen > 0 || budget.unseen_tokens() == 0, "tokens of no dispatch are booked");
        }
        assert!(core.kept_bytes() <= RESUME_MEMORY, "{} bytes of frames are kept", core.kept_bytes());
    }

    /// What holds when all is over: nothing is left anywhere.
    pub(crate) fn assert_over(&self) {
        self.ledger.assert_ended(self.control);
        assert_eq!((self.core.in_flight(), self.core.waiting()), (0, 0));
        assert_eq!((self.core.queued_tokens(), self.core.kept_bytes()), (0, 0));
        for (number, budget) in self.core.budget().ranks().iter().enumerate() {
            assert_eq!((budget.requests(), budget.tokens()), (0, 0), "rank {number} is charged with something");
        }
        for worker in self.workers.iter().filter(|worker| worker.alive) {
            let waits: Vec<_> = worker.live.iter().filter(|rid| self.ledger.was_taken(**rid)).collect();
            assert!(waits.is_empty(), "clients wait for ever: {waits:?}");
        }
    }

    pub(crate) fn counters(&self) -> &servekit_core::stats::Counters {
        self.core.counters()
    }

    /// A new life of the control process knows nothing of the former.
    pub(crate) fn restart_core(&mut self) {
        self.control += 1;
        let ranks = self.ranks.iter().map(|rank| rank.epoch).collect();
        let workers = self.workers.iter().map(|worker| worker.epoch).collect();
        self.core = core(self.control, self.method, ranks, workers);
        let shards = self.shards.len();
        self.shards = (0..shards).map(|index| Shard::new(index, shards, Some(VOCABULARY.clone()))).collect();
        self.rank_seqs = vec![0; self.ranks.len()];
        self.greeted.clear();
        self.cut.clear();
        self.fails = 0;
    }
}

fn core(epoch: u32, method: LoadBalanceMethod, rank_epochs: Vec<u32>, worker_epochs: Vec<u32>) -> Core<u64> {
    Core::new(CoreConfig {
        epoch,
        schema: SCHEMA,
        method,
        rank_epochs,
        worker_epochs,
        rank_wait: Duration::from_secs(30),
        max_queued: MAX_QUEUED,
        max_queued_tokens: MAX_QUEUED_TOKENS,
        max_per_worker: usize::MAX,
        resume_memory: RESUME_MEMORY,
    })
}
