//! What the router core is told, and what it asks for.

use crate::log::Level;
use crate::wire::{Group, Load, Rid, Route, TextOptions};

/// Time in nanoseconds since any fixed moment; it only ever grows.
pub type Nanos = u64;

/// Where a frame came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// An HTTP worker.
    Worker,
    /// A data-parallel rank.
    Rank,
}

/// What an envelope says of its link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Number of the worker or rank.
    pub number: u16,
    /// Its life.
    pub epoch: u32,
    /// Life of the control process that the frame is meant for.
    pub receiver_epoch: u32,
    /// Number of the frame on its link.
    pub seq: u64,
}

/// Frames that can be referred to twice without a copy of their bytes.
pub trait Share {
    /// Another reference to the same frames.
    #[must_use]
    fn share(&mut self) -> Self;
}

/// A number in the place of frames, where nobody reads them.
impl Share for u64 {
    fn share(&mut self) -> Self {
        *self
    }
}

/// A request as the router sees it; `F` is the frames that it passes on unread.
#[derive(Clone, Debug)]
pub struct Request<F> {
    /// Id, which is the return address too.
    pub rid: Rid,
    /// Rank that the client named, -1 for none.
    pub rank: i32,
    /// Length of the prompt.
    pub tokens: u32,
    /// Whether the client reads text as it comes.
    pub stream: bool,
    /// Place in a request of several prompts or choices.
    pub group: Option<Group>,
    /// Bootstrap room.
    pub room: Option<u64>,
    /// Names of the prompt's prefixes, for `cache_aware`; empty for none.
    pub prefixes: Vec<u64>,
    /// What the request's detokenizer shard must know, or why that can't be read.
    pub text: Result<TextOptions, String>,
    /// Bytes of the frames.
    pub bytes: usize,
    /// The frames.
    pub frame: F,
}

/// What a control message asks for, as far as this process obeys it too.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ask {
    /// What every process holds.
    State,
    /// Cached prefixes are to be dropped.
    FlushCache,
    /// Less, or more, is to be logged, by the workers too.
    LogLevel(Level),
    /// Something that is for the ranks alone.
    Ranks,
    /// Something that is for the workers alone, the one that asks among them.
    Workers,
    /// Nothing that could be done, and why.
    Refused(String),
    /// Nobody knows: a kind of that number is no control message here.
    Unknown(u16),
}

/// Rows of a batch, as far as the router reads them.
pub trait Rows: Sync {
    /// How many there are.
    fn rows(&self) -> usize;
    /// Request of a row.
    fn rid(&self, row: usize) -> Rid;
    /// Whether the row ends its request.
    fn finished(&self, row: usize) -> bool;
}

/// Something that happened.
pub enum Event<'a, F> {
    /// A peer's first frame.
    Hello {
        /// Its kind.
        side: Side,
        /// Its link.
        from: Peer,
        /// Hash of the message definitions that it speaks.
        schema: u64,
        /// What it calls itself and its build, for messages to people.
        name: String,
    },
    /// A worker asks for tokens.
    Request {
        /// Its link.
        from: Peer,
        /// What it asks for.
        request: Request<F>,
    },
    /// A worker's client went away.
    Abort {
        /// Its link.
        from: Peer,
        /// Request to end.
        rid: Rid,
    },
    /// A worker has handled what this process sent it.
    Acknowledge {
        /// Its link.
        from: Peer,
        /// Number of the last such message on the link to it.
        number: u64,
    },
    /// A worker has a message for every rank.
    Control {
        /// Its link.
        from: Peer,
        /// Correlation id, which is the return address of the replies.
        id: Rid,
        /// What it asks for.
        ask: Ask,
        /// The frames.
        frame: F,
    },
    /// A rank made a step, or reports its load.
    Batch {
        /// Its link.
        from: Peer,
        /// Highest dispatch number that it has seen.
        last_dispatch: u64,
        /// Its load, if it told it.
        load: Option<Load>,
        /// The rows, or why they can't be read.
        rows: Result<&'a dyn Rows, String>,
    },
    /// A rank or a worker answers a control message.
    Reply {
        /// Its kind.
        side: Side,
        /// Its link.
        from: Peer,
        /// Correlation id.
        id: Rid,
        /// The frames.
        frame: F,
    },
    /// A rank knows better which ranks take requests.
    ActiveRanks {
        /// Its link.
        from: Peer,
        /// One flag a rank.
        active: Vec<bool>,
    },
    /// A frame that is no message.
    Malformed {
        /// Link that it came on.
        side: Side,
        /// Why.
        reason: String,
    },
    /// A message of a kind that does not belong on its link.
    Unknown {
        /// Link that it came on.
        side: Side,
        /// Number of its sender.
        number: u16,
        /// Number of the kind.
        kind: u16,
    },
    /// Supervision says whether a rank takes requests.
    RankState {
        /// The rank.
        rank: usize,
        /// The life that it speaks of; none for the present one.
        epoch: Option<u32>,
        /// Whether that life takes requests; if not, it is over.
        active: bool,
        /// Why not, for clients and the log.
        reason: String,
        /// Most requests that it runs at once.
        max_running: usize,
    },
    /// Supervision says that a worker's process is gone.
    WorkerDown {
        /// The worker.
        worker: usize,
        /// The life that is over; none for the present one.
        epoch: Option<u32>,
    },
    /// The pipe to a worker was full, and frames for it are lost.
    WorkerCut {
        /// The worker and its life.
        route: Route,
    },
    /// A shard saw a stop string, and has sent the worker its finished row.
    StopMatch {
        /// The request.
        rid: Rid,
    },
    /// The pipe to a rank was full, and the request did not go.
    Unsent {
        /// The request.
        rid: Rid,
    },
    /// Every request is to end with an error, and no further one is taken.
    FailAll {
        /// What clients are told.
        message: String,
    },
    /// No further request is taken.
    Drain,
    /// Nothing but the time.
    Tick,
}

/// Something to do. Actions are carried out in order.
#[derive(Clone, Debug, PartialEq)]
pub enum Action<F> {
    /// The shard of a request begins its state; at once after it the request is sent or fails.
    Open {
        /// The request.
        rid: Rid,
        /// The rank whose rows count; none for a request that fails.
        rank: Option<usize>,
        /// What the shard must know.
        text: TextOptions,
        /// Whether text goes out as it comes.
        stream: bool,
    },
    /// The shard of a request ends it with an error, if it has not ended.
    Fail {
        /// The request.
        rid: Rid,
        /// HTTP status that fits.
        status: u16,
        /// Type of the finish reason: `error` or `abort`.
        kind: &'static str,
        /// One line for the client.
        message: String,
    },
    /// A request goes to a rank.
    Send {
        /// The request.
        rid: Rid,
        /// The rank.
        rank: usize,
        /// Its life.
        receiver_epoch: u32,
        /// Which try at the request this is, from 1.
        attempt: u32,
        /// Number under which the dispatch is booked.
        dispatch: u64,
        /// The frames.
        frame: F,
    },
    /// A rank ends a request.
    Abort {
        /// The request.
        rid: Rid,
        /// The rank.
        rank: usize,
        /// Its life.
        receiver_epoch: u32,
    },
    /// A control message goes to ranks, and to workers if it concerns them.
    Control {
        /// The ranks and their lives.
        ranks: Vec<(usize, u32)>,
        /// The workers and their lives.
        workers: Vec<Route>,
        /// The frames.
        frame: F,
    },
    /// This process answers a control message.
    Answer {
        /// Correlation id.
        id: Rid,
        /// Why nobody is asked, if so.
        refusal: Option<String>,
        /// Who will answer: ranks by number, workers as [`worker_party`](super::frames::worker_party) counts them.
        asked: Vec<i32>,
        /// Whether the answer tells this process's state.
        state: bool,
    },
    /// This process logs what matters that much.
    SetLogLevel(Level),
    /// The batch of this event goes to all shards.
    Deliver,
    /// A reply goes to the worker that asked.
    Forward {
        /// Correlation id.
        id: Rid,
        /// The frames.
        frame: F,
    },
    /// A worker has handled all messages up to a number.
    Acknowledge {
        /// The worker and its life.
        route: Route,
        /// The number.
        number: u64,
    },
    /// A rank is greeted.
    HelloRank {
        /// The rank.
        rank: usize,
        /// Its life.
        receiver_epoch: u32,
    },
    /// A worker is greeted, and this life of it may be sent to.
    HelloWorker {
        /// The worker.
        worker: usize,
        /// Its life.
        receiver_epoch: u32,
    },
    /// Nothing that waits for this rank matters any more.
    ForgetRank {
        /// The rank.
        rank: usize,
    },
    /// Nothing goes to this worker any more.
    ForgetWorker {
        /// The worker.
        worker: usize,
    },
    /// The process can't do its work, and why.
    Fatal(String),
    /// Something for people to read.
    Log(Level, String),
}
