//! A rank's sign of life on the state page.

use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::Mutex;
use pyo3::prelude::*;
use servekit_core::state_page::{RANK_PHASES, StatePage};

use crate::errors::{Error, ResourceError, SettingError};

/// Time between two beats.
const EVERY: Duration = Duration::from_millis(200);

/// A thread that says on the state page, five times a second, that a rank's process runs.
///
/// It never takes the GIL, so it beats on while Python computes, waits or hangs. What the engine does, and since when,
/// stands beside it: the two together tell a process that is gone or stopped from one that is stuck.
#[pyclass(frozen, module = "servekit._core")]
pub(crate) struct Pulse {
    page: Arc<StatePage>,
    rank: usize,
    /// The thread, and what ends it when it is dropped.
    beat: Mutex<Option<(SyncSender<()>, JoinHandle<()>)>>,
}

#[pymethods]
impl Pulse {
    /// Start to beat for one life of a rank or follower, on the page of that name.
    #[new]
    fn new(page: &str, rank: usize, epoch: u64) -> PyResult<Self> {
        let page = Arc::new(StatePage::open(page).map_err(Error::from)?);
        let places = page.ranks() + page.followers();
        if rank >= places {
            return Err(SettingError::new_err(format!("rank {rank}: there are {places}")));
        }
        let (stop, stopped) = sync_channel(0);
        let beating = Arc::clone(&page);
        let beat = move || {
            loop {
                beating.pulse(rank, epoch);
                if stopped.recv_timeout(EVERY) != Err(RecvTimeoutError::Timeout) {
                    return;
                }
            }
        };
        let thread = std::thread::Builder::new()
            .name("pulse".to_owned())
            .spawn(beat)
            .map_err(|error| ResourceError::new_err(format!("can't start the thread pulse: {error}")))?;
        Ok(Self { page, rank, beat: Mutex::new(Some((stop, thread))) })
    }

    /// Say what the engine does from now on: loading, idle, working, computing or waiting; and in which step.
    fn enter(&self, phase: &str, step: u64) -> PyResult<()> {
        let Some(phase) = RANK_PHASES.iter().position(|name| *name == phase) else {
            return Err(SettingError::new_err(format!("unknown phase of a rank {phase:?}")));
        };
        self.page.enter(self.rank, phase as u64, step);
        Ok(())
    }

    /// Say that it gets ahead with that.
    fn moved(&self) {
        self.page.moved(self.rank);
    }

    /// Say whether it waits for others of its group from now on.
    fn awaits(&self, peers: bool) {
        self.page.awaits(self.rank, peers);
    }

    /// Stop to beat. Twice is no error.
    fn close(&self, py: Python<'_>) {
        if let Some((stop, thread)) = self.beat.lock().take() {
            drop(stop);
            // The thread has nothing that could panic, and its end is all that is wanted.
            py.detach(|| drop(thread.join()));
        }
    }
}
