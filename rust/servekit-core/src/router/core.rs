//! The router without I/O: events in, actions out. Threads only carry bytes.
//!
//! What holds after every event: a request in the table was opened at its shard and has not been told to end; one that
//! left it had exactly one `Fail`, or a finished row of its rank; each booked dispatch belongs to a request in the table
//! or is covered by its rank's next report.

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use super::event::{Action, Event, Nanos, Peer, Request, Rows, Side};
use super::groups::{Groups, life};
use super::link::{Link, Verdict};
use crate::dispatch::{DispatchError, Dispatched, DpBudget, LoadBalanceMethod, Report};
use crate::log::Level;
use crate::stats::Counters;
use crate::wire::{Load, Rid, Route};

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
}

/// Where a request is.
#[derive(Debug)]
enum Place<F> {
    Waiting { since: Nanos, request: Box<Request<F>> },
    Rank { rank: usize, dispatch: u64, aborted: bool },
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
    /// Whether supervision takes it as ready.
    told: bool,
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
    table: HashMap<Rid, Place<F>>,
    waiting: VecDeque<Rid>,
    groups: Groups,
    counters: Counters,
    /// Why no further request is taken, once none is.
    closed: Option<String>,
    complained: [bool; 2],
}

type Actions<F> = Vec<Action<F>>;

/// Status and line of a refusal.
type Refusal = (u16, String);

impl<F> Core<F> {
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
            told: false,
            able: true,
            reason: "it is starting".to_owned(),
        };
        Self {
            budget,
            ranks: config.rank_epochs.iter().map(view).collect(),
            rank_links: config.rank_epochs.iter().copied().map(Link::new).collect(),
            worker_links: config.worker_epochs.iter().copied().map(Link::new).collect(),
            table: HashMap::new(),
            waiting: VecDeque::new(),
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
            Event::Control { from, id, state, frame } => self.control(from, id, state, frame, actions),
            Event::Batch { from, last_dispatch, load, rows } => {
                self.batch(from, last_dispatch, load, rows, now, actions);
            }
            Event::Reply { from, id } => {
                if self.admit(Side::Rank, from, actions) {
                    self.counters.replies += 1;
                    actions.push(Action::Forward { id });
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
            Event::RankState { rank, active, reason, max_running } => {
                self.rank_state(rank, active, reason, max_running, now, actions);
            }
            Event::WorkerDown { worker } => self.worker_down(worker, actions),
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

    /// Groups of which members are still to come.
    pub fn open_groups(&self) -> usize {
        self.groups.len()
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

    // ---- links ----

    fn links(&mut self, side: Side) -> &mut Vec<Link> {
        match side {
            Side::Worker => &mut self.worker_links,
            Side::Rank => &mut self.rank_links,
        }
    }

    fn admit(&mut self, side: Side, from: Peer, actions: &mut Actions<F>) -> bool {
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
                return true;
            }
        }
        false
    }

    /// Logs the first thing that is wrong with a peer; the rest is only counted.
    fn complain(&mut self, side: Side, number: u16, actions: &mut Actions<F>, what: impl Fn() -> String) {
        if let Some(link) = self.links(side).get_mut(usize::from(number))
            && !std::mem::replace(&mut link.complained, true)
        {
            actions.push(Action::Log(Level::Warning, format!("{} {number}: {}", word(side), what())));
        }
    }

    fn hello(&mut self, side: Side, from: Peer, schema: u64, name: &str, now: Nanos, actions: &mut Actions<F>) {
        let (own_epoch, number) = (self.config.epoch, usize::from(from.number));
        let Some(link) = self.links(side).get_mut(number) else {
            self.counters.malformed += 1;
            return;
        };
        let newer = from.epoch > link.epoch;
        let verdict = link.clone().greet(own_epoch, from);
        match verdict {
            Verdict::Fenced => self.counters.fenced += 1,
            Verdict::Replayed => self.counters.replayed += 1,
            Verdict::Take { .. } if schema != self.config.schema => actions.push(Action::Fatal(format!(
                "{} {number} ({name}) speaks message schema {schema:#x}, this control process {:#x}",
                word(side),
                self.config.schema
            ))),
            Verdict::Take { .. } => {
                // A newer life before supervision told of the old one's end.
                if newer && side == Side::Worker {
                    self.worker_down(number, actions);
                } else if newer && self.budget.ranks()[number].active() {
                    self.rank_state(number, false, "it was replaced".to_owned(), 0, now, actions);
                }
                self.links(side)[number].greet(own_epoch, from);
                match side {
                    Side::Worker => actions.push(Action::HelloWorker { worker: number, receiver_epoch: from.epoch }),
                    Side::Rank => {
                        let rank = &mut self.ranks[number];
                        (rank.epoch, rank.greeted, rank.able, rank.seen) = (from.epoch, true, true, now);
                        if newer {
                            self.budget.reset(number);
                        }
                        actions.push(Action::HelloRank { rank: number, receiver_epoch: from.epoch });
                        self.refresh_rank(number, now, actions);
                    }
                }
            }
        }
    }

    /// Whether an id leads back to the worker that sent it.
    fn own_id(&mut self, from: Peer, rid: Rid, actions: &mut Actions<F>) -> bool {
        let own = rid.worker() == from.number && u32::from(rid.epoch()) == from.epoch & 0xFFF;
        if !own {
            self.counters.forged += 1;
            self.complain(Side::Worker, from.number, actions, || format!("id {:#x} leads elsewhere", rid.0));
        }
        own
    }

    // ---- requests ----

    fn request(&mut self, from: Peer, mut request: Request<F>, now: Nanos, actions: &mut Actions<F>) {
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
        let text = std::mem::replace(&mut request.text, Ok(Default::default()));
        let refusal = match &text {
            Err(reason) => Some((400, reason.clone())),
            Ok(_) => self.full(),
        };
        actions.push(Action::Open { rid, text: text.unwrap_or_default(), stream: request.stream });
        if let Some(refusal) = refusal {
            self.refuse(&request, refusal, actions);
        } else if let Some(request) = self.place(request, actions) {
            self.waiting.push_back(rid);
            self.table.insert(rid, Place::Waiting { since: now, request: Box::new(request) });
        }
    }

    /// Why no further request can be taken now.
    fn full(&self) -> Option<Refusal> {
        if let Some(message) = &self.closed {
            return Some((503, message.clone()));
        }
        let active = self.budget.ranks().iter().zip(&self.ranks).filter(|(budget, _)| budget.active());
        let running: usize = active.map(|(_, rank)| rank.max_running).sum();
        (self.table.len() >= running.saturating_add(self.config.max_queued))
            .then(|| (503, format!("the server is busy: {} requests are in flight", self.table.len())))
    }

    fn refuse(&mut self, request: &Request<F>, (status, message): Refusal, actions: &mut Actions<F>) {
        self.counters.refused += 1;
        if let Some(group) = &request.group {
            self.groups.settle(request.rid, group, None);
        }
        actions.push(Action::Fail { rid: request.rid, status, kind: "error", message });
    }

    /// Sends a request to a rank or refuses it; gives it back when no rank is active.
    fn place(&mut self, request: Request<F>, actions: &mut Actions<F>) -> Option<Request<F>> {
        match self.choose(&request) {
            Ok(Dispatched { rank, dispatch }) => {
                let rid = request.rid;
                if let Some(group) = &request.group {
                    self.groups.settle(rid, group, Some(rank));
                }
                self.counters.dispatched += 1;
                self.ranks[rank].in_flight += 1;
                self.ranks[rank].dispatched += 1;
                self.table.insert(rid, Place::Rank { rank, dispatch, aborted: false });
                let receiver_epoch = self.ranks[rank].epoch;
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
                self.refuse(&request, (status, message), actions);
                None
            }
        }
    }

    fn choose(&mut self, request: &Request<F>) -> Result<Dispatched, DispatchError> {
        let tokens = u64::from(request.tokens);
        if request.rank >= 0 {
            return self.budget.credit(i64::from(request.rank), tokens);
        }
        let method = self.config.method;
        if method != LoadBalanceMethod::FollowBootstrapRoom
            && let Some(group) = &request.group
            && let Some(rank) = self.groups.rank(request.rid, group)
            && let Ok(dispatched) = self.budget.credit(rank as i64, tokens)
        {
            return Ok(dispatched);
        }
        self.budget.dispatch(method, tokens, request.room)
    }

    fn place_waiting(&mut self, actions: &mut Actions<F>) {
        for _ in 0..self.waiting.len() {
            let Some(rid) = self.waiting.pop_front() else { break };
            let Some(Place::Waiting { since, request }) = self.table.remove(&rid) else { continue };
            if let Some(request) = self.place(*request, actions) {
                self.table.insert(rid, Place::Waiting { since, request: Box::new(request) });
                self.waiting.push_back(rid);
            }
        }
    }

    fn expire(&mut self, now: Nanos, actions: &mut Actions<F>) {
        while self.deadline().is_some_and(|deadline| deadline <= now) {
            let Some(&rid) = self.waiting.front() else { break };
            self.counters.expired += 1;
            let waited = self.config.rank_wait.as_secs_f64();
            self.fail(rid, (503, format!("no rank became active within {waited} s")), actions);
        }
    }

    // ---- ends ----

    /// Forgets a request with all that it was charged with, and returns where it was.
    fn remove(&mut self, rid: Rid) -> Option<Place<F>> {
        let place = self.table.remove(&rid)?;
        match &place {
            Place::Waiting { request, .. } => {
                self.waiting.retain(|waiting| *waiting != rid);
                if let Some(group) = &request.group {
                    self.groups.settle(rid, group, None);
                }
            }
            Place::Rank { rank, dispatch, .. } => {
                self.budget.release(*rank, *dispatch);
                self.ranks[*rank].in_flight = self.ranks[*rank].in_flight.saturating_sub(1);
            }
        }
        Some(place)
    }

    /// Ends a request with an error, at its shard and at its rank.
    fn fail(&mut self, rid: Rid, (status, message): Refusal, actions: &mut Actions<F>) {
        self.abort_at_rank(rid, actions);
        if self.remove(rid).is_some() {
            self.counters.failed += 1;
            actions.push(Action::Fail { rid, status, kind: "error", message });
        }
    }

    fn fail_where(&mut self, refusal: &Refusal, actions: &mut Actions<F>, which: impl Fn(Rid, &Place<F>) -> bool) {
        for rid in self.select(which) {
            self.fail(rid, refusal.clone(), actions);
        }
    }

    fn select(&self, which: impl Fn(Rid, &Place<F>) -> bool) -> Vec<Rid> {
        self.table.iter().filter(|(rid, place)| which(**rid, place)).map(|(&rid, _)| rid).collect()
    }

    /// Tells the rank of a request to end it, once. Returns whether it was told now.
    fn abort_at_rank(&mut self, rid: Rid, actions: &mut Actions<F>) -> bool {
        let Some(Place::Rank { rank, aborted, .. }) = self.table.get_mut(&rid) else { return false };
        if std::mem::replace(aborted, true) {
            return false;
        }
        actions.push(Action::Abort { rid, rank: *rank, receiver_epoch: self.ranks[*rank].epoch });
        true
    }

    /// Ends a request whose client is gone: at its rank, whose finished row closes it, or here while it waits.
    fn abort(&mut self, rid: Rid, actions: &mut Actions<F>) {
        match self.table.get(&rid) {
            None => {}
            Some(Place::Rank { .. }) => {
                let told = self.abort_at_rank(rid, actions);
                self.counters.aborts += u64::from(told);
            }
            Some(Place::Waiting { .. }) => {
                self.counters.aborts += 1;
                self.remove(rid);
                actions.push(Action::Fail { rid, status: 0, kind: "abort", message: "aborted".to_owned() });
            }
        }
    }

    fn client_abort(&mut self, from: Peer, rid: Rid, actions: &mut Actions<F>) {
        if self.admit(Side::Worker, from, actions) && self.own_id(from, rid, actions) {
            self.abort(rid, actions);
        }
    }

    fn fail_all(&mut self, message: String, actions: &mut Actions<F>) {
        self.fail_where(&(503, message.clone()), actions, |_, _| true);
        self.closed = Some(message);
    }

    // ---- ranks ----

    fn batch(
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
            self.ranks[rank].load = load;
            let report = Report {
                last_dispatch,
                requests: u64::from(load.running).saturating_add(u64::from(load.waiting)),
                tokens: load.held_tokens.saturating_add(load.pending_tokens),
            };
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
                // Tokens are lost, and nobody can say whose: what these requests went on to say would be wrong.
                self.counters.malformed += 1;
                self.complain(Side::Rank, from.number, actions, || format!("broken batch: {reason}"));
                let refusal = (500, format!("rank {rank} sent a broken batch"));
                self.fail_where(&refusal, actions, |_, place| at_rank(place, rank));
            }
        }
    }

    fn finish(&mut self, rid: Rid, at: usize) {
        if self.table.get(&rid).is_some_and(|place| at_rank(place, at)) {
            self.remove(rid);
            self.counters.finished += 1;
        } else {
            self.counters.stray += 1;
        }
    }

    fn rank_state(
        &mut self,
        rank: usize,
        active: bool,
        reason: String,
        max_running: usize,
        now: Nanos,
        actions: &mut Actions<F>,
    ) {
        let Some(view) = self.ranks.get_mut(rank) else { return };
        (view.told, view.max_running) = (active, if active { max_running } else { 0 });
        if active {
            self.refresh_rank(rank, now, actions);
            return;
        }
        view.reason = if reason.is_empty() { "it is down".to_owned() } else { reason };
        let refusal = (503, format!("rank {rank} is not active: {}", view.reason));
        self.refresh_rank(rank, now, actions);
        self.fail_where(&refusal, actions, |_, place| at_rank(place, rank));
        self.budget.reset(rank);
        self.ranks[rank].load = Load::default();
        actions.push(Action::ForgetRank { rank });
    }

    /// Makes a rank active exactly when it has said hello, supervision says so, and its peers do not object.
    fn refresh_rank(&mut self, rank: usize, now: Nanos, actions: &mut Actions<F>) {
        let view = &self.ranks[rank];
        let active = view.greeted && view.told && view.able;
        if active == self.budget.ranks()[rank].active() {
            return;
        }
        self.budget.set_active(rank, active);
        let (level, text) = if active { (Level::Info, "active") } else { (Level::Warning, "not active") };
        actions.push(Action::Log(level, format!("rank {rank} is {text}")));
        if active {
            self.expire(now, actions);
            self.place_waiting(actions);
        }
    }

    // ---- workers ----

    fn worker_down(&mut self, worker: usize, actions: &mut Actions<F>) {
        let Some(link) = self.worker_links.get_mut(worker) else { return };
        let life_number = life_of(worker, link.epoch);
        link.end();
        actions.push(Action::ForgetWorker { worker });
        for rid in self.select(|rid, _| life(rid) == life_number) {
            self.abort(rid, actions);
        }
        self.groups.forget_worker(life_number);
    }

    fn worker_cut(&mut self, route: Route, actions: &mut Actions<F>) {
        let life_number = life_of(usize::from(route.worker), u32::from(route.epoch));
        let refusal = (503, "the HTTP worker reads too slowly".to_owned());
        self.fail_where(&refusal, actions, |rid, _| life(rid) == life_number);
    }

    fn control(&mut self, from: Peer, id: Rid, state: bool, frame: F, actions: &mut Actions<F>) {
        if !self.admit(Side::Worker, from, actions) || !self.own_id(from, id, actions) {
            return;
        }
        self.counters.control += 1;
        let asked: Vec<usize> = (0..self.ranks.len()).filter(|&rank| self.budget.ranks()[rank].active()).collect();
        let ranks = asked.iter().map(|&rank| (rank, self.ranks[rank].epoch)).collect();
        // The answer that names the ranks goes first, so that theirs are expected.
        actions.push(Action::Answer { id, asked, state });
        actions.push(Action::Control { ranks, frame });
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
