//! The control plane.

use std::os::fd::RawFd;
use std::path::PathBuf;

use pyo3::prelude::*;
use servekit_core::dispatch::LoadBalanceMethod;
use servekit_core::fanout::MAX_UNACKNOWLEDGED;
use servekit_core::plane::{Plane, PlaneConfig, RESUME_MEMORY, Remote};

use crate::errors::{Error, seconds};
use crate::process::build_name;

/// Secret key, where messages of ranks on other machines arrive, and where each of these ranks fetches its own.
type Elsewhere = (String, RawFd, Vec<(usize, RawFd)>);

/// The threads of the control process: router, detokenizer shards and fan-out. They never take the GIL.
#[pyclass(frozen, module = "servekit._core")]
pub(crate) struct ControlPlane(Plane);

#[pymethods]
impl ControlPlane {
    #[new]
    #[pyo3(signature = (
        *,
        run_dir,
        epoch,
        rank_epochs,
        worker_epochs,
        detokenizer_workers=1,
        load_balance_method="auto",
        tokenizer_file=None,
        state_page=None,
        rank_wait_timeout=30.0,
        max_queued_requests=1024,
        max_unacknowledged=MAX_UNACKNOWLEDGED,
        max_queued_tokens=None,
        max_requests_per_worker=None,
        resume_memory=RESUME_MEMORY,
        remote=None,
    ))]
    #[expect(clippy::too_many_arguments, reason = "keywords in Python")]
    fn new(
        run_dir: PathBuf,
        epoch: u32,
        rank_epochs: Vec<u32>,
        worker_epochs: Vec<u32>,
        detokenizer_workers: usize,
        load_balance_method: &str,
        tokenizer_file: Option<PathBuf>,
        state_page: Option<String>,
        rank_wait_timeout: f64,
        max_queued_requests: usize,
        max_unacknowledged: usize,
        max_queued_tokens: Option<u64>,
        max_requests_per_worker: Option<usize>,
        resume_memory: usize,
        remote: Option<Elsewhere>,
    ) -> PyResult<Self> {
        let config = PlaneConfig {
            run_dir,
            epoch,
            rank_epochs,
            worker_epochs,
            shards: detokenizer_workers,
            method: load_balance_method.parse::<LoadBalanceMethod>().map_err(Error::from)?,
            tokenizer_file,
            state_page,
            rank_wait: seconds("rank_wait_timeout", rank_wait_timeout)?,
            max_queued: max_queued_requests,
            max_queued_tokens: max_queued_tokens.unwrap_or(u64::MAX),
            max_per_worker: max_requests_per_worker.unwrap_or(usize::MAX),
            resume_memory,
            build: build_name(),
            max_unacknowledged,
            endpoints: None,
            remote: remote.map(|(secret_key, egress, ranks)| Remote { secret_key, egress, ranks }),
        };
        Ok(Self(Plane::new(config).map_err(Error::from)?))
    }

    /// Bind the sockets and start the threads.
    fn start(&self, py: Python<'_>) -> PyResult<()> {
        Ok(py.detach(|| self.0.start()).map_err(Error::from)?)
    }

    /// Wait up to `timeout` seconds for something to go wrong for good; what it was, or None.
    fn wait(&self, py: Python<'_>, timeout: f64) -> PyResult<Option<String>> {
        let timeout = seconds("timeout", timeout)?;
        Ok(py.detach(|| self.0.wait(timeout)))
    }

    /// Let a life of a rank take requests, running at most `max_running` at once, or end what it has with `reason`.
    #[pyo3(signature = (rank, active, reason="", max_running=0, epoch=None))]
    fn set_rank(
        &self,
        py: Python<'_>,
        rank: usize,
        active: bool,
        reason: &str,
        max_running: usize,
        epoch: Option<u32>,
    ) -> PyResult<()> {
        let reason = reason.to_owned();
        Ok(py.detach(|| self.0.set_rank(rank, epoch, active, reason, max_running)).map_err(Error::from)?)
    }

    /// End what a life of a worker had: it is gone.
    #[pyo3(signature = (worker, epoch=None))]
    fn worker_down(&self, py: Python<'_>, worker: usize, epoch: Option<u32>) -> PyResult<()> {
        Ok(py.detach(|| self.0.worker_down(worker, epoch)).map_err(Error::from)?)
    }

    /// End every request with an error and take no further one; how many there were.
    ///
    /// Returns once their ends have been handed to the sockets, or at the deadline.
    fn fail_all(&self, py: Python<'_>, message: &str, timeout: f64) -> PyResult<usize> {
        let (message, timeout) = (message.to_owned(), seconds("timeout", timeout)?);
        Ok(py.detach(|| self.0.fail_all(message, timeout)).map_err(Error::from)?)
    }

    /// Take no further request and wait up to `timeout` seconds until none is in flight; whether that came true.
    fn drain(&self, py: Python<'_>, timeout: f64) -> PyResult<bool> {
        let timeout = seconds("timeout", timeout)?;
        Ok(py.detach(|| self.0.drain(timeout)).map_err(Error::from)?)
    }

    /// End all threads, waiting up to `timeout` seconds; whether they have ended.
    fn stop(&self, py: Python<'_>, timeout: f64) -> PyResult<bool> {
        let timeout = seconds("timeout", timeout)?;
        Ok(py.detach(|| self.0.stop(timeout)))
    }

    /// What the control process holds, as JSON.
    fn state(&self, py: Python<'_>) -> PyResult<String> {
        Ok(py.detach(|| self.0.state()).map_err(Error::from)?)
    }

    /// The next log line as (level, thread, text), levels as in `logging`; None if none came within `timeout` seconds.
    fn next_log(&self, py: Python<'_>, timeout: f64) -> PyResult<Option<(u8, &'static str, String)>> {
        let timeout = seconds("timeout", timeout)?;
        let line = py.detach(|| self.0.next_log(timeout));
        Ok(line.map(|line| (line.level as u8, line.target, line.message)))
    }

    /// Least level that the threads write, as in `logging`; 0 until a control message has set one.
    #[getter]
    fn log_level(&self) -> u8 {
        self.0.log_level()
    }
}
