//! The state page: one shared memory segment that every process reads and that no lock guards.
//!
//! It is an array of `u64` words, each with one writer. Readers see each word whole; they never see two words of one
//! moment, and nothing here needs them to. The layout is a header, a block for the control process, then one block per
//! rank, per follower and per HTTP worker; `Layout` says where each lies. Followers, the processes of a rank that control
//! does not know, are counted behind the ranks: with two ranks, the first follower is number 2.

mod histogram;
mod layout;
#[cfg(test)]
mod tests;

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use memmap2::{MmapOptions, MmapRaw};

pub use histogram::{Counted, Histogram};
use layout::{BEATS, HEADER_WORDS, Layout};
pub use layout::{
    CONTROL_FIELDS, Control, Header, MAGIC, MAX_SLOTS, MAX_THREADS, RANK_FIELDS, RANK_PHASES, Rank, VERSION,
    WORKER_FIELDS, WORKER_RANK_FIELDS, Worker, WorkerRank,
};

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

/// What a rank on another machine said of itself.
#[derive(Clone, Copy, Debug)]
pub struct Relayed {
    /// Life of its process.
    pub epoch: u64,
    /// Nanoseconds since its last pulse.
    pub pulse_age: u64,
    /// Since it does what it does.
    pub phase_age: u64,
    /// Since it last got ahead with it.
    pub moved_age: u64,
    /// What it does, an index into `RANK_PHASES`.
    pub phase: u64,
    /// In which step.
    pub step: u64,
    /// Whether it waits for others of its group.
    pub awaits: bool,
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
    /// The name is taken or no plain file name, there are no workers or ranks, or too many of anything, or the system
    /// refuses.
    pub fn create(name: &str, workers: usize, ranks: usize, followers: usize) -> Result<Self, StatePageError> {
        let path = segment_path(name)?;
        if workers == 0 || ranks == 0 || workers > MAX_SLOTS || ranks > MAX_SLOTS {
            return Err(invalid(name, format!("{workers} workers and {ranks} ranks; each must be 1 to {MAX_SLOTS}")));
        }
        if followers > MAX_SLOTS {
            return Err(invalid(name, format!("{followers} followers; there must be at most {MAX_SLOTS}")));
        }
        let layout = Layout { workers, ranks, followers };
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
        page.set(Header::Followers as usize, followers as u64);
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
        let mut page = Self { map, name: name.to_owned(), layout: Layout { workers: 0, ranks: 0, followers: 0 } };
        if page.word(Header::Magic as usize).load(Ordering::Acquire) != MAGIC {
            return Err(invalid(name, "wrong magic".to_owned()));
        }
        let version = page.get(Header::Version as usize);
        if version != VERSION {
            return Err(invalid(name, format!("layout version {version}, this build reads {VERSION}")));
        }
        let [workers, ranks, followers] =
            [Header::Workers, Header::Ranks, Header::Followers].map(|field| page.header(field));
        let sizes = format!("{workers} workers, {ranks} ranks and {followers} followers");
        if [workers, ranks, followers].iter().any(|count| *count > MAX_SLOTS as u64) {
            return Err(invalid(name, sizes));
        }
        page.layout = Layout { workers: workers as usize, ranks: ranks as usize, followers: followers as usize };
        if page.layout.words() * size_of::<u64>() != bytes {
            return Err(invalid(name, format!("{bytes} bytes do not fit {sizes}")));
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

    /// How many followers the page describes.
    pub fn followers(&self) -> usize {
        self.layout.followers
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

    /// Reads a word of a rank's or follower's block.
    pub fn rank(&self, index: usize, field: Rank) -> u64 {
        if index < self.layout.ranks + self.layout.followers {
            self.get(self.layout.rank(index) + field as usize)
        } else {
            0
        }
    }

    /// Writes a word of a rank's block; control only, but `Pid` and `Epoch`, which main writes, and what the rank says,
    /// which main writes for one on another machine.
    pub fn set_rank(&self, index: usize, field: Rank, value: u64) {
        if index < self.layout.ranks + self.layout.followers {
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

    /// Adds to a word that a worker has for a rank; that worker only.
    pub fn worker_rank_add(&self, index: usize, rank: usize, field: WorkerRank, delta: u64) {
        if index < self.layout.workers && rank < self.layout.ranks {
            self.count(self.layout.worker_rank(index, rank) + field as usize, delta);
        }
    }

    /// Counts `times` values of as many seconds each in a worker's histogram; that worker only.
    ///
    /// What is no number or below 0 counts as 0.
    pub fn observe(&self, index: usize, histogram: Histogram, seconds: f64, times: u64) {
        if index < self.layout.workers {
            let seconds = seconds.max(0.0);
            let bucket = histogram.bounds().partition_point(|bound| *bound < seconds);
            let base = self.layout.histogram(index, histogram);
            // Casts from floats saturate.
            self.count(base, ((seconds * 1e9) as u64).saturating_mul(times));
            self.count(base + 1 + bucket, times);
        }
    }

    /// What all workers counted in a histogram, dead ones included.
    pub fn counted(&self, histogram: Histogram) -> Counted {
        let mut all = Counted { counts: vec![0; histogram.bounds().len() + 1], sum_s: 0.0 };
        for worker in 0..self.layout.workers {
            let base = self.layout.histogram(worker, histogram);
            all.sum_s += self.get(base) as f64 / 1e9;
            for (bucket, count) in all.counts.iter_mut().enumerate() {
                *count += self.get(base + 1 + bucket);
            }
        }
        all
    }

    /// The words that workers have for a rank, summed over all workers, in the order of `WORKER_RANK_FIELDS`.
    pub fn rank_totals(&self, rank: usize) -> [u64; WORKER_RANK_FIELDS.len()] {
        let mut all = [0; WORKER_RANK_FIELDS.len()];
        if rank < self.layout.ranks {
            for worker in 0..self.layout.workers {
                let base = self.layout.worker_rank(worker, rank);
                for (at, total) in all.iter_mut().enumerate() {
                    *total += self.get(base + at);
                }
            }
        }
        all
    }

    /// Notes that a worker's process has ended: it holds nothing, what it counted stays. Main only, which has reaped it.
    pub fn end_worker(&self, index: usize) {
        self.start_worker(index, self.worker(index, Worker::Epoch), 0);
    }

    /// Starts a new life of a worker's block: what it held is gone, what it counted stays.
    pub fn start_worker(&self, index: usize, epoch: u64, pid: u64) {
        if index < self.layout.workers {
            let base = self.layout.worker(index);
            self.set(base + Worker::OpenStreams as usize, 0);
            self.set(base + Worker::ReservedTokens as usize, 0);
            self.set(base + Worker::CacheBytes as usize, 0);
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

    /// A rank's or follower's words, in the order of `RANK_FIELDS`.
    pub fn rank_words(&self, index: usize) -> [u64; RANK_FIELDS.len()] {
        let there = index < self.layout.ranks + self.layout.followers;
        std::array::from_fn(|at| if there { self.get(self.layout.rank(index) + at) } else { 0 })
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

    /// Shows that a rank's process runs, whatever its engine does; that rank only.
    pub fn pulse(&self, rank: usize, epoch: u64) {
        self.set_rank(rank, Rank::PulseEpoch, epoch);
        self.set_rank(rank, Rank::PulseNs, monotonic_ns());
    }

    /// Says what a rank's engine does from now on, as an index into `RANK_PHASES`, and in which step; that rank only.
    pub fn enter(&self, rank: usize, phase: u64, step: u64) {
        let now = monotonic_ns();
        self.set_rank(rank, Rank::PhaseSinceNs, now);
        self.set_rank(rank, Rank::MovedNs, now);
        self.set_rank(rank, Rank::Step, step);
        self.set_rank(rank, Rank::Phase, phase);
    }

    /// Shows what was told of a rank on another machine, its times as nanoseconds ago.
    pub fn relay(&self, rank: usize, told: Relayed) {
        let now = monotonic_ns();
        for (field, value) in [
            (Rank::PulseEpoch, told.epoch),
            (Rank::PulseNs, now.saturating_sub(told.pulse_age)),
            (Rank::PhaseSinceNs, now.saturating_sub(told.phase_age)),
            (Rank::MovedNs, now.saturating_sub(told.moved_age)),
            (Rank::Awaits, u64::from(told.awaits)),
            (Rank::Step, told.step),
            (Rank::Phase, told.phase),
        ] {
            self.set_rank(rank, field, value);
        }
    }

    /// Shows that a rank's engine gets ahead with what it does; that rank only.
    pub fn moved(&self, rank: usize) {
        self.set_rank(rank, Rank::MovedNs, monotonic_ns());
    }

    /// Says whether a rank waits for others of its group from now on; that rank only.
    pub fn awaits(&self, rank: usize, peers: bool) {
        self.set_rank(rank, Rank::Awaits, u64::from(peers));
    }

    /// Seconds since the time in a word of a rank's block; infinite while there is none.
    pub fn rank_age(&self, rank: usize, field: Rank) -> f64 {
        match self.rank(rank, field) {
            0 => f64::INFINITY,
            then => monotonic_ns().saturating_sub(then) as f64 / 1e9,
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

    /// Adds to a word whose one writer this process is.
    fn count(&self, index: usize, delta: u64) {
        let word = self.word(index);
        word.store(word.load(Ordering::Relaxed).wrapping_add(delta), Ordering::Relaxed);
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
