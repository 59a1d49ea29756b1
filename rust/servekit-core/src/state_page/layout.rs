//! Where each word of a page lies: a header, a block for the control process, then one block per rank and one per HTTP
//! worker.

/// First word of a page: "SVKSTATE".
pub const MAGIC: u64 = u64::from_le_bytes(*b"SVKSTATE");
/// Version of the layout; a page of another version is refused.
pub const VERSION: u64 = 1;
/// Most threads of the control process whose beats are kept: router, fan-out and the detokenizer shards.
pub const MAX_THREADS: usize = 64;
/// Most workers or ranks that a page describes.
pub const MAX_SLOTS: usize = 4096;

/// Words of the header, from word 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum Header {
    /// `MAGIC`, written last when a page is made.
    Magic = 0,
    /// `VERSION`.
    Version = 1,
    /// 0 starting, 1 ready, 2 draining, 3 stopping.
    Phase = 2,
    /// 1 once the server has been ready.
    ReadyOnce = 3,
    /// How many worker blocks there are.
    Workers = 4,
    /// How many rank blocks there are.
    Ranks = 5,
}

/// Words of the control block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum Control {
    /// Life of the control process, from 1.
    Epoch = 0,
    /// Its process id.
    Pid = 1,
    /// Requests that are accepted and have not ended.
    InFlight = 2,
    /// Those of them that wait for a rank to become active.
    Waiting = 3,
    /// Prompt tokens that wait to be computed: for a rank, on their way to one, or there.
    QueuedTokens = 4,
    /// Frames dropped: malformed, unknown, duplicate or without a way on.
    Dropped = 5,
    /// Frames dropped because they came from or were meant for another life.
    Fenced = 6,
    /// Requests refused.
    Refused = 7,
    /// Aborts that reached a request.
    Aborts = 8,
    /// How many threads beat; their beats are words `BEATS..BEATS + threads` of the block.
    Threads = 9,
}

/// Words of a rank's block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum Rank {
    /// 1 while the rank takes requests.
    Active = 0,
    /// Life of the rank's process, from 1.
    Epoch = 1,
    /// Its process id.
    Pid = 2,
    /// Requests in its batch.
    Running = 3,
    /// Requests it has seen that do not run yet.
    Waiting = 4,
    /// KV tokens held by running requests.
    HeldTokens = 5,
    /// Prompt tokens left to compute.
    PendingTokens = 6,
    /// Size of its KV pool in tokens.
    PoolTokens = 7,
    /// Requests dispatched to it by this control process.
    Dispatched = 8,
    /// Monotonic nanoseconds of its last frame.
    LastBeatNs = 9,
}

/// Words of an HTTP worker's block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum Worker {
    /// Life of the worker's process, from 1.
    Epoch = 0,
    /// Its process id.
    Pid = 1,
    /// Requests that hold a place.
    OpenStreams = 2,
    /// Tokens that they reserved.
    ReservedTokens = 3,
    /// Requests taken, ever.
    Requests = 4,
    /// Prompt tokens, ever.
    PromptTokens = 5,
    /// Generated tokens, ever.
    GenerationTokens = 6,
    /// Requests refused, ever.
    Refused = 7,
    /// Requests whose client went away, ever.
    Aborted = 8,
}

/// Names of the control block's words, in order.
pub const CONTROL_FIELDS: [&str; 10] =
    ["epoch", "pid", "in_flight", "waiting", "queued_tokens", "dropped", "fenced", "refused", "aborts", "threads"];
/// Names of a rank block's words, in order.
pub const RANK_FIELDS: [&str; 10] = [
    "active",
    "epoch",
    "pid",
    "running",
    "waiting",
    "held_tokens",
    "pending_tokens",
    "pool_tokens",
    "dispatched",
    "last_beat_ns",
];
/// Names of a worker block's words, in order.
pub const WORKER_FIELDS: [&str; 9] = [
    "epoch",
    "pid",
    "open_streams",
    "reserved_tokens",
    "requests",
    "prompt_tokens",
    "generation_tokens",
    "refused",
    "aborted",
];

pub(super) const HEADER_WORDS: usize = 16;
pub(super) const BEATS: usize = 16;
const CONTROL_WORDS: usize = BEATS + MAX_THREADS;
const BLOCK_WORDS: usize = 16;

/// Where the blocks of a page lie, in words.
#[derive(Clone, Copy, Debug)]
pub(super) struct Layout {
    pub(super) workers: usize,
    pub(super) ranks: usize,
}

impl Layout {
    pub(super) fn control(self) -> usize {
        HEADER_WORDS
    }

    pub(super) fn rank(self, index: usize) -> usize {
        HEADER_WORDS + CONTROL_WORDS + index * BLOCK_WORDS
    }

    pub(super) fn worker(self, index: usize) -> usize {
        self.rank(self.ranks) + index * BLOCK_WORDS
    }

    pub(super) fn words(self) -> usize {
        self.worker(self.workers)
    }
}
