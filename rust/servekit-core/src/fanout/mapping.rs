//! The sockets to the workers.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use servekit_zmq::Outlet;

use super::unacknowledged::Unacknowledged;
use crate::router::frames::{NIL, hello, patch_link};
use crate::wire::{Route, SCHEMA};

/// Bytes that a worker may have been sent and not said yet that it has handled; then its streams are cut.
pub const MAX_UNACKNOWLEDGED: usize = 64 << 20;
/// Messages that may wait for one worker, whatever their size. At a step a millisecond that is several seconds of one
/// shard's output.
const MAX_WAITING: usize = 8192;
/// How long a mapping that goes tries to send what waits: the last error events are worth it, a dead worker is not.
const LINGER: Duration = Duration::from_millis(300);
/// How soon what a worker did not take is offered again.
pub const RETRY: Duration = Duration::from_millis(5);
/// Workers that a request id can name.
const WORKERS: usize = 4096;

/// What went to one worker, over all its lives.
#[derive(Debug, Default)]
pub struct PeerCounters {
    /// Messages sent.
    pub messages: AtomicU64,
    /// Bytes sent.
    pub bytes: AtomicU64,
    /// Messages that were dropped because too much waits for the worker.
    pub lost: AtomicU64,
    /// Times that its streams were cut for that.
    pub cuts: AtomicU64,
    /// Messages for a life that is over.
    pub unroutable: AtomicU64,
    /// Messages that its present life has not acknowledged.
    pub unacknowledged_frames: AtomicU64,
    /// Their bytes.
    pub unacknowledged_bytes: AtomicU64,
}

impl PeerCounters {
    /// Names and values, in the order of the fields.
    pub fn named(&self) -> [(&'static str, u64); 7] {
        [
            ("messages", &self.messages),
            ("bytes", &self.bytes),
            ("lost", &self.lost),
            ("cuts", &self.cuts),
            ("unroutable", &self.unroutable),
            ("unacknowledged_frames", &self.unacknowledged_frames),
            ("unacknowledged_bytes", &self.unacknowledged_bytes),
        ]
        .map(|(name, count)| (name, count.load(Ordering::Relaxed)))
    }

    fn waits(&self, waiting: &Unacknowledged) {
        self.unacknowledged_frames.store(waiting.frames() as u64, Ordering::Relaxed);
        self.unacknowledged_bytes.store(waiting.bytes() as u64, Ordering::Relaxed);
    }
}

/// What became of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sent {
    /// It is on its way with the next flush.
    Yes,
    /// Too much waits for the worker: this is the first message of a run that is lost, so its streams are cut now.
    Cut,
    /// Too much still waits for it.
    Lost,
    /// There is no such worker, or that life of it is over.
    NoRoute,
}

/// Which lives of a worker are sent to.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Life {
    /// That one.
    Is(u32),
    /// None: it is gone.
    Gone,
    /// Whichever a request id names.
    Any,
    /// As `Any`, but for one that is over, known by the low bits of its epoch.
    AnyBut(u16),
}

impl Life {
    /// Epoch to write into frames for a route, 0 where nobody told it; none if that life is not sent to.
    fn epoch(self, route: Route) -> Option<u32> {
        match self {
            Self::Is(epoch) => (epoch & 0xFFF == u32::from(route.epoch)).then_some(epoch),
            Self::Any => Some(0),
            Self::AnyBut(over) => (over != route.epoch).then_some(0),
            Self::Gone => None,
        }
    }
}

struct Peer {
    outlet: Outlet,
    /// Number of the last message, whether it was lost or not: a reader sees from the next one what it missed.
    seq: u64,
    /// Its streams are cut: messages are being lost.
    cut: bool,
    waiting: Unacknowledged,
}

/// Connects to a worker when the first message for it comes; never anywhere but to sockets in the run directory.
///
/// Messages that follow each other closely go to a worker in one system call: [`SocketMapping::send_output`] takes them,
/// [`SocketMapping::flush`] sends them, to be called whenever nothing follows.
pub struct SocketMapping {
    run_dir: PathBuf,
    epoch: u32,
    hello: Vec<u8>,
    lives: Vec<Life>,
    peers: HashMap<Route, Peer>,
    /// Workers for whom something may wait.
    unsent: Vec<Route>,
    counters: Arc<[PeerCounters]>,
    most: usize,
}

impl SocketMapping {
    /// A mapping of the life `epoch` of a control process, for the workers whose present lives are given, by index.
    /// `build` names this build in the first frame of each link.
    pub fn new(run_dir: &Path, epoch: u32, build: &str, worker_epochs: &[u32]) -> Self {
        let lives = worker_epochs.iter().copied().map(Life::Is).collect();
        Self::of(run_dir, epoch, build, lives)
    }

    /// As [`SocketMapping::new`], for any worker that a request id names, without registration.
    pub fn open(run_dir: &Path, epoch: u32, build: &str) -> Self {
        Self::of(run_dir, epoch, build, vec![Life::Any; WORKERS])
    }

    fn of(run_dir: &Path, epoch: u32, build: &str, lives: Vec<Life>) -> Self {
        Self {
            run_dir: run_dir.to_owned(),
            epoch,
            hello: hello(epoch, SCHEMA, build),
            peers: HashMap::new(),
            unsent: Vec::new(),
            counters: lives.iter().map(|_| PeerCounters::default()).collect(),
            lives,
            most: MAX_UNACKNOWLEDGED,
        }
    }

    /// Bounds what a worker has not acknowledged, in bytes; [`MAX_UNACKNOWLEDGED`] if never called.
    #[must_use]
    pub fn with_most_unacknowledged(mut self, bytes: usize) -> Self {
        self.most = bytes;
        self
    }

    /// Counters by worker; they stay valid and go on while others hold them.
    pub fn counters(&self) -> Arc<[PeerCounters]> {
        Arc::clone(&self.counters)
    }

    /// How many sockets are open.
    pub fn len(&self) -> usize {
        self.peers.len()
    }

    /// Whether no socket is open.
    pub fn is_empty(&self) -> bool {
        self.peers.is_empty()
    }

    /// Lets a life of a worker be sent to, and greets it. The life before is closed.
    pub fn greet(&mut self, worker: u16, epoch: u32) {
        let Some(life) = self.lives.get_mut(usize::from(worker)) else { return };
        if *life != Life::Is(epoch) {
            *life = Life::Is(epoch);
            self.close(worker);
        }
        self.connect(Route { worker, epoch: (epoch & 0xFFF) as u16 }, epoch);
    }

    /// Takes a message without ever waiting. Its envelope, the first frame, may be anybody's: it is made this link's.
    pub fn send_output<F: AsRef<[u8]>>(&mut self, route: Route, frames: &[F]) -> Sent {
        let worker = usize::from(route.worker);
        let Some(counters) = self.counters.get(worker) else { return Sent::NoRoute };
        let Some(epoch) = self.lives.get(worker).and_then(|life| life.epoch(route)) else {
            counters.unroutable.fetch_add(1, Ordering::Relaxed);
            return Sent::NoRoute;
        };
        self.connect(route, epoch);
        let (Some(peer), Some(counters)) = (self.peers.get_mut(&route), self.counters.get(worker)) else {
            return Sent::NoRoute;
        };
        peer.seq += 1;
        let bytes = frames.iter().map(|frame| frame.as_ref().len()).sum::<usize>();
        // A worker that is cut is still told how its streams end.
        let most = if peer.cut { self.most.saturating_add(self.most / 8) } else { self.most };
        if peer.waiting.bytes().saturating_add(bytes) > most || peer.outlet.waiting() >= MAX_WAITING {
            return lose(peer, counters);
        }
        let (from, seq) = (self.epoch, peer.seq);
        if peer.outlet.waiting() == 0 {
            self.unsent.push(route);
        }
        peer.outlet.push(frames, |envelope| patch_link(envelope, from, epoch, seq));
        peer.waiting.sent(seq, bytes);
        peer.cut &= peer.waiting.bytes() > self.most / 2;
        counters.messages.fetch_add(1, Ordering::Relaxed);
        counters.bytes.fetch_add(bytes as u64, Ordering::Relaxed);
        counters.waits(&peer.waiting);
        Sent::Yes
    }

    /// Sends what was taken, as far as the workers take it. Returns whether nothing waits any more; if something does,
    /// it is to be called again after [`RETRY`].
    pub fn flush(&mut self) -> bool {
        let peers = &mut self.peers;
        self.unsent.retain(|route| peers.get_mut(route).is_some_and(|peer| !peer.outlet.flush()));
        self.unsent.is_empty()
    }

    /// A life of a worker has handled all messages up to that number.
    ///
    /// Returns whether there is such a link, and it was sent so many.
    pub fn acknowledge(&mut self, route: Route, number: u64) -> bool {
        let Some(peer) = self.peers.get_mut(&route).filter(|peer| number <= peer.seq) else { return false };
        peer.waiting.handled(number);
        peer.cut &= peer.waiting.bytes() > self.most / 2;
        if let Some(counters) = self.counters.get(usize::from(route.worker)) {
            counters.waits(&peer.waiting);
        }
        true
    }

    /// Closes a worker's sockets and sends nothing to that life of it any more.
    pub fn remove(&mut self, worker: u16) {
        let over = self.peers.keys().filter(|route| route.worker == worker).map(|route| route.epoch).max();
        if let Some(life) = self.lives.get_mut(usize::from(worker)) {
            *life = match (*life, over) {
                (Life::Is(_) | Life::Gone, _) => Life::Gone,
                (_, Some(over)) => Life::AnyBut(over),
                (open, None) => open,
            };
        }
        self.close(worker);
    }

    /// Closes every socket; the next message for a worker connects again.
    pub fn clear_all_sockets(&mut self) {
        self.flush();
        self.peers.clear();
        self.counters.iter().for_each(|counters| counters.waits(&Unacknowledged::default()));
    }

    fn close(&mut self, worker: u16) {
        self.flush();
        self.peers.retain(|route, _| route.worker != worker);
        if let Some(counters) = self.counters.get(usize::from(worker)) {
            counters.waits(&Unacknowledged::default());
        }
    }

    fn connect(&mut self, route: Route, epoch: u32) {
        if self.peers.contains_key(&route) {
            return;
        }
        let mut outlet = Outlet::connect(&self.run_dir.join(route.to_string()));
        outlet.push(&[&self.hello[..], &NIL], |hello| patch_link(hello, self.epoch, epoch, 1));
        self.unsent.push(route);
        self.peers.insert(route, Peer { outlet, seq: 1, cut: false, waiting: Unacknowledged::default() });
    }
}

impl Drop for SocketMapping {
    fn drop(&mut self) {
        let deadline = Instant::now() + LINGER;
        while !self.flush() && Instant::now() < deadline {
            std::thread::sleep(RETRY);
        }
    }
}

/// Counts a message that a worker is not sent, and cuts its streams if it is the first.
fn lose(peer: &mut Peer, counters: &PeerCounters) -> Sent {
    counters.lost.fetch_add(1, Ordering::Relaxed);
    if std::mem::replace(&mut peer.cut, true) {
        return Sent::Lost;
    }
    counters.cuts.fetch_add(1, Ordering::Relaxed);
    Sent::Cut
}
