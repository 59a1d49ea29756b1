//! The router without I/O: events in, actions out. Threads only carry bytes.
//!
//! What holds after every event: a request in the table was opened at its shard and has not been told to end; one that
//! left it had exactly one `Fail`, or a finished row of its rank; each booked dispatch belongs to a request in the table
//! or is covered by its rank's next report.

mod control;
mod ends;
mod kept;
mod links;
mod peers;
mod requests;

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use super::event::{Action, Event, Nanos, Request, Share, Side};
use super::groups::Groups;
use super::link::Link;
use crate::dispatch::{DpBudget, LoadBalanceMethod};
use crate::log::Level;
use crate::stats::Counters;
use crate::wire::{Load, Rid, RidMap, Route};
use kept::{Keeper, Kept};

/// Settings that hold for the life of a router.
#[derive(Clone, Debug)]
pub struct CoreConfig {
    /// Life of this control process, from 1.
    pub epoch: u32,
    /// Hash of the message definitions that this build speaks.
    pub schema: u64,
    /// How ranks are chosen.
    pub method: LoadBalanceMethod,
    /// Present life of each rank; their number is the data-parallel size.
    pub rank_epochs: Vec<u32>,
    /// Present life of each HTTP worker.
    pub worker_epochs: Vec<u32>,
    /// How long a request waits while no rank is active.
    pub rank_wait: Duration,
    /// Most requests beyond those that the active ranks run at once.
    pub max_queued: usize,
    /// Most prompt tokens that wait to be computed; a prompt alone may be longer.
    pub max_queued_tokens: u64,
    /// Most requests in flight of one HTTP worker.
    pub max_per_worker: usize,
    /// Most bytes of requests' frames that are kept until their requests end, so that they could be sent once more.
    pub resume_memory: usize,
}

/// Where a request is.
#[derive(Debug)]
enum Place<F> {
    Waiting { since: Nanos, request: Box<Request<F>> },
    Rank { rank: usize, dispatch: u64, aborted: bool, room: Option<u64>, kept: Option<Kept<F>> },
}

/// One rank, beside its budget.
#[derive(Clone, Debug)]
pub struct RankView {
    /// Its present life.
    pub epoch: u32,
    /// Whether its HELLO came.
    pub greeted: bool,
    /// Requests that were sent to it and have not ended.
    pub in_flight: usize,
    /// Requests sent to it, ever.
    pub dispatched: u64,
    /// Most requests that it runs at once, 0 if nobody said.
    pub max_running: usize,
    /// Its last load report.
    pub load: Load,
    /// When its last frame came; 0 for never.
    pub seen: Nanos,
    /// The life that supervision takes as ready, 0 for none.
    told: u32,
    /// Whether the ranks themselves take it as able.
    able: bool,
    /// Why it is not active, for clients.
    reason: String,
}

/// The router's state.
#[derive(Debug)]
pub struct Core<F> {
    config: CoreConfig,
    budget: DpBudget,
    ranks: Vec<RankView>,
    rank_links: Vec<Link>,
    worker_links: Vec<Link>,
    table: RidMap<Rid, Place<F>>,
    /// How many of them are of each worker.
    per_worker: Vec<usize>,
    /// Bootstrap rooms of the requests in the table.
    rooms: HashMap<u64, Rid>,
    waiting: VecDeque<Rid>,
    /// Prompt tokens of those that wait.
    waiting_tokens: u64,
    /// Prompt tokens that the ranks have seen and not computed, as they last said.
    pending_tokens: u64,
    /// Requests that the active ranks run at once.
    running: usize,
    keeper: Keeper,
    groups: Groups,
    counters: Counters,
    /// Why no further request is taken, once none is.
    closed: Option<String>,
    complained: [bool; 2],
}

type Actions<F> = Vec<Action<F>>;

/// Status and line of a refusal.
type Refusal = (u16, String);

impl<F: Share> Core<F> {
    /// A router whose ranks are all still to come.
    pub fn new(config: CoreConfig) -> Self {
        let ranks = config.rank_epochs.len();
        let mut budget = DpBudget::new(ranks);
        (0..ranks).for_each(|rank| budget.set_active(rank, false));
        let view = |&epoch: &u32| RankView {
            epoch,
            greeted: false,
            in_flight: 0,
            dispatched: 0,
            max_running: 0,
            load: Load::default(),
            seen: 0,
            told: 0,
            able: true,
            reason: "it is starting".to_owned(),
        };
        Self {
            budget,
            ranks: config.rank_epochs.iter().map(view).collect(),
            rank_links: config.rank_epochs.iter().copied().map(Link::new).collect(),
            worker_links: config.worker_epochs.iter().copied().map(Link::new).collect(),
            table: RidMap::default(),
            per_worker: vec![0; config.worker_epochs.len()],
            rooms: HashMap::new(),
            waiting: VecDeque::new(),
            waiting_tokens: 0,
            pending_tokens: 0,
            running: 0,
            keeper: Keeper::default(),
            groups: Groups::default(),
            counters: Counters::default(),
            closed: None,
            complained: [false; 2],
            config,
        }
    }

    /// Takes an event and appends what is to be done to `actions`.
    pub fn handle(&mut self, event: Event<'_, F>, now: Nanos, actions: &mut Actions<F>) {
        match event {
            Event::Hello { side, from, schema, name } => self.hello(side, from, schema, &name, now, actions),
            Event::Request { from, request } => self.request(from, request, now, actions),
            Event::Abort { from, rid } => self.client_abort(from, rid, actions),
            Event::Acknowledge { from, number } => {
                if self.admit(Side::Worker, from, actions) {
                    let route = Route { worker: from.number, epoch: (from.epoch & 0xFFF) as u16 };
                    actions.push(Action::Acknowledge { route, number });
                }
            }
            Event::Control { from, id, ask, frame } => self.control(from, id, ask, frame, actions),
            Event::Batch { from, last_dispatch, load, rows } => {
                self.batch(from, last_dispatch, load, rows, now, actions);
            }
            Event::Reply { side, from, id, frame } => {
                if self.admit(side, from, actions) {
                    self.counters.replies += 1;
                    actions.push(Action::Forward { id, frame });
                }
            }
            Event::ActiveRanks { from, active } => {
                if self.admit(Side::Rank, from, actions) {
                    for (rank, able) in (0..self.ranks.len()).zip(active) {
                        self.ranks[rank].able = able;
                        self.refresh_rank(rank, now, actions);
                    }
                }
            }
            Event::Malformed { side, reason } => {
                self.counters.malformed += 1;
                if !std::mem::replace(&mut self.complained[side as usize], true) {
                    actions.push(Action::Log(Level::Warning, format!("a {} sent no message: {reason}", word(side))));
                }
            }
            Event::Unknown { side, number, kind } => {
                self.counters.unknown += 1;
                self.complain(side, number, actions, || format!("kind {kind} does not belong here"));
            }
            Event::RankState { rank, epoch, active: true, max_running, .. } => {
                self.rank_up(rank, epoch, max_running, now, actions);
            }
            Event::RankState { rank, epoch, reason, .. } => self.rank_down(rank, epoch, reason, now, actions),
            Event::WorkerDown { worker, epoch } => self.worker_down(worker, epoch, actions),
            Event::WorkerCut { route } => self.worker_cut(route, actions),
            Event::StopMatch { rid } => {
                if self.abort_at_rank(rid, actions) {
                    self.counters.stop_matches += 1;
                }
            }
            Event::Unsent { rid } => {
                self.counters.unsent += 1;
                self.fail(rid, (503, "the queue to the rank is full".to_owned()), actions);
            }
            Event::FailAll { message } => self.fail_all(message, actions),
            Event::Drain => {
                self.closed.get_or_insert_with(|| "the server is shutting down".to_owned());
            }
            Event::Tick => {}
        }
        self.expire(now, actions);
    }

    /// When the core wants to be called again at the latest, if it does.
    pub fn deadline(&self) -> Option<Nanos> {
        self.waiting.iter().find_map(|rid| match self.table.get(rid) {
            Some(Place::Waiting { since, .. }) => Some(since.saturating_add(self.rank_wait_ns())),
            _ => None,
        })
    }

    /// Requests that were taken and have not ended.
    pub fn in_flight(&self) -> usize {
        self.table.len()
    }

    /// Requests that wait for a rank to become active.
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Prompt tokens that wait to be computed: for a rank, on their way to one, or there.
    pub fn queued_tokens(&self) -> u64 {
        self.waiting_tokens.saturating_add(self.budget.unseen_tokens()).saturating_add(self.pending_tokens)
    }

    /// Bytes of requests' frames that are kept.
    pub fn kept_bytes(&self) -> usize {
        self.keeper.bytes()
    }

    /// Groups of which members are still to come.
    pub fn open_groups(&self) -> usize {
        self.groups.len()
    }

    /// Bootstrap rooms that a request is in.
    pub fn rooms(&self) -> usize {
        self.rooms.len()
    }

    /// What was counted.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// What each rank is charged with.
    pub fn budget(&self) -> &DpBudget {
        &self.budget
    }

    /// Each rank.
    pub fn ranks(&self) -> &[RankView] {
        &self.ranks
    }

    /// Settings.
    pub fn config(&self) -> &CoreConfig {
        &self.config
    }

    /// Present life of each worker, and whether it has said hello.
    pub fn workers(&self) -> impl Iterator<Item = (u32, bool)> {
        self.worker_links.iter().map(|link| (link.epoch, link.greeted))
    }

    fn rank_wait_ns(&self) -> Nanos {
        Nanos::try_from(self.config.rank_wait.as_nanos()).unwrap_or(Nanos::MAX)
    }
}

fn at_rank<F>(place: &Place<F>, at: usize) -> bool {
    matches!(place, Place::Rank { rank, .. } if *rank == at)
}

/// The upper bits of every request id that this life of a worker mints.
fn life_of(worker: usize, epoch: u32) -> u64 {
    (worker as u64) << 12 | u64::from(epoch & 0xFFF)
}

fn word(side: Side) -> &'static str {
    match side {
        Side::Worker => "worker",
        Side::Rank => "rank",
    }
}
