//! Dispatch alone, for those who have a router of their own: requests in, one socket a rank out.

use std::collections::VecDeque;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use servekit_zmq::{Context, Error, Message, Socket, SocketKind, Source, poll};

use super::PlaneError;
use super::endpoints::{Endpoints, is_local};
use super::inbox::Waker;
use super::ranks::RankLinks;
use super::report::{Report, ThreadError, spawn};
use super::router::{TURN, bind_pull, receive};
use crate::dispatch::{DispatchError, DpBudget, LoadBalanceMethod, Prompt, Report as LoadReport};
use crate::router::frames::{self, Frames, NIL};
use crate::wire::{Envelope, Ext, Kind, Rid, SCHEMA, Section};

/// Longest wait of a controller with nothing to do.
const IDLE: Duration = Duration::from_secs(1);

/// How soon a batch that the output did not take is tried again.
const RETRY: Duration = Duration::from_millis(5);

/// Ends of requests that wait for a slow output.
const WAITING: usize = 4096;

/// Settings of a controller.
#[derive(Clone, Debug)]
pub struct ControllerConfig {
    /// Where it is met: requests at `ingress`, batches and load reports at `egress`.
    pub endpoints: Endpoints,
    /// Where batches go on to, if anywhere, and the ends of requests that no rank takes.
    pub output: Option<String>,
    /// How ranks are chosen.
    pub method: LoadBalanceMethod,
    /// Life of this controller, from 1.
    pub epoch: u32,
    /// Text that names this build to peers.
    pub build: String,
}

/// What a controller has counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ControllerCounts {
    /// Requests sent to a rank.
    pub dispatched: u64,
    /// Requests that no rank could take.
    pub refused: u64,
    /// Messages that went to every rank.
    pub broadcast: u64,
    /// Load reports that counted.
    pub reports: u64,
    /// Load reports that were older than one that is known, or about dispatches that never were.
    pub reports_ignored: u64,
    /// Ends of requests that a slow output did not take.
    pub dropped: u64,
    /// Frames that were no message of this schema, or of a kind that does not belong here.
    pub malformed: u64,
}

struct Shared {
    budget: Mutex<DpBudget>,
    counts: Mutex<ControllerCounts>,
}

struct Running {
    thread: JoinHandle<()>,
    waker: Arc<Waker>,
}

/// Chooses a rank for each request and sends it there. All methods may be called from any thread.
///
/// It keeps no table of requests: aborts and control messages go to every rank, and what a rank that dies had is for
/// its router to end.
pub struct Controller {
    config: ControllerConfig,
    shared: Arc<Shared>,
    report: Arc<Report>,
    running: Mutex<Option<Running>>,
}

impl Controller {
    /// A controller that does not run yet; all its ranks are active.
    ///
    /// # Errors
    /// A setting is out of range.
    pub fn new(config: ControllerConfig) -> Result<Self, PlaneError> {
        let ranks = config.endpoints.ranks.len();
        if !(1..=4096).contains(&ranks) || config.epoch == 0 {
            return Err(PlaneError::Config("there must be 1 to 4096 ranks, and epochs count from 1".to_owned()));
        }
        let foreign = config.output.as_deref().filter(|address| !is_local(address));
        if let Some(address) = config.endpoints.foreign().or(foreign) {
            return Err(PlaneError::Config(format!("{address:?} is no ipc:// or tcp://127.0.0.1: address")));
        }
        let shared = Shared { budget: Mutex::new(DpBudget::new(ranks)), counts: Mutex::default() };
        Ok(Self { config, shared: Arc::new(shared), report: Report::new(), running: Mutex::new(None) })
    }

    /// Binds the sockets and starts the thread.
    ///
    /// # Errors
    /// It was started before, or a socket or the thread can't be had.
    pub fn start(&self) -> Result<(), PlaneError> {
        let mut running = self.running.lock();
        if running.is_some() || self.report.stopping() {
            return Err(PlaneError::State("started already"));
        }
        let config = &self.config;
        let socket = |source| PlaneError::Socket { dir: config.endpoints.ingress.clone(), source };
        let context = Context::new();
        let waker = Waker::new()?;
        let output = config.output.as_deref().map(|address| -> Result<Output, Error> {
            let socket = context.socket(SocketKind::Push)?;
            socket.connect(address)?;
            Ok(Output { socket, waiting: VecDeque::new() })
        });
        let ranks = config.endpoints.ranks.len();
        let dispatcher = Dispatcher {
            ingress: bind_pull(&context, &config.endpoints.ingress).map_err(socket)?,
            egress: bind_pull(&context, &config.endpoints.egress).map_err(socket)?,
            ranks: RankLinks::bind(&config.endpoints.ranks, config.epoch).map_err(socket)?,
            output: output.transpose().map_err(socket)?,
            lives: vec![0; ranks],
            hello: frames::hello(config.epoch, SCHEMA, &config.build),
            config: config.clone(),
            shared: Arc::clone(&self.shared),
        };
        let (report, own, woken) = (Arc::clone(&self.report), Arc::clone(&waker), Arc::clone(&waker));
        let body = move || dispatcher.run(&report, &own);
        let thread = spawn("controller".to_owned(), &self.report, move || woken.wake(), body)?;
        *running = Some(Running { thread, waker });
        Ok(())
    }

    /// What went wrong for good, waiting up to `timeout` for something to; none if nothing did.
    pub fn wait(&self, timeout: Duration) -> Option<String> {
        self.report.wait(timeout)
    }

    /// Ends the thread, waiting up to `timeout`; returns whether it has ended. A second call is no error.
    pub fn stop(&self, timeout: Duration) -> bool {
        let deadline = Instant::now() + timeout;
        self.report.stop();
        let Some(running) = self.running.lock().take() else { return true };
        running.waker.wake();
        while !running.thread.is_finished() {
            if Instant::now() >= deadline {
                return false;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        // A panic was reported by the thread itself.
        drop(running.thread.join());
        true
    }

    /// Looks at what each rank is charged with, or changes it.
    pub fn with_budget<T>(&self, look: impl FnOnce(&mut DpBudget) -> T) -> T {
        look(&mut self.shared.budget.lock())
    }

    /// What it has counted.
    pub fn counts(&self) -> ControllerCounts {
        *self.shared.counts.lock()
    }
}

impl Drop for Controller {
    fn drop(&mut self) {
        self.stop(Duration::from_secs(1));
    }
}

/// Where batches go on to. While one waits, no further one is taken from the ranks.
struct Output {
    socket: Socket,
    waiting: VecDeque<Frames>,
}

impl Output {
    /// Sends what waits as far as the pipe takes it; returns whether nothing waits any more.
    fn drain(&mut self) -> Result<bool, Error> {
        while let Some(frames) = self.waiting.pop_front() {
            match self.socket.send(frames, true) {
                Ok(()) => {}
                Err((Error::Again, frames)) => {
                    self.waiting.push_front(frames);
                    return Ok(false);
                }
                Err((error, _)) => return Err(error),
            }
        }
        Ok(true)
    }
}

/// The thread's ends of everything.
struct Dispatcher {
    config: ControllerConfig,
    ingress: Socket,
    egress: Socket,
    ranks: RankLinks,
    output: Option<Output>,
    /// Present life of each rank, as it last said; 0 for any.
    lives: Vec<u32>,
    hello: Vec<u8>,
    shared: Arc<Shared>,
}

impl Dispatcher {
    fn run(mut self, report: &Report, waker: &Waker) -> Result<(), ThreadError> {
        while !report.stopping() {
            self.ranks.flush();
            let blocked = self.output.as_mut().map_or(Ok(false), |output| output.drain().map(|free| !free))?;
            let wait = if blocked { RETRY } else { IDLE };
            // What can't go on is left with the ranks' sockets, and nobody is asked to look at it over and over.
            let (ingress, egress) = if blocked {
                let sources = [Source::Fd(waker.fd()), Source::Socket(&self.ingress)];
                let [_, ingress] = poll(sources, self.ranks.sources(), Some(wait))?;
                (ingress, false)
            } else {
                let sources = [Source::Fd(waker.fd()), Source::Socket(&self.ingress), Source::Socket(&self.egress)];
                let [_, ingress, egress] = poll(sources, self.ranks.sources(), Some(wait))?;
                (ingress, egress)
            };
            if egress {
                for _ in 0..TURN {
                    let Some(frames) = receive(&self.egress)? else { break };
                    self.take_from_rank(frames)?;
                }
            }
            if ingress {
                for _ in 0..TURN {
                    let Some(frames) = receive(&self.ingress)? else { break };
                    self.take_request(frames)?;
                }
            }
        }
        Ok(())
    }

    fn count(&self, count: impl FnOnce(&mut ControllerCounts)) {
        count(&mut self.shared.counts.lock());
    }

    fn take_request(&mut self, frames: Frames) -> Result<(), ThreadError> {
        let Some(envelope) = whole(&frames) else {
            self.count(|counts| counts.malformed += 1);
            return Ok(());
        };
        let id = Rid(envelope.id);
        match envelope.section {
            Section::Request { rank, tokens, .. } => {
                let room = envelope.ext(Ext::Room).and_then(|data| data.try_into().map(u64::from_le_bytes).ok());
                let prefixes = match envelope.ext(Ext::PrefixHashes) {
                    Some(data) if self.config.method == LoadBalanceMethod::CacheAware => {
                        frames::prefix_hashes(data).unwrap_or_default()
                    }
                    _ => Vec::new(),
                };
                self.dispatch(id, rank, Prompt { tokens: u64::from(tokens), room, prefixes: &prefixes }, frames)
            }
            Section::Empty | Section::Control { .. } if goes_to_all(envelope.kind) => {
                self.count(|counts| counts.broadcast += 1);
                if envelope.kind == Kind::FlushCache {
                    self.with_budget(|budget, _| budget.forget_prefixes());
                }
                for rank in 0..self.lives.len() {
                    self.ranks.message(rank, &frames, self.lives[rank]);
                }
                Ok(())
            }
            Section::Hello { .. } => Ok(()),
            Section::Batch { .. } | Section::Empty | Section::Control { .. } => {
                self.count(|counts| counts.malformed += 1);
                Ok(())
            }
        }
    }

    fn dispatch(&mut self, id: Rid, named: i32, prompt: Prompt<'_>, frames: Frames) -> Result<(), ThreadError> {
        let chosen = self.with_budget(|budget, method| {
            if named >= 0 { budget.credit(i64::from(named), prompt) } else { budget.dispatch(method, prompt) }
        });
        let dispatched = match chosen {
            Ok(dispatched) => dispatched,
            Err(error) => {
                let status = match error {
                    DispatchError::NoActiveRank | DispatchError::RankInactive(_) => 503,
                    _ => 400,
                };
                self.refuse(id, status, &error.to_string());
                return Ok(());
            }
        };
        let (rank, dispatch) = (dispatched.rank, dispatched.dispatch);
        if self.ranks.request(rank, &frames, 1, dispatch, self.lives[rank]) {
            self.count(|counts| counts.dispatched += 1);
        } else {
            self.with_budget(|budget, _| budget.release(rank, dispatch));
            self.refuse(id, 503, "the queue to the rank is full");
        }
        Ok(())
    }

    fn with_budget<T>(&self, change: impl FnOnce(&mut DpBudget, LoadBalanceMethod) -> T) -> T {
        change(&mut self.shared.budget.lock(), self.config.method)
    }

    /// Ends a request as its rank would have: with one finished row.
    fn refuse(&mut self, id: Rid, status: u16, message: &str) {
        self.count(|counts| counts.refused += 1);
        match &mut self.output {
            Some(output) if output.waiting.len() < WAITING => {
                let (envelope, body) = frames::failed(self.config.epoch, id, status, message);
                output.waiting.push_back(vec![Message::from(envelope), Message::from(body)]);
            }
            Some(_) => self.count(|counts| counts.dropped += 1),
            None => {}
        }
    }

    fn take_from_rank(&mut self, frames: Frames) -> Result<(), ThreadError> {
        let Some(envelope) = whole(&frames) else {
            self.count(|counts| counts.malformed += 1);
            return Ok(());
        };
        let (rank, epoch) = (usize::from(envelope.sender), envelope.sender_epoch);
        if rank >= self.lives.len() {
            self.count(|counts| counts.malformed += 1);
            return Ok(());
        }
        match envelope.section {
            Section::Hello { .. } => {
                if epoch > self.lives[rank] {
                    self.lives[rank] = epoch;
                    self.with_budget(|budget, _| budget.reset(rank));
                    self.ranks.restart(rank);
                    self.ranks.message(rank, &[&self.hello[..], &NIL], epoch);
                }
                return Ok(());
            }
            Section::Batch { last_dispatch, load: Some(load), .. } => {
                let report = LoadReport::of(last_dispatch, load);
                let counted = self.with_budget(|budget, _| budget.update(rank, report));
                self.count(|counts| if counted { counts.reports += 1 } else { counts.reports_ignored += 1 });
            }
            Section::Batch { load: None, .. } | Section::Control { .. } => {}
            Section::Request { .. } | Section::Empty => {
                self.count(|counts| counts.malformed += 1);
                return Ok(());
            }
        }
        if let Some(output) = &mut self.output {
            output.waiting.push_back(frames);
        }
        Ok(())
    }
}

/// The envelope of a message that has a body.
fn whole(frames: &Frames) -> Option<Envelope<'_>> {
    frames.first().filter(|_| frames.len() >= 2).and_then(|head| Envelope::parse(head).ok())
}

/// Whether every rank gets messages of a kind.
fn goes_to_all(kind: Kind) -> bool {
    matches!(
        kind,
        Kind::Abort
            | Kind::Profile
            | Kind::FlushCache
            | Kind::Pause
            | Kind::Continue
            | Kind::SetLogLevel
            | Kind::GetState
    )
}
