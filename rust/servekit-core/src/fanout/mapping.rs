//! The sockets to the workers.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use servekit_zmq::{Context, Error, Message, Socket, SocketKind};

use crate::router::frames::{Frames, NIL, hello, patch_link};
use crate::wire::{Route, SCHEMA};

/// Messages that may wait for one worker. At a step a millisecond that is several seconds of one shard's output.
const SEND_HWM: i32 = 8192;
/// How long a closed socket goes on sending: the last error events are worth it, a dead worker is not.
const LINGER: Duration = Duration::from_millis(300);

/// What went to one worker, over all its lives.
#[derive(Debug, Default)]
pub struct PeerCounters {
    /// Messages sent.
    pub messages: AtomicU64,
    /// Bytes sent.
    pub bytes: AtomicU64,
    /// Messages that the full pipe did not take.
    pub lost: AtomicU64,
    /// Times that its streams were cut for that.
    pub cuts: AtomicU64,
    /// Messages for a life that is over.
    pub unroutable: AtomicU64,
}

/// What became of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sent {
    /// It is on its way.
    Yes,
    /// The pipe is full: this is the first message of a run that is lost, so the worker's streams are cut now.
    Cut,
    /// The pipe is still full.
    Lost,
    /// There is no such worker, or that life of it is over.
    NoRoute,
}

struct Peer {
    socket: Socket,
    /// Number of the last message, whether it was lost or not: a reader sees from the next one what it missed.
    seq: u64,
    full: bool,
}

/// Connects to a worker when the first message for it comes; never anywhere but to sockets in the run directory.
pub struct SocketMapping {
    context: Context,
    run_dir: PathBuf,
    epoch: u32,
    hello: Vec<u8>,
    /// Present life of each worker; none while it is gone.
    epochs: Vec<Option<u32>>,
    peers: HashMap<Route, Peer>,
    counters: Arc<[PeerCounters]>,
}

impl SocketMapping {
    /// A mapping of the life `epoch` of a control process, for the workers whose present lives are given, by index.
    /// `build` names this build in the first frame of each link.
    pub fn new(context: Context, run_dir: &Path, epoch: u32, build: &str, worker_epochs: &[u32]) -> Self {
        Self {
            context,
            run_dir: run_dir.to_owned(),
            epoch,
            hello: hello(epoch, SCHEMA, build),
            epochs: worker_epochs.iter().copied().map(Some).collect(),
            peers: HashMap::new(),
            counters: worker_epochs.iter().map(|_| PeerCounters::default()).collect(),
        }
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
    ///
    /// # Errors
    /// The socket can't be made.
    pub fn greet(&mut self, worker: u16, epoch: u32) -> Result<(), Error> {
        let Some(known) = self.epochs.get_mut(usize::from(worker)) else { return Ok(()) };
        if *known != Some(epoch) {
            *known = Some(epoch);
            self.peers.retain(|route, _| route.worker != worker);
        }
        self.connect(Route { worker, epoch: (epoch & 0xFFF) as u16 }, epoch)
    }

    /// Sends a message without ever waiting. The envelope may be anybody's: it is
    /// made this link's.
    ///
    /// # Errors
    /// libzmq fails in another way than by a full pipe.
    pub fn send_output(&mut self, route: Route, mut envelope: Vec<u8>, rest: Frames) -> Result<Sent, Error> {
        let worker = usize::from(route.worker);
        let Some(counters) = self.counters.get(worker) else { return Ok(Sent::NoRoute) };
        let known = self.epochs.get(worker).copied().flatten();
        let Some(epoch) = known.filter(|epoch| epoch & 0xFFF == u32::from(route.epoch)) else {
            counters.unroutable.fetch_add(1, Ordering::Relaxed);
            return Ok(Sent::NoRoute);
        };
        self.connect(route, epoch)?;
        let (Some(peer), Some(counters)) = (self.peers.get_mut(&route), self.counters.get(worker)) else {
            return Ok(Sent::NoRoute);
        };
        peer.seq += 1;
        patch_link(&mut envelope, self.epoch, epoch, peer.seq);
        let bytes = envelope.len() + rest.iter().map(|frame| frame.len()).sum::<usize>();
        let frames = std::iter::once(Message::from(envelope)).chain(rest).collect();
        match peer.socket.send(frames, true) {
            Ok(()) => {
                peer.full = false;
                counters.messages.fetch_add(1, Ordering::Relaxed);
                counters.bytes.fetch_add(bytes as u64, Ordering::Relaxed);
                Ok(Sent::Yes)
            }
            Err((Error::Again, _)) => {
                counters.lost.fetch_add(1, Ordering::Relaxed);
                if std::mem::replace(&mut peer.full, true) {
                    return Ok(Sent::Lost);
                }
                counters.cuts.fetch_add(1, Ordering::Relaxed);
                Ok(Sent::Cut)
            }
            Err((error, _)) => Err(error),
        }
    }

    /// Closes a worker's socket and sends nothing to this life of it any more.
    pub fn remove(&mut self, worker: u16) {
        if let Some(epoch) = self.epochs.get_mut(usize::from(worker)) {
            *epoch = None;
        }
        self.peers.retain(|route, _| route.worker != worker);
    }

    /// Closes every socket; the next message for a worker connects again.
    pub fn clear_all_sockets(&mut self) {
        self.peers.clear();
    }

    fn connect(&mut self, route: Route, epoch: u32) -> Result<(), Error> {
        if self.peers.contains_key(&route) {
            return Ok(());
        }
        let socket = self.context.socket(SocketKind::Push)?;
        socket.set_send_hwm(SEND_HWM)?;
        socket.set_linger(Some(LINGER))?;
        socket.connect(&format!("ipc://{}", self.run_dir.join(route.to_string()).display()))?;
        let mut hello = self.hello.clone();
        patch_link(&mut hello, self.epoch, epoch, 1);
        socket.send(vec![Message::from(hello), Message::copy_of(&NIL)], true).map_err(|(error, _)| error)?;
        self.peers.insert(route, Peer { socket, seq: 1, full: false });
        Ok(())
    }
}
