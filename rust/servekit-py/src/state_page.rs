//! The state page.

use parking_lot::RwLock;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};
use servekit_core::state_page::{
    CONTROL_FIELDS, Control, Counted, Header, Histogram, RANK_FIELDS, RANK_PHASES, Rank, Relayed, StatePage as Page,
    WORKER_FIELDS, WORKER_RANK_FIELDS, Worker, WorkerRank,
};

use crate::errors::{Error, PhaseError, SettingError};

/// One shared memory segment that every process reads and that no lock guards.
#[pyclass(frozen, module = "servekit._core")]
pub(crate) struct StatePage(RwLock<Option<Page>>);

impl StatePage {
    fn with<T>(&self, read: impl FnOnce(&Page) -> T) -> PyResult<T> {
        match &*self.0.read() {
            Some(page) => Ok(read(page)),
            None => Err(PhaseError::new_err("the state page is closed")),
        }
    }
}

#[pymethods]
impl StatePage {
    /// Make a page for that many workers, ranks and followers, readable by this user only.
    #[staticmethod]
    #[pyo3(signature = (name, workers, ranks, followers = 0))]
    fn create(name: &str, workers: usize, ranks: usize, followers: usize) -> PyResult<Self> {
        Ok(Self(RwLock::new(Some(Page::create(name, workers, ranks, followers).map_err(Error::from)?))))
    }

    /// Map the page of that name.
    #[staticmethod]
    fn open(name: &str) -> PyResult<Self> {
        Ok(Self(RwLock::new(Some(Page::open(name).map_err(Error::from)?))))
    }

    /// Remove the segment's name; maps that exist stay valid.
    fn unlink(&self) -> PyResult<()> {
        self.with(|page| Page::unlink(page.name()))?.map_err(|error| Error::from(error).into())
    }

    /// Unmap it; nothing else works afterwards.
    fn close(&self) {
        self.0.write().take();
    }

    /// Name of the segment.
    #[getter]
    fn name(&self) -> PyResult<String> {
        self.with(|page| page.name().to_owned())
    }

    /// 0 starting, 1 ready, 2 draining, 3 stopping; main writes it.
    #[getter]
    fn phase(&self) -> PyResult<u64> {
        self.with(|page| page.header(Header::Phase))
    }

    #[setter]
    fn set_phase(&self, value: u64) -> PyResult<()> {
        if value > 3 {
            return Err(SettingError::new_err(format!("phase is {value}, must be 0 to 3")));
        }
        self.with(|page| page.set_header(Header::Phase, value))
    }

    /// Whether the server has been ready once.
    #[getter]
    fn ready_once(&self) -> PyResult<bool> {
        self.with(|page| page.header(Header::ReadyOnce) != 0)
    }

    /// Note that the server has been ready once.
    fn mark_ready(&self) -> PyResult<()> {
        self.with(|page| page.set_header(Header::ReadyOnce, 1))
    }

    /// Note which life of a process is the present one; `role` is control, http, scheduler or follower.
    fn set_process(&self, role: &str, index: usize, epoch: u64, pid: u64) -> PyResult<()> {
        self.with(|page| {
            let count = match role {
                "control" => 1,
                "http" => page.workers(),
                "scheduler" => page.ranks(),
                "follower" => page.followers(),
                _ => return Err(SettingError::new_err(format!("unknown role {role:?}"))),
            };
            if index >= count {
                return Err(SettingError::new_err(format!("{role} {index}: there are {count}")));
            }
            match role {
                "control" => {
                    page.set_control(Control::Epoch, epoch);
                    page.set_control(Control::Pid, pid);
                }
                "http" => page.start_worker(index, epoch, pid),
                _ => {
                    let place = if role == "follower" { page.ranks() + index } else { index };
                    page.set_rank(place, Rank::Epoch, epoch);
                    page.set_rank(place, Rank::Pid, pid);
                }
            }
            Ok(())
        })?
    }

    /// Note that a process has ended: it holds nothing any more, what it counted stays.
    fn end_process(&self, role: &str, index: usize) -> PyResult<()> {
        self.with(|page| {
            match role {
                "control" => page.set_control(Control::Pid, 0),
                "http" => page.end_worker(index),
                "scheduler" => page.set_rank(index, Rank::Pid, 0),
                "follower" => page.set_rank(page.ranks() + index, Rank::Pid, 0),
                _ => return Err(SettingError::new_err(format!("unknown role {role:?}"))),
            }
            Ok(())
        })?
    }

    /// Show what was told of a rank or follower on another machine, its times in seconds before now.
    #[expect(clippy::too_many_arguments, reason = "one for each thing that is shown, by name in Python")]
    #[pyo3(signature = (index, epoch, pulse_age_s, phase, phase_age_s, moved_age_s, step, awaits))]
    fn relay_rank(
        &self,
        index: usize,
        epoch: u64,
        pulse_age_s: f64,
        phase: &str,
        phase_age_s: f64,
        moved_age_s: f64,
        step: u64,
        awaits: bool,
    ) -> PyResult<()> {
        let Some(phase) = RANK_PHASES.iter().position(|name| *name == phase) else {
            return Err(SettingError::new_err(format!("unknown phase {phase:?}")));
        };
        // Casts from floats saturate.
        let ns = |seconds: f64| (seconds.max(0.0) * 1e9) as u64;
        let told = Relayed {
            epoch,
            pulse_age: ns(pulse_age_s),
            phase_age: ns(phase_age_s),
            moved_age: ns(moved_age_s),
            phase: phase as u64,
            step,
            awaits,
        };
        self.with(|page| page.relay(index, told))
    }

    /// Add to a number of a worker, stopping at 0; for that worker only.
    fn worker_add(&self, index: usize, field: &str, delta: i64) -> PyResult<()> {
        let found = COUNTED.iter().find(|each| WORKER_FIELDS[**each as usize] == field);
        let Some(field) = found else {
            return Err(SettingError::new_err(format!("unknown number of a worker {field:?}")));
        };
        self.with(|page| page.worker_add(index, *field, delta))
    }

    /// Add to a worker's counts of the tokens of a rank; for that worker only.
    fn count_tokens(&self, index: usize, rank: usize, prompt: u64, cached: u64, generated: u64) -> PyResult<()> {
        self.with(|page| {
            for (field, tokens) in [
                (WorkerRank::PromptTokens, prompt),
                (WorkerRank::CachedTokens, cached),
                (WorkerRank::GenerationTokens, generated),
            ] {
                page.worker_rank_add(index, rank, field, tokens);
            }
        })
    }

    /// Count values of as many seconds in a worker's histogram; for that worker only.
    #[pyo3(signature = (index, histogram, seconds, times = 1))]
    fn observe(&self, index: usize, histogram: &str, seconds: f64, times: u64) -> PyResult<()> {
        let Some(histogram) = Histogram::named(histogram) else {
            return Err(SettingError::new_err(format!("unknown histogram {histogram:?}")));
        };
        self.with(|page| page.observe(index, histogram, seconds, times))
    }

    /// What all workers counted, by histogram: upper bounds of its buckets, their counts and one more, and the sum.
    fn histograms<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        self.with(|page| {
            let all = PyDict::new(py);
            for histogram in Histogram::ALL {
                let Counted { counts, sum_s } = page.counted(histogram);
                all.set_item(histogram.name(), (histogram.bounds().to_vec(), counts, sum_s))?;
            }
            Ok(all)
        })?
    }

    /// Take places for a worker's requests if all workers together then hold at most `max_requests`.
    fn reserve(&self, index: usize, requests: u64, tokens: u64, max_requests: u64) -> PyResult<bool> {
        self.with(|page| page.reserve(index, requests, tokens, max_requests))
    }

    /// Give back places that `reserve` took.
    fn release(&self, index: usize, requests: u64, tokens: u64) -> PyResult<()> {
        self.with(|page| page.release(index, requests, tokens))
    }

    /// Seconds since the oldest beat of a control thread; infinite while one has not beaten yet.
    fn control_age(&self) -> PyResult<f64> {
        self.with(Page::control_age)
    }

    /// Prompt tokens that wait to be computed, as control last said.
    fn queued_tokens(&self) -> PyResult<u64> {
        self.with(|page| page.control(Control::QueuedTokens))
    }

    /// Whether each rank takes requests.
    fn active_ranks(&self) -> PyResult<Vec<bool>> {
        self.with(|page| (0..page.ranks()).map(|rank| page.rank(rank, Rank::Active) != 0).collect())
    }

    /// All of it as plain values: phase, ready_once, control, ranks, followers, workers.
    fn snapshot<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        self.with(|page| {
            let all = PyDict::new(py);
            all.set_item("phase", page.header(Header::Phase))?;
            all.set_item("ready_once", page.header(Header::ReadyOnce) != 0)?;
            let control = block(py, &CONTROL_FIELDS, &page.control_words())?;
            let age = page.control_age();
            control.set_item("age_s", age.is_finite().then_some(age))?;
            all.set_item("control", control)?;
            let ranks = PyList::empty(py);
            for index in 0..page.ranks() {
                let rank = block(py, &RANK_FIELDS, &page.rank_words(index))?;
                rank.set_item("active", page.rank(index, Rank::Active) != 0)?;
                says(&rank, page, index)?;
                for (name, total) in WORKER_RANK_FIELDS.iter().zip(page.rank_totals(index)) {
                    rank.set_item(name, total)?;
                }
                ranks.append(rank)?;
            }
            all.set_item("ranks", ranks)?;
            let followers = PyList::empty(py);
            for index in page.ranks()..page.ranks() + page.followers() {
                let words = page.rank_words(index);
                let own = FOLLOWER_FIELDS.map(|field| (RANK_FIELDS[field as usize], words[field as usize]));
                let (names, words): (Vec<_>, Vec<_>) = own.into_iter().unzip();
                let follower = block(py, &names, &words)?;
                says(&follower, page, index)?;
                followers.append(follower)?;
            }
            all.set_item("followers", followers)?;
            let workers = PyList::empty(py);
            for index in 0..page.workers() {
                workers.append(block(py, &WORKER_FIELDS, &page.worker_words(index))?)?;
            }
            all.set_item("workers", workers)?;
            Ok(all)
        })?
    }
}

/// A worker's words that it may add to.
const COUNTED: [Worker; WORKER_FIELDS.len() - 2] = [
    Worker::OpenStreams,
    Worker::ReservedTokens,
    Worker::CacheBytes,
    Worker::Requests,
    Worker::Refused,
    Worker::Aborted,
    Worker::Stopped,
    Worker::Exhausted,
    Worker::Failed,
    Worker::Fenced,
    Worker::Dropped,
    Worker::Gaps,
    Worker::Unauthorized,
    Worker::SlowSenders,
    Worker::SlowReaders,
    Worker::Crowded,
    Worker::CacheLookups,
    Worker::CacheHits,
    Worker::CacheTokens,
    Worker::CacheHitTokens,
];

/// What a follower's block tells; control knows nothing of it.
const FOLLOWER_FIELDS: [Rank; 9] = [
    Rank::Epoch,
    Rank::Pid,
    Rank::PulseEpoch,
    Rank::PulseNs,
    Rank::Phase,
    Rank::PhaseSinceNs,
    Rank::Step,
    Rank::MovedNs,
    Rank::Awaits,
];

/// What a rank's process says of itself, in words and seconds.
fn says(rank: &Bound<'_, PyDict>, page: &Page, index: usize) -> PyResult<()> {
    rank.set_item("phase", RANK_PHASES.get(page.rank(index, Rank::Phase) as usize))?;
    let ages = [("pulse_age_s", Rank::PulseNs), ("phase_age_s", Rank::PhaseSinceNs), ("moved_age_s", Rank::MovedNs)];
    for (name, field) in ages {
        let age = page.rank_age(index, field);
        rank.set_item(name, age.is_finite().then_some(age))?;
    }
    Ok(())
}

fn block<'py>(py: Python<'py>, fields: &[&str], words: &[u64]) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    for (name, word) in fields.iter().zip(words) {
        dict.set_item(name, word)?;
    }
    Ok(dict)
}
