//! Where each word of a page lies: a header, a block for the control process, then one block per rank, per follower and
//! per HTTP worker. A worker's block holds its own words, its histograms, and a few words for each rank that served it; a
//! follower's is like a rank's, with nothing in it but what the process says of itself.

use super::histogram::Histogram;

/// First word of a page: "SVKSTATE".
pub const MAGIC: u64 = u64::from_le_bytes(*b"SVKSTATE");
/// Version of the layout; a page of another version is refused.
pub const VERSION: u64 = 4;
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
    /// How many blocks of followers there are.
    Followers = 6,
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
    /// Requests that it has by its last report, and those dispatched since.
    Requests = 10,
    /// Life of the process whose pulse the next words are; the rank itself writes them.
    PulseEpoch = 11,
    /// Monotonic nanoseconds of its last pulse, which needs nothing but that the process runs.
    PulseNs = 12,
    /// What the rank's engine does, an index into `RANK_PHASES`.
    Phase = 13,
    /// Monotonic nanoseconds since when it does that.
    PhaseSinceNs = 14,
    /// The step that it computes or computed last, from 1.
    Step = 15,
    /// Monotonic nanoseconds when it last got ahead: by a phase, a layer or a frame that it sent.
    MovedNs = 16,
    /// 1 while it waits for others of its group, in the middle of a step.
    Awaits = 17,
}

/// What a rank's engine may be doing: nothing was heard of it yet, it loads its model, it has nothing to do, it takes
/// messages, plans and sends, it computes a step, it waits for others of its group to begin one.
pub const RANK_PHASES: [&str; 6] = ["unknown", "loading", "idle", "working", "computing", "waiting"];

/// Words of an HTTP worker's block. What is counted is counted over all lives of the worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum Worker {
    /// Life of the worker's process, from 1.
    Epoch = 0,
    /// Its process id, 0 when it has ended.
    Pid = 1,
    /// Requests that hold a place.
    OpenStreams = 2,
    /// Tokens that they reserved.
    ReservedTokens = 3,
    /// Bytes in its cache of tokenized prefixes.
    CacheBytes = 4,
    /// Choices sent to the ranks.
    Requests = 5,
    /// Requests refused because the server was full or not ready.
    Refused = 6,
    /// Choices whose client went away.
    Aborted = 7,
    /// Choices that ended with a stop token or string.
    Stopped = 8,
    /// Choices that ended at their limit.
    Exhausted = 9,
    /// Choices that ended with an error.
    Failed = 10,
    /// Frames from or for another life.
    Fenced = 11,
    /// Frames that were no message, or of a kind that no worker handles.
    Dropped = 12,
    /// Times that numbers on the link from control were missing.
    Gaps = 13,
    /// Requests without the right key.
    Unauthorized = 14,
    /// Connections closed because their client sent too slowly, or nothing.
    SlowSenders = 15,
    /// Connections closed because their client did not read.
    SlowReaders = 16,
    /// Connections refused because there were too many.
    Crowded = 17,
    /// Texts that were looked up in the cache of tokenized prefixes.
    CacheLookups = 18,
    /// Those of them of which it knew a part.
    CacheHits = 19,
    /// Tokens of all texts that were looked up.
    CacheTokens = 20,
    /// Those of them that it knew.
    CacheHitTokens = 21,
}

/// Words of a worker's block that it has for each rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum WorkerRank {
    /// Tokens of prompts that the rank has begun to answer, each prompt of a request once.
    PromptTokens = 0,
    /// Those of them that the rank had cached.
    CachedTokens = 1,
    /// Tokens that it generated.
    GenerationTokens = 2,
}

/// Names of the control block's words, in order.
pub const CONTROL_FIELDS: [&str; 10] =
    ["epoch", "pid", "in_flight", "waiting", "queued_tokens", "dropped", "fenced", "refused", "aborts", "threads"];
/// Names of a rank block's words, in order.
pub const RANK_FIELDS: [&str; 18] = [
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
    "requests",
    "pulse_epoch",
    "pulse_ns",
    "phase",
    "phase_since_ns",
    "step",
    "moved_ns",
    "awaits",
];
/// Names of a worker block's own words, in order.
pub const WORKER_FIELDS: [&str; 22] = [
    "epoch",
    "pid",
    "open_streams",
    "reserved_tokens",
    "cache_bytes",
    "requests",
    "refused",
    "aborted",
    "stopped",
    "exhausted",
    "failed",
    "fenced",
    "dropped",
    "gaps",
    "unauthorized",
    "slow_senders",
    "slow_readers",
    "crowded",
    "cache_lookups",
    "cache_hits",
    "cache_tokens",
    "cache_hit_tokens",
];
/// Names of the words that a worker block has for each rank, in order.
pub const WORKER_RANK_FIELDS: [&str; 3] = ["prompt_tokens", "cached_tokens", "generation_tokens"];

pub(super) const HEADER_WORDS: usize = 16;
pub(super) const BEATS: usize = 16;
const CONTROL_WORDS: usize = BEATS + MAX_THREADS;
const RANK_WORDS: usize = 32;
const OWN_WORDS: usize = 32;
const HISTOGRAM_WORDS: usize = 32;
const PER_RANK_WORDS: usize = 4;

/// Where the blocks of a page lie, in words.
#[derive(Clone, Copy, Debug)]
pub(super) struct Layout {
    pub(super) workers: usize,
    pub(super) ranks: usize,
    pub(super) followers: usize,
}

impl Layout {
    pub(super) fn control(self) -> usize {
        HEADER_WORDS
    }

    /// Blocks of ranks, then those of followers.
    pub(super) fn rank(self, index: usize) -> usize {
        HEADER_WORDS + CONTROL_WORDS + index * RANK_WORDS
    }

    pub(super) fn worker(self, index: usize) -> usize {
        let each = OWN_WORDS + Histogram::ALL.len() * HISTOGRAM_WORDS + self.ranks * PER_RANK_WORDS;
        self.rank(self.ranks + self.followers) + index * each
    }

    /// The sum of a worker's histogram, then its counts.
    pub(super) fn histogram(self, worker: usize, histogram: Histogram) -> usize {
        self.worker(worker) + OWN_WORDS + histogram as usize * HISTOGRAM_WORDS
    }

    pub(super) fn worker_rank(self, worker: usize, rank: usize) -> usize {
        self.worker(worker) + OWN_WORDS + Histogram::ALL.len() * HISTOGRAM_WORDS + rank * PER_RANK_WORDS
    }

    pub(super) fn words(self) -> usize {
        self.worker(self.workers)
    }
}

const _: () = {
    assert!(WORKER_FIELDS.len() <= OWN_WORDS, "a worker's own words overlap its histograms");
    assert!(WORKER_RANK_FIELDS.len() <= PER_RANK_WORDS, "a worker's words for two ranks overlap");
    assert!(RANK_FIELDS.len() <= RANK_WORDS && CONTROL_FIELDS.len() <= BEATS, "blocks overlap");
    let mut i = 0;
    while i < Histogram::ALL.len() {
        assert!(Histogram::ALL[i].bounds().len() + 2 <= HISTOGRAM_WORDS, "two histograms overlap");
        i += 1;
    }
};
