//! The state page: one shared memory segment that every process reads and that no lock guards.
//!
//! It is an array of `u64` words, each with one writer. Readers see each word whole; they never see two words of one
//! moment, and nothing here needs them to. The layout is a header, a block for the control process, then one block per
//! rank and one per HTTP worker; `Layout` says where each lies.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use memmap2::{MmapOptions, MmapRaw};

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
    /// Prompt tokens that were dispatched and not yet seen by their rank.
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

const HEADER_WORDS: usize = 16;
const BEATS: usize = 16;
const CONTROL_WORDS: usize = BEATS + MAX_THREADS;
const BLOCK_WORDS: usize = 16;

/// A page that can't be made or opened.
#[derive(Debug, thiserror::Error)]
pub enum StatePageError {
    /// The operating system refused.
    #[error("state page {name}: {source}")]
    Io {
        /// Segment.
        name: String,
        /// What the system said.
        source: io::Error,
    },
    /// The segment is not a page of this version, or a number is out of range.
    #[error("state page {name}: {reason}")]
    Invalid {
        /// Segment.
        name: String,
        /// What is wrong.
        reason: String,
    },
}

/// Where the blocks of a page lie, in words.
#[derive(Clone, Copy, Debug)]
struct Layout {
    workers: usize,
    ranks: usize,
}

impl Layout {
    fn control(self) -> usize {
        HEADER_WORDS
    }

    fn rank(self, index: usize) -> usize {
        HEADER_WORDS + CONTROL_WORDS + index * BLOCK_WORDS
    }

    fn worker(self, index: usize) -> usize {
        self.rank(self.ranks) + index * BLOCK_WORDS
    }

    fn words(self) -> usize {
        self.worker(self.workers)
    }
}

/// A mapped state page. Indices beyond its workers or ranks read as 0 and are not written.
#[derive(Debug)]
pub struct StatePage {
    map: MmapRaw,
    name: String,
    layout: Layout,
}

impl StatePage {
    /// Makes a page of that name with mode 0600.
    ///
    /// # Errors
    /// The name is taken or no plain file name, there are no or too many workers or ranks, or the system refuses.
    pub fn create(name: &str, workers: usize, ranks: usize) -> Result<Self, StatePageError> {
        let path = segment_path(name)?;
        if workers == 0 || ranks == 0 || workers > MAX_SLOTS || ranks > MAX_SLOTS {
            return Err(invalid(name, format!("{workers} workers and {ranks} ranks; each must be 1 to {MAX_SLOTS}")));
        }
        let layout = Layout { workers, ranks };
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&path)
            .map_err(|source| io_error(name, source))?;
        let page = file
            .set_len((layout.words() * size_of::<u64>()) as u64)
            .and_then(|()| map(&file))
            .map(|map| Self { map, name: name.to_owned(), layout })
            .map_err(|source| {
                // The segment is ours and of no use to anybody; the first error is the one to tell.
                drop(std::fs::remove_file(&path));
                io_error(name, source)
            })?;
        page.set(Header::Version as usize, VERSION);
        page.set(Header::Workers as usize, workers as u64);
        page.set(Header::Ranks as usize, ranks as u64);
        page.word(Header::Magic as usize).store(MAGIC, Ordering::Release);
        Ok(page)
    }

    /// Maps an existing page.
    ///
    /// # Errors
    /// There is none of that name, or it is no page of this version and size.
    pub fn open(name: &str) -> Result<Self, StatePageError> {
        let path = segment_path(name)?;
        let file = OpenOptions::new().read(true).write(true).open(path).map_err(|source| io_error(name, source))?;
        let bytes = file.metadata().map_err(|source| io_error(name, source))?.len() as usize;
        if bytes < HEADER_WORDS * size_of::<u64>() || !bytes.is_multiple_of(size_of::<u64>()) {
            return Err(invalid(name, format!("{bytes} bytes are no state page")));
        }
        let map = map(&file).map_err(|source| io_error(name, source))?;
        let mut page = Self { map, name: name.to_owned(), layout: Layout { workers: 0, ranks: 0 } };
        if page.word(Header::Magic as usize).load(Ordering::Acquire) != MAGIC {
            return Err(invalid(name, "wrong magic".to_owned()));
        }
        let version = page.get(Header::Version as usize);
        if version != VERSION {
            return Err(invalid(name, format!("layout version {version}, this build reads {VERSION}")));
        }
        let (workers, ranks) = (page.get(Header::Workers as usize), page.get(Header::Ranks as usize));
        if workers > MAX_SLOTS as u64 || ranks > MAX_SLOTS as u64 {
            return Err(invalid(name, format!("{workers} workers and {ranks} ranks")));
        }
        page.layout = Layout { workers: workers as usize, ranks: ranks as usize };
        if page.layout.words() * size_of::<u64>() != bytes {
            return Err(invalid(name, format!("{bytes} bytes do not fit {workers} workers and {ranks} ranks")));
        }
        Ok(page)
    }

    /// Removes the segment's name; maps that exist stay valid. A name that is gone already is no error.
    ///
    /// # Errors
    /// The system refuses.
    pub fn unlink(name: &str) -> Result<(), StatePageError> {
        match std::fs::remove_file(segment_path(name)?) {
            Err(source) if source.kind() != io::ErrorKind::NotFound => Err(io_error(name, source)),
            _ => Ok(()),
        }
    }

    /// Name of the segment.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// How many workers the page describes.
    pub fn workers(&self) -> usize {
        self.layout.workers
    }

    /// How many ranks the page describes.
    pub fn ranks(&self) -> usize {
        self.layout.ranks
    }

    /// Reads a word of the header.
    pub fn header(&self, field: Header) -> u64 {
        self.get(field as usize)
    }

    /// Writes a word of the header; main only.
    pub fn set_header(&self, field: Header, value: u64) {
        self.set(field as usize, value);
    }

    /// Reads a word of the control block.
    pub fn control(&self, field: Control) -> u64 {
        self.get(self.layout.control() + field as usize)
    }

    /// Writes a word of the control block; the control process only.
    pub fn set_control(&self, field: Control, value: u64) {
        self.set(self.layout.control() + field as usize, value);
    }

    /// Reads a word of a rank's block.
    pub fn rank(&self, index: usize, field: Rank) -> u64 {
        if index < self.layout.ranks { self.get(self.layout.rank(index) + field as usize) } else { 0 }
    }

    /// Writes a word of a rank's block; control only, but `Pid` and `Epoch`, which main writes.
    pub fn set_rank(&self, index: usize, field: Rank, value: u64) {
        if index < self.layout.ranks {
            self.set(self.layout.rank(index) + field as usize, value);
        }
    }

    /// Reads a word of a worker's block.
    pub fn worker(&self, index: usize, field: Worker) -> u64 {
        if index < self.layout.workers { self.get(self.layout.worker(index) + field as usize) } else { 0 }
    }

    /// Adds to a word of a worker's block, stopping at 0; that worker only.
    pub fn worker_add(&self, index: usize, field: Worker, delta: i64) {
        if index < self.layout.workers {
            let word = self.word(self.layout.worker(index) + field as usize);
            word.store(word.load(Ordering::Relaxed).saturating_add_signed(delta), Ordering::Relaxed);
        }
    }

    /// Starts a new life of a worker's block: what it held is gone, what it counted stays.
    pub fn start_worker(&self, index: usize, epoch: u64, pid: u64) {
        if index < self.layout.workers {
            let base = self.layout.worker(index);
            self.set(base + Worker::OpenStreams as usize, 0);
            self.set(base + Worker::ReservedTokens as usize, 0);
            self.set(base + Worker::Epoch as usize, epoch);
            self.set(base + Worker::Pid as usize, pid);
        }
    }

    /// Takes places for a worker's requests if all workers together then hold at most `max_requests`.
    ///
    /// Two workers that ask at once may go over by what each asked for; the router has the final word.
    pub fn reserve(&self, index: usize, requests: u64, tokens: u64, max_requests: u64) -> bool {
        let held: u64 = (0..self.layout.workers).map(|i| self.worker(i, Worker::OpenStreams)).sum();
        if held.saturating_add(requests) > max_requests {
            return false;
        }
        self.worker_add(index, Worker::OpenStreams, i64::try_from(requests).unwrap_or(i64::MAX));
        self.worker_add(index, Worker::ReservedTokens, i64::try_from(tokens).unwrap_or(i64::MAX));
        true
    }

    /// Gives places back that `reserve` took.
    pub fn release(&self, index: usize, requests: u64, tokens: u64) {
        self.worker_add(index, Worker::OpenStreams, i64::try_from(requests).unwrap_or(i64::MAX).saturating_neg());
        self.worker_add(index, Worker::ReservedTokens, i64::try_from(tokens).unwrap_or(i64::MAX).saturating_neg());
    }

    /// The control block's words, in the order of `CONTROL_FIELDS`.
    pub fn control_words(&self) -> [u64; CONTROL_FIELDS.len()] {
        std::array::from_fn(|at| self.get(self.layout.control() + at))
    }

    /// A rank block's words, in the order of `RANK_FIELDS`.
    pub fn rank_words(&self, index: usize) -> [u64; RANK_FIELDS.len()] {
        std::array::from_fn(|at| if index < self.layout.ranks { self.get(self.layout.rank(index) + at) } else { 0 })
    }

    /// A worker block's words, in the order of `WORKER_FIELDS`.
    pub fn worker_words(&self, index: usize) -> [u64; WORKER_FIELDS.len()] {
        std::array::from_fn(|at| if index < self.layout.workers { self.get(self.layout.worker(index) + at) } else { 0 })
    }

    /// Says how many threads of control will beat, before the first does.
    pub fn start_beats(&self, threads: usize) {
        for thread in 0..MAX_THREADS {
            self.set(self.layout.control() + BEATS + thread, 0);
        }
        self.set_control(Control::Threads, threads.min(MAX_THREADS) as u64);
    }

    /// Shows that a thread of control is alive.
    pub fn beat(&self, thread: usize) {
        if thread < MAX_THREADS {
            self.set(self.layout.control() + BEATS + thread, monotonic_ns());
        }
    }

    /// Monotonic nanoseconds of each control thread's last beat, 0 for none yet.
    pub fn beats(&self) -> Vec<u64> {
        let threads = (self.control(Control::Threads) as usize).min(MAX_THREADS);
        (0..threads).map(|thread| self.get(self.layout.control() + BEATS + thread)).collect()
    }

    /// Seconds since the oldest beat of a control thread; infinite while one has not beaten yet.
    pub fn control_age(&self) -> f64 {
        match self.beats().into_iter().min() {
            None | Some(0) => f64::INFINITY,
            Some(oldest) => monotonic_ns().saturating_sub(oldest) as f64 / 1e9,
        }
    }

    #[expect(unsafe_code, reason = "the only way to view a shared map; every access goes through atomics")]
    fn word(&self, index: usize) -> &AtomicU64 {
        let words = self.map.len() / size_of::<u64>();
        // SAFETY: the map is page-aligned, lives as long as `self`, and is longer than `words` words, whose processes
        // touch it through atomics only; nobody shrinks the file (only `create` sets its length).
        let page = unsafe { std::slice::from_raw_parts(self.map.as_ptr().cast::<AtomicU64>(), words) };
        &page[index]
    }

    fn get(&self, index: usize) -> u64 {
        self.word(index).load(Ordering::Relaxed)
    }

    fn set(&self, index: usize, value: u64) {
        self.word(index).store(value, Ordering::Relaxed);
    }
}

/// Nanoseconds of the clock that beats are told in (CLOCK_MONOTONIC, the same in all processes of a machine).
#[expect(unsafe_code, reason = "std has no clock whose readings two processes can compare")]
pub fn monotonic_ns() -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `now` is a valid place for the answer; the clock exists on every system that servekit builds on.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut now) };
    (now.tv_sec as u64).saturating_mul(1_000_000_000).saturating_add(now.tv_nsec as u64)
}

fn map(file: &File) -> io::Result<MmapRaw> {
    MmapOptions::new().map_raw(file)
}

fn segment_path(name: &str) -> Result<PathBuf, StatePageError> {
    if name.is_empty() || name.starts_with('.') || name.contains(['/', '\0']) {
        return Err(invalid(name, "not a plain file name".to_owned()));
    }
    Ok(Path::new("/dev/shm").join(name))
}

fn io_error(name: &str, source: io::Error) -> StatePageError {
    StatePageError::Io { name: name.to_owned(), source }
}

fn invalid(name: &str, reason: String) -> StatePageError {
    StatePageError::Invalid { name: name.to_owned(), reason }
}
