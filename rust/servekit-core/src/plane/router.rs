//! The router thread: sockets in and out around the router core.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender};
use servekit_zmq::{Context, Error, Message, Socket, SocketKind, Source, poll};

use super::inbox::{BEAT, Mailbox, Pulse, Waker};
use super::queue;
use super::ranks::RankLinks;
use super::report::{Report, ThreadError};
use super::shard::{ShardTask, ShardView};
use super::state::{Changed, Queues, publish, snapshot};
use crate::detok::shard_of;
use crate::fanout::{FanoutTask, PeerCounters, Task};
use crate::log::{Level, LogSink};
use crate::router::frames::{self, Frames, FromRank, NIL, NoRows};
use crate::router::{Action, Core, Event, Rows, Share};
use crate::state_page::{StatePage, monotonic_ns};
use crate::wire::{Rid, Route, ScannedBatch};

/// Messages taken from one socket before the others have their turn.
pub(super) const TURN: usize = 256;
/// Messages that libzmq holds for the router from one peer.
const RECV_HWM: i32 = 8192;

/// What Python wants of the router.
pub(super) struct Command {
    /// Something that happened, if anything did.
    pub(super) event: Option<Event<'static, Frames>>,
    /// What Python waits for.
    pub(super) then: Then,
}

/// What the router does after the event of a command.
pub(super) enum Then {
    /// Nothing.
    Nothing,
    /// Tell how many requests were in flight before the event, then, once for each shard, that what it led to has been
    /// handed to the sockets.
    Flush { count: Sender<usize>, done: Sender<()> },
    /// Tell when no request is in flight.
    Idle(Sender<()>),
    /// Tell the state, as JSON.
    State(Sender<String>),
}

/// The router's ends of everything.
pub(super) struct Router {
    pub(super) core: Core<Frames>,
    pub(super) ingress: Socket,
    pub(super) egress: Socket,
    pub(super) ranks: RankLinks,
    pub(super) waker: Arc<Waker>,
    pub(super) commands: Receiver<Command>,
    pub(super) stops: Arc<Mailbox<Rid>>,
    pub(super) cuts: Arc<Mailbox<Route>>,
    pub(super) shards: Vec<ShardEnd>,
    pub(super) fanout: queue::Sender<Task>,
    pub(super) peers: Arc<[PeerCounters]>,
    pub(super) page: Option<Arc<StatePage>>,
    pub(super) pulse: Pulse,
    pub(super) report: Arc<Report>,
    pub(super) log: LogSink,
    /// Text that opens each link to a rank.
    pub(super) hello: Vec<u8>,
    /// Who waits for the last request to end.
    pub(super) idle: Vec<Sender<()>>,
    /// What the core asks for, empty between events: its memory is used again.
    pub(super) actions: Vec<Action<Frames>>,
    /// Ranks that the state page shows as they were.
    pub(super) changed: Changed,
}

/// The router's end of a shard.
pub(super) struct ShardEnd {
    /// Where its work goes, one hand-over a turn: waking a thread costs more than most of its tasks.
    pub(super) tasks: ToShard,
    /// The work of this turn.
    pub(super) turn: Vec<ShardTask>,
    /// What it holds and has counted.
    pub(super) view: Arc<ShardView>,
}

/// The way to a shard.
pub(super) enum ToShard {
    /// The first one lives on the fan-out's thread.
    First(queue::Sender<Task>),
    /// The others have threads of their own.
    Other(queue::Sender<Vec<ShardTask>>),
}

impl ToShard {
    fn send(&self, turn: Vec<ShardTask>) {
        // A thread that has ended has said why.
        let _ = match self {
            Self::First(tasks) => tasks.send(Task::Turn(turn)),
            Self::Other(tasks) => tasks.send(turn),
        };
    }

    fn len(&self) -> usize {
        match self {
            Self::First(tasks) => tasks.len(),
            Self::Other(tasks) => tasks.len(),
        }
    }
}

/// What the event at hand carried, for actions that pass it on.
#[derive(Default)]
struct AtHand {
    batch: Option<(u16, Arc<ScannedBatch>)>,
}

/// Binds a socket that receives from many peers.
pub(super) fn bind_pull(context: &Context, address: &str) -> Result<Socket, Error> {
    let socket = context.socket(SocketKind::Pull)?;
    socket.set_recv_hwm(RECV_HWM)?;
    socket.bind(address)?;
    Ok(socket)
}

impl Router {
    /// Works until the plane stops.
    pub(super) fn run(mut self) -> Result<(), ThreadError> {
        let mut beaten = Instant::now();
        while !self.report.stopping() {
            self.ranks.flush();
            if let Some(page) = &self.page {
                publish(&self.core, page, &mut self.changed);
            }
            self.pulse.beat();
            let sources = [Source::Socket(&self.ingress), Source::Socket(&self.egress), Source::Fd(self.waker.fd())];
            let [ingress, egress, woken] = poll(sources, self.ranks.sources(), Some(self.timeout(beaten)))?;
            beaten = Instant::now();
            if woken {
                self.waker.reset();
                self.take_from_threads()?;
                self.hand_over();
            }
            // Ranks first: what they finish makes room for what the workers bring.
            if egress {
                self.take_from_ranks()?;
                self.hand_over();
            }
            if ingress {
                self.take_from_workers()?;
            }
            if self.core.deadline().is_some_and(|deadline| deadline <= monotonic_ns()) {
                self.handle(Event::Tick, AtHand::default())?;
            }
            self.hand_over();
            if self.core.in_flight() == 0 {
                for waiter in self.idle.drain(..) {
                    // Whoever waited may have given up.
                    let _ = waiter.try_send(());
                }
            }
        }
        Ok(())
    }

    fn timeout(&self, beaten: Instant) -> Duration {
        let beat = BEAT.saturating_sub(beaten.elapsed());
        let deadline = self.core.deadline().map(|at| Duration::from_nanos(at.saturating_sub(monotonic_ns())));
        deadline.map_or(beat, |deadline| deadline.min(beat))
    }

    fn take_from_threads(&mut self) -> Result<(), ThreadError> {
        for rid in self.stops.take() {
            self.handle(Event::StopMatch { rid }, AtHand::default())?;
        }
        for route in self.cuts.take() {
            self.handle(Event::WorkerCut { route }, AtHand::default())?;
        }
        let commands: Vec<Command> = self.commands.try_iter().collect();
        for Command { event, then } in commands {
            let before = self.core.in_flight();
            if let Some(event) = event {
                self.handle(event, AtHand::default())?;
            }
            // Whoever asked may have given up, so that answers go nowhere.
            match then {
                Then::Nothing => {}
                Then::Flush { count, done } => {
                    let _ = count.try_send(before);
                    self.shards.iter_mut().for_each(|shard| shard.turn.push(ShardTask::Flush(done.clone())));
                }
                Then::Idle(done) => self.idle.push(done),
                Then::State(state) => {
                    let _ = state.try_send(self.state());
                }
            }
        }
        Ok(())
    }

    fn take_from_ranks(&mut self) -> Result<(), ThreadError> {
        for _ in 0..TURN {
            let Some(frames) = receive(&self.egress)? else { break };
            match frames::from_rank(frames) {
                FromRank::Event(event) => self.handle(*event, AtHand::default())?,
                FromRank::Batch { from, last_dispatch, load, rows } => {
                    let batch = rows.as_ref().ok().and_then(Clone::clone).map(|batch| (from.number, batch));
                    let rows: Result<&dyn Rows, String> = match &rows {
                        Ok(Some(batch)) => Ok(&**batch),
                        Ok(None) => Ok(&NoRows),
                        Err(reason) => Err(reason.clone()),
                    };
                    self.handle(Event::Batch { from, last_dispatch, load, rows }, AtHand { batch })?;
                }
            }
        }
        Ok(())
    }

    fn take_from_workers(&mut self) -> Result<(), ThreadError> {
        for _ in 0..TURN {
            let Some(frames) = receive(&self.ingress)? else { break };
            self.handle(frames::from_worker(frames), AtHand::default())?;
        }
        Ok(())
    }

    /// Tells the core what happened and does what it asks for.
    fn handle(&mut self, event: Event<'_, Frames>, mut at_hand: AtHand) -> Result<(), ThreadError> {
        let mut actions = std::mem::take(&mut self.actions);
        self.changed.by(&event);
        self.core.handle(event, monotonic_ns(), &mut actions);
        let mut unsent = Vec::new();
        while !actions.is_empty() {
            for action in actions.drain(..) {
                self.act(action, &mut at_hand, &mut unsent)?;
            }
            for rid in unsent.drain(..) {
                let event = Event::Unsent { rid };
                self.changed.by(&event);
                self.core.handle(event, monotonic_ns(), &mut actions);
            }
        }
        self.actions = actions;
        Ok(())
    }

    fn act(&mut self, action: Action<Frames>, at_hand: &mut AtHand, unsent: &mut Vec<Rid>) -> Result<(), ThreadError> {
        let epoch = self.core.config().epoch;
        match action {
            Action::Open { rid, rank, text, stream } => {
                let rank = rank.and_then(|rank| u16::try_from(rank).ok());
                self.give_shard(rid, ShardTask::Open { rid, rank, text, stream });
            }
            Action::Fail { rid, status, kind, message } => {
                self.give_shard(rid, ShardTask::Fail { rid, status, kind, message });
            }
            Action::Send { rid, rank, receiver_epoch, attempt, dispatch, frame } => {
                self.changed.rank(rank);
                if !self.ranks.request(rank, &frame, attempt, dispatch, receiver_epoch) {
                    unsent.push(rid);
                }
            }
            Action::Abort { rid, rank, receiver_epoch } => {
                self.ranks.message(rank, &[frames::abort(epoch, rid), frames::abort_body(rid)], receiver_epoch);
            }
            Action::Control { ranks, workers, mut frame } => {
                for (rank, receiver_epoch) in ranks {
                    self.ranks.message(rank, &frame, receiver_epoch);
                }
                for route in workers {
                    self.to_fanout(FanoutTask::Single { route, frames: frame.share() });
                }
            }
            Action::SetLogLevel(level) => self.log.set_level(level),
            Action::Answer { id, refusal, asked, state } => {
                let data = if state { self.state() } else { String::new() };
                let (envelope, body) = frames::answer(epoch, id, refusal.as_deref(), &asked, data.as_bytes());
                let frames = vec![Message::from(envelope), Message::from(body)];
                self.to_fanout(FanoutTask::Single { route: id.route(), frames });
            }
            Action::Deliver => {
                if let Some((rank, batch)) = at_hand.batch.take() {
                    for shard in &mut self.shards {
                        shard.turn.push(ShardTask::Batch { rank, batch: Arc::clone(&batch) });
                    }
                }
            }
            Action::Forward { id, frame } => {
                self.to_fanout(FanoutTask::Single { route: id.route(), frames: frame });
            }
            Action::HelloRank { rank, receiver_epoch } => {
                self.ranks.restart(rank);
                self.ranks.message(rank, &[&self.hello[..], &NIL], receiver_epoch);
            }
            Action::Acknowledge { route, number } => self.to_fanout(FanoutTask::Acknowledge { route, number }),
            Action::HelloWorker { worker, receiver_epoch } => {
                if let Ok(worker) = u16::try_from(worker) {
                    self.to_fanout(FanoutTask::Greet { worker, epoch: receiver_epoch });
                }
            }
            Action::ForgetRank { rank } => self.ranks.forget(rank),
            Action::ForgetWorker { worker } => {
                if let Ok(worker) = u16::try_from(worker) {
                    self.to_fanout(FanoutTask::Forget { worker });
                }
            }
            Action::Fatal(message) => {
                self.log.write(Level::Error, "router", format_args!("{message}"));
                self.report.fatal(message);
            }
            Action::Log(level, message) => self.log.write(level, "router", format_args!("{message}")),
        }
        Ok(())
    }

    fn give_shard(&mut self, rid: Rid, task: ShardTask) {
        let place = shard_of(rid.0, self.shards.len());
        if let Some(shard) = self.shards.get_mut(place) {
            shard.turn.push(task);
        }
    }

    /// Gives the shards the work of this turn.
    fn hand_over(&mut self) {
        for shard in self.shards.iter_mut().filter(|shard| !shard.turn.is_empty()) {
            shard.tasks.send(std::mem::take(&mut shard.turn));
        }
    }

    fn to_fanout(&self, task: FanoutTask) {
        // A fan-out that has ended has said why.
        let _ = self.fanout.send(Task::Send(task));
    }

    fn state(&self) -> String {
        let shards = self.shards.iter().map(|shard| shard.view.json(shard.tasks.len())).collect();
        let backlogs = self.ranks.backlogs().collect();
        let queues = Queues { shards, fanout: self.fanout.len(), backlogs, peers: &self.peers };
        snapshot(&self.core, &queues).to_string()
    }
}

/// A message, if there is one.
pub(super) fn receive(socket: &Socket) -> Result<Option<Frames>, Error> {
    match socket.recv(true) {
        Ok(frames) => Ok(Some(frames)),
        Err(Error::Again) => Ok(None),
        Err(error) => Err(error),
    }
}
