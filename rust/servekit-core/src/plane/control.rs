//! The control process's threads as one thing that Python starts, asks and stops.

use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, bounded};
use parking_lot::Mutex;
use servekit_zmq::Context;

use super::endpoints::Endpoints;
use super::inbox::{Inbox, Mailbox, Pulse, Waker};
use super::ranks::RankLinks;
use super::remote::Remote;
use super::report::{Report, spawn};
use super::router::{Command, Router, ShardEnd, Then, ToShard, bind_pull};
use super::shard::{self, ShardRun, ShardView};
use super::state::Changed;
use crate::detok::{Shard, Vocabulary};
use crate::dispatch::LoadBalanceMethod;
use crate::fanout::{self, Fanout, SocketMapping};
use crate::log::{Line, LogSource, log_channel};
use crate::router::{Core, CoreConfig, Event, frames};
use crate::state_page::{Control, MAX_THREADS, StatePage, StatePageError};
use crate::wire::SCHEMA;

/// Commands that wait for the router.
const COMMANDS: usize = 256;
/// How long a command waits for room among them, or for an answer that needs no work.
const PROMPT: Duration = Duration::from_secs(2);
/// Longest path of a Unix socket on Linux, in bytes.
const SOCKET_PATH_MAX: usize = 107;
/// Most bytes that a file name of a socket takes.
const SOCKET_NAME_MAX: usize = "w4095-4095.ipc".len();

/// Bytes of requests' frames that are kept unless somebody says otherwise.
pub const RESUME_MEMORY: usize = 256 << 20;

/// Settings of a control plane.
#[derive(Clone, Debug)]
pub struct PlaneConfig {
    /// Folder of the sockets; must exist.
    pub run_dir: PathBuf,
    /// Life of this control process, from 1.
    pub epoch: u32,
    /// Present life of each rank.
    pub rank_epochs: Vec<u32>,
    /// Present life of each HTTP worker.
    pub worker_epochs: Vec<u32>,
    /// Detokenizer threads.
    pub shards: usize,
    /// How ranks are chosen.
    pub method: LoadBalanceMethod,
    /// `tokenizer.json`; without one, requests get ids only.
    pub tokenizer_file: Option<PathBuf>,
    /// Name of the state page, if there is one.
    pub state_page: Option<String>,
    /// How long a request waits while no rank is active.
    pub rank_wait: Duration,
    /// Most requests in flight beyond those that the active ranks run at once.
    pub max_queued: usize,
    /// Most prompt tokens that wait to be computed.
    pub max_queued_tokens: u64,
    /// Most requests in flight of one HTTP worker.
    pub max_per_worker: usize,
    /// Most bytes of requests' frames that are kept until their requests end.
    pub resume_memory: usize,
    /// Text that names this build to peers.
    pub build: String,
    /// Bytes that a worker may have been sent and not said yet that it has handled.
    pub max_unacknowledged: usize,
    /// Where peers meet control, if not at sockets in the run directory. The workers' own sockets are always there.
    pub endpoints: Option<Endpoints>,
    /// Where ranks on other machines meet control, if there are any.
    pub remote: Option<Remote>,
}

/// Why a control plane does not start or answer.
#[derive(Debug, thiserror::Error)]
pub enum PlaneError {
    /// A setting is out of range.
    #[error("{0}")]
    Config(String),
    /// A socket can't be made.
    #[error("socket in {dir}: {source}")]
    Socket {
        /// Run directory.
        dir: String,
        /// What libzmq said.
        source: servekit_zmq::Error,
    },
    /// The state page can't be opened.
    #[error(transparent)]
    StatePage(#[from] StatePageError),
    /// The tokenizer can't be read.
    #[error("tokenizer: {0}")]
    Tokenizer(String),
    /// A thread can't be started.
    #[error("thread: {0}")]
    Thread(#[from] std::io::Error),
    /// It was started or stopped before.
    #[error("control plane is {0}")]
    State(&'static str),
    /// No answer came in time.
    #[error("the router thread did not answer within {0:?}")]
    Silent(Duration),
}

struct Running {
    commands: Sender<Command>,
    waker: Arc<Waker>,
    threads: Vec<JoinHandle<()>>,
}

enum Phase {
    New,
    Running(Running),
    Stopped,
}

/// The threads of a control process. All methods may be called from any thread.
pub struct Plane {
    config: PlaneConfig,
    report: Arc<Report>,
    phase: Mutex<Phase>,
    sink: crate::log::LogSink,
    lines: LogSource,
}

impl Plane {
    /// A plane that does not run yet.
    ///
    /// # Errors
    /// A setting is out of range.
    pub fn new(config: PlaneConfig) -> Result<Self, PlaneError> {
        let wrong = |what: String| Err(PlaneError::Config(what));
        for (name, count, most) in [
            ("ranks", config.rank_epochs.len(), 4096),
            ("workers", config.worker_epochs.len(), 4096),
            ("detokenizer threads", config.shards, MAX_THREADS - 1),
        ] {
            if !(1..=most).contains(&count) {
                return wrong(format!("{count} {name}, must be 1 to {most}"));
            }
        }
        if config.epoch == 0 || config.rank_epochs.contains(&0) || config.worker_epochs.contains(&0) {
            return wrong("epochs count from 1".to_owned());
        }
        let length = config.run_dir.as_os_str().len() + 1 + SOCKET_NAME_MAX;
        if length > SOCKET_PATH_MAX {
            return wrong(format!(
                "run directory {} makes socket paths of {length} bytes, the system takes {SOCKET_PATH_MAX}",
                config.run_dir.display()
            ));
        }
        if let Some(endpoints) = &config.endpoints {
            if let Some(address) = endpoints.foreign() {
                return wrong(format!("{address:?} is no ipc:// or tcp://127.0.0.1: address"));
            }
            if endpoints.ranks.len() != config.rank_epochs.len() {
                return wrong("each rank needs an address and an epoch".to_owned());
            }
        }
        let (sink, lines) = log_channel();
        Ok(Self { config, report: Report::new(), phase: Mutex::new(Phase::New), sink, lines })
    }

    /// Binds the sockets and starts the threads.
    ///
    /// # Errors
    /// It was started before, or a socket, the state page, the tokenizer or a thread can't be had.
    pub fn start(&self) -> Result<(), PlaneError> {
        let mut phase = self.phase.lock();
        if !matches!(*phase, Phase::New) {
            return Err(PlaneError::State("started already"));
        }
        // A start that fails half way ends what it has started.
        *phase = Phase::Stopped;
        match self.spawn_all() {
            Ok(running) => *phase = Phase::Running(running),
            Err(error) => {
                self.report.stop();
                return Err(error);
            }
        }
        Ok(())
    }

    fn spawn_all(&self) -> Result<Running, PlaneError> {
        let config = &self.config;
        let (report, epoch) = (&self.report, config.epoch);
        let socket = |source| PlaneError::Socket { dir: config.run_dir.display().to_string(), source };
        let vocabulary = config.tokenizer_file.as_deref().map(Vocabulary::from_file).transpose();
        let vocabulary = vocabulary.map_err(|error| PlaneError::Tokenizer(error.to_string()))?.map(Arc::new);
        let page = config.state_page.as_deref().map(StatePage::open).transpose()?.map(Arc::new);
        if let Some(page) = &page {
            page.start_beats(config.shards + 1);
            page.set_control(Control::Epoch, u64::from(epoch));
            page.set_control(Control::Pid, u64::from(std::process::id()));
        }
        let context = Context::new();
        let endpoints = config.endpoints.clone();
        let endpoints = endpoints.unwrap_or_else(|| Endpoints::in_folder(&config.run_dir, config.rank_epochs.len()));
        let ingress = bind_pull(&context, &endpoints.ingress).map_err(socket)?;
        let egress = bind_pull(&context, &endpoints.egress).map_err(socket)?;
        let mut ranks = RankLinks::bind(&endpoints.ranks, epoch).map_err(socket)?;
        if let Some(remote) = &config.remote {
            // From here on that socket asks for CURVE; where it is bound already, it does not.
            egress.set_curve_server(&remote.secret_key).map_err(socket)?;
            egress.bind_fd(remote.egress).map_err(socket)?;
            ranks.serve_remote(&context, remote).map_err(socket)?;
        }

        let waker = Waker::new()?;
        let (stops, cuts) = (Mailbox::new(&waker), Mailbox::new(&waker));
        let hello = frames::hello(epoch, SCHEMA, &config.build);
        let mapping = SocketMapping::new(&config.run_dir, epoch, &config.build, &config.worker_epochs)
            .with_most_unacknowledged(config.max_unacknowledged);
        let peers = mapping.counters();
        let wake = || {
            let waker = Arc::clone(&waker);
            move || waker.wake()
        };
        let mut threads = Vec::new();

        let shard = |index| {
            let view = Arc::new(ShardView::default());
            let shard = Shard::new(index, config.shards, vocabulary.clone());
            (Arc::clone(&view), ShardRun::new(shard, Arc::clone(&stops), view))
        };
        let (fanout, inbox) = Inbox::new(Pulse::new(page.clone(), 1));
        let (view, first) = shard(0);
        let mut shards = vec![ShardEnd { tasks: ToShard::First(fanout.clone()), turn: Vec::new(), view }];
        let sockets = Fanout { mapping, epoch, cuts: Arc::clone(&cuts), log: self.sink.clone() };
        let body = move || {
            fanout::run(sockets, first, inbox);
            Ok(())
        };
        threads.push(spawn("fanout".to_owned(), report, wake(), body)?);
        for index in 1..config.shards {
            let (tasks, inbox) = Inbox::new(Pulse::new(page.clone(), 1 + index));
            let ((view, shard), fanout) = (shard(index), fanout.clone());
            shards.push(ShardEnd { tasks: ToShard::Other(tasks), turn: Vec::new(), view });
            let body = move || {
                shard::run(shard, inbox, &fanout);
                Ok(())
            };
            threads.push(spawn(format!("detok-{index}"), report, wake(), body)?);
        }

        let core = Core::new(CoreConfig {
            epoch,
            schema: SCHEMA,
            method: config.method,
            rank_epochs: config.rank_epochs.clone(),
            worker_epochs: config.worker_epochs.clone(),
            rank_wait: config.rank_wait,
            max_queued: config.max_queued,
            max_queued_tokens: config.max_queued_tokens,
            max_per_worker: config.max_per_worker,
            resume_memory: config.resume_memory,
        });
        let (commands, inbox) = bounded(COMMANDS);
        let router = Router {
            core,
            ingress,
            egress,
            ranks,
            waker: Arc::clone(&waker),
            commands: inbox,
            stops,
            cuts,
            shards,
            fanout,
            peers,
            pulse: Pulse::new(page.clone(), 0),
            page,
            report: Arc::clone(report),
            log: self.sink.clone(),
            hello,
            idle: Vec::new(),
            actions: Vec::new(),
            changed: Changed::default(),
        };
        threads.push(spawn("router".to_owned(), report, wake(), move || router.run())?);
        Ok(Running { commands, waker, threads })
    }

    /// What went wrong for good, waiting up to `timeout` for something to; none if nothing did.
    pub fn wait(&self, timeout: Duration) -> Option<String> {
        self.report.wait(timeout)
    }

    /// Lets a life of a rank (none: the present one) take requests, at most `max_running` of them at once, or ends what
    /// it has with `reason`: that life is over.
    ///
    /// # Errors
    /// It does not run, or the router does not take the command in time.
    pub fn set_rank(
        &self,
        rank: usize,
        epoch: Option<u32>,
        active: bool,
        reason: String,
        max_running: usize,
    ) -> Result<(), PlaneError> {
        self.command(Some(Event::RankState { rank, epoch, active, reason, max_running }), Then::Nothing)
    }

    /// Ends what a life of a worker (none: the present one) had: it is gone.
    ///
    /// # Errors
    /// It does not run, or the router does not take the command in time.
    pub fn worker_down(&self, worker: usize, epoch: Option<u32>) -> Result<(), PlaneError> {
        self.command(Some(Event::WorkerDown { worker, epoch }), Then::Nothing)
    }

    /// Ends every request with an error and takes no further one. Returns how many there were, once their ends have
    /// been handed to the sockets, or at the deadline.
    ///
    /// # Errors
    /// It does not run, or the router does not answer in time.
    pub fn fail_all(&self, message: String, timeout: Duration) -> Result<usize, PlaneError> {
        let deadline = Instant::now() + timeout;
        let ((count, counted), (done, ends)) = (bounded(1), bounded(self.config.shards));
        self.command(Some(Event::FailAll { message }), Then::Flush { count, done })?;
        let count = answer(&counted, timeout)?;
        for _ in 0..self.config.shards {
            if ends.recv_deadline(deadline).is_err() {
                break;
            }
        }
        Ok(count)
    }

    /// Takes no further request and waits up to `timeout` until none is in flight; returns whether that came true.
    ///
    /// # Errors
    /// It does not run, or the router does not take the command in time.
    pub fn drain(&self, timeout: Duration) -> Result<bool, PlaneError> {
        let (done, idle) = bounded(1);
        self.command(Some(Event::Drain), Then::Idle(done))?;
        Ok(idle.recv_timeout(timeout).is_ok())
    }

    /// What the control process holds, as JSON.
    ///
    /// # Errors
    /// It does not run, or the router does not answer in time.
    pub fn state(&self) -> Result<String, PlaneError> {
        let (state, told) = bounded(1);
        self.command(None, Then::State(state))?;
        answer(&told, PROMPT)
    }

    /// The next log line of a thread, or none within `timeout`.
    pub fn next_log(&self, timeout: Duration) -> Option<Line> {
        self.lines.next(timeout)
    }

    /// Least level that the threads write, in the numbers of [`crate::log::Level`]; 0 until a control message sets one.
    pub fn log_level(&self) -> u8 {
        self.lines.level()
    }

    /// Ends all threads, waiting up to `timeout`; returns whether they have ended. A second call is no error.
    pub fn stop(&self, timeout: Duration) -> bool {
        let deadline = Instant::now() + timeout;
        let running = match std::mem::replace(&mut *self.phase.lock(), Phase::Stopped) {
            Phase::Running(running) => running,
            Phase::New | Phase::Stopped => return true,
        };
        self.report.stop();
        running.waker.wake();
        while running.threads.iter().any(|thread| !thread.is_finished()) {
            if Instant::now() >= deadline {
                return false;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        // A panic was reported by the thread itself.
        running.threads.into_iter().for_each(|thread| drop(thread.join()));
        true
    }

    fn command(&self, event: Option<Event<'static, frames::Frames>>, then: Then) -> Result<(), PlaneError> {
        let (commands, waker) = match &*self.phase.lock() {
            Phase::Running(running) => (running.commands.clone(), Arc::clone(&running.waker)),
            Phase::New => return Err(PlaneError::State("not started")),
            Phase::Stopped => return Err(PlaneError::State("stopped")),
        };
        commands.send_timeout(Command { event, then }, PROMPT).map_err(|_| PlaneError::Silent(PROMPT))?;
        waker.wake();
        Ok(())
    }
}

impl Drop for Plane {
    fn drop(&mut self) {
        self.stop(Duration::from_secs(1));
    }
}

fn answer<T>(from: &Receiver<T>, timeout: Duration) -> Result<T, PlaneError> {
    from.recv_timeout(timeout).map_err(|_| PlaneError::Silent(timeout))
}
