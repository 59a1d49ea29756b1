//! The threads that share the work of one call.

use std::cell::UnsafeCell;
use std::hint::spin_loop;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, TryLockError};
use std::thread::{self, JoinHandle, Thread};
use std::time::{Duration, Instant};

/// How long a thread without work looks for more before it sleeps. The calls of one step come closer together than
/// that, so the threads are awake throughout a step, and idle soon after the last one.
const AWAKE: Duration = Duration::from_micros(150);
/// Looks of an idle thread between two offers of the core to others.
const LOOKS: usize = 100;
/// Looks of a caller at helpers that finish their last pieces, before it offers its core to others: only a helper that
/// has lost its own takes that long, and a core that is given away comes back late.
const PATIENCE: usize = 2_000;

type Work<'a> = &'a (dyn Fn(usize) + Sync);

/// A call's work, cut into pieces.
#[derive(Clone, Copy)]
struct Job {
    work: Work<'static>,
    pieces: usize,
}

/// Threads that wait for work together with their caller.
///
/// Whoever is free takes the next piece. A helper that does not get a core, because a neighbour has it, takes none, and
/// the caller does all of it.
pub struct Pool {
    shared: Arc<Shared>,
    helpers: Vec<(JoinHandle<()>, Thread)>,
    busy: Mutex<()>,
}

struct Shared {
    /// Odd while there is a job, and another number for each.
    turn: AtomicU64,
    /// Written by the caller, while `turn` is even and nobody is `inside`.
    job: UnsafeCell<Option<Job>>,
    /// The next piece that nobody has.
    next: AtomicUsize,
    /// Helpers that may look at the job.
    inside: AtomicUsize,
    closing: AtomicBool,
    /// For each helper: it sleeps, or is about to.
    asleep: Vec<AtomicBool>,
}

// SAFETY: `job` is written only while nobody reads it, see `Pool::run` and `Shared::help`.
unsafe impl Sync for Shared {}
// SAFETY: a job is a shared reference to something `Sync`.
unsafe impl Send for Shared {}

impl Pool {
    /// Starts `threads - 1` helpers; with fewer than two threads the caller works alone.
    ///
    /// # Errors
    ///
    /// The system gives no thread.
    pub fn new(threads: usize) -> std::io::Result<Self> {
        let count = threads.saturating_sub(1);
        let shared = Arc::new(Shared {
            turn: AtomicU64::new(0),
            job: UnsafeCell::new(None),
            next: AtomicUsize::new(0),
            inside: AtomicUsize::new(0),
            closing: AtomicBool::new(false),
            asleep: (0..count).map(|_| AtomicBool::new(false)).collect(),
        });
        let mut pool = Self { shared, helpers: Vec::new(), busy: Mutex::new(()) };
        for index in 0..count {
            let shared = Arc::clone(&pool.shared);
            let handle =
                thread::Builder::new().name(format!("kernels-{}", index + 1)).spawn(move || shared.serve(index))?;
            let thread = handle.thread().clone();
            pool.helpers.push((handle, thread));
        }
        Ok(pool)
    }

    /// Threads that share a call, the caller among them.
    #[must_use]
    pub fn threads(&self) -> usize {
        self.helpers.len() + 1
    }

    /// Calls `work` with every number below `pieces`, once each, and returns when all are done.
    ///
    /// A second caller at the same time works alone. `work` must not panic: on a helper that ends the process.
    pub fn run(&self, pieces: usize, work: Work<'_>) {
        let alone = || (0..pieces).for_each(work);
        if self.helpers.is_empty() || pieces < 2 {
            return alone();
        }
        let _busy = match self.busy.try_lock() {
            Ok(guard) => guard,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return alone(),
        };
        let shared = &*self.shared;
        // SAFETY: this function does not return, not by a panic either, before every helper has let go of it.
        let work = unsafe { std::mem::transmute::<Work<'_>, Work<'static>>(work) };
        let closing = Closing(shared);
        // SAFETY: `turn` is even and `inside` was 0 since then, so no helper reads it.
        unsafe { *shared.job.get() = Some(Job { work, pieces }) };
        shared.next.store(0, Ordering::Relaxed);
        shared.turn.fetch_add(1, Ordering::SeqCst);
        for (asleep, (_, thread)) in shared.asleep.iter().zip(&self.helpers) {
            if asleep.swap(false, Ordering::SeqCst) {
                thread.unpark();
            }
        }
        shared.take(Job { work, pieces });
        drop(closing);
    }
}

/// Ends a job: afterwards no helper has it.
struct Closing<'a>(&'a Shared);

impl Drop for Closing<'_> {
    fn drop(&mut self) {
        let turn = &self.0.turn;
        if turn.load(Ordering::Relaxed) % 2 == 1 {
            // A panic leaves pieces that nobody needs any more.
            self.0.next.store(usize::MAX / 2, Ordering::Relaxed);
            turn.fetch_add(1, Ordering::SeqCst);
        }
        let mut looks = 0;
        while self.0.inside.load(Ordering::SeqCst) != 0 {
            pause(&mut looks, PATIENCE);
        }
    }
}

impl Shared {
    fn take(&self, job: Job) {
        loop {
            let piece = self.next.fetch_add(1, Ordering::Relaxed);
            if piece >= job.pieces {
                return;
            }
            (job.work)(piece);
        }
    }

    fn serve(&self, index: usize) {
        let mut seen = 0;
        while !self.closing.load(Ordering::SeqCst) {
            seen = self.wait(index, seen);
            self.help(seen);
        }
    }

    /// Waits for a job other than the one of turn `seen`; returns its turn, or `seen` when the pool ends.
    fn wait(&self, index: usize, seen: u64) -> u64 {
        let fresh = || {
            let turn = self.turn.load(Ordering::SeqCst);
            (turn % 2 == 1 && turn != seen).then_some(turn)
        };
        loop {
            let (mut looks, until) = (0, Instant::now() + AWAKE);
            loop {
                if let Some(turn) = fresh() {
                    return turn;
                }
                pause(&mut looks, LOOKS);
                if looks == 0 && Instant::now() > until {
                    break;
                }
            }
            // The caller looks at this after it has changed the turn, and the turn is looked at after this: one of
            // the two sees the other.
            self.asleep[index].store(true, Ordering::SeqCst);
            while self.asleep[index].load(Ordering::SeqCst) && fresh().is_none() {
                if self.closing.load(Ordering::SeqCst) {
                    return seen;
                }
                thread::park();
            }
            self.asleep[index].store(false, Ordering::SeqCst);
        }
    }

    fn help(&self, turn: u64) {
        self.inside.fetch_add(1, Ordering::SeqCst);
        if self.turn.load(Ordering::SeqCst) == turn {
            // SAFETY: the turn is this job's after `inside` was raised, so the caller waits in `Closing` before it
            // returns or writes another job.
            let job = unsafe { *self.job.get() };
            if let Some(job) = job {
                // A piece lost to a panic would be a wrong result somewhere; there is no caller to tell it.
                let guard = AbortOnPanic;
                self.take(job);
                std::mem::forget(guard);
            }
        }
        self.inside.fetch_sub(1, Ordering::SeqCst);
    }
}

struct AbortOnPanic;

impl Drop for AbortOnPanic {
    fn drop(&mut self) {
        std::process::abort();
    }
}

/// One look's pause; after so many an offer of the core to whoever else wants it.
fn pause(looks: &mut usize, most: usize) {
    *looks += 1;
    if *looks == most {
        *looks = 0;
        thread::yield_now();
    } else {
        spin_loop();
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.closing.store(true, Ordering::SeqCst);
        for (handle, thread) in self.helpers.drain(..) {
            thread.unpark();
            // A helper ends by returning or takes the process with it.
            let _ = handle.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::Pool;

    #[test]
    fn every_piece_is_done_once() {
        let pool = Pool::new(3).unwrap();
        for round in 0..2000 {
            let pieces = round % 17;
            let done: Vec<AtomicUsize> = (0..pieces).map(|_| AtomicUsize::new(0)).collect();
            pool.run(pieces, &|i| {
                done[i].fetch_add(1, Ordering::Relaxed);
            });
            assert!(done.iter().all(|count| count.load(Ordering::Relaxed) == 1));
            if round % 500 == 0 {
                // Long enough for the helpers to sleep.
                std::thread::sleep(super::AWAKE * 20);
            }
        }
    }

    #[test]
    fn two_callers_do_not_mix() {
        let pool = Pool::new(2).unwrap();
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    for _ in 0..500 {
                        let sum = AtomicUsize::new(0);
                        pool.run(9, &|i| {
                            sum.fetch_add(i, Ordering::Relaxed);
                        });
                        assert_eq!(sum.load(Ordering::Relaxed), 36);
                    }
                });
            }
        });
    }
}
