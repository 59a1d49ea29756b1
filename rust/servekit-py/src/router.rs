//! The router with its table, over sockets that the caller names.

use std::path::PathBuf;

use pyo3::prelude::*;
use servekit_core::fanout::MAX_UNACKNOWLEDGED;
use servekit_core::plane::{Endpoints, Plane, PlaneConfig, RESUME_MEMORY};

use crate::dispatch::LoadBalanceMethod;
use crate::errors::{Error, seconds};
use crate::process::build_name;

/// Takes requests of any number of workers, sends each to a rank, remembers it until its end, and splits the ranks'
/// batches over the workers.
#[pyclass(frozen, module = "servekit._core")]
pub(crate) struct MultiTokenizerRouter {
    plane: Plane,
    ranks: usize,
}

#[pymethods]
impl MultiTokenizerRouter {
    #[new]
    #[pyo3(signature = (
        *,
        ingress,
        egress,
        ranks,
        run_dir,
        worker_epochs=vec![1],
        rank_epochs=None,
        epoch=1,
        method=LoadBalanceMethod::Auto,
        tokenizer_file=None,
        rank_wait_timeout=30.0,
        max_queued_requests=1024,
        max_queued_tokens=None,
        max_requests_per_worker=None,
        resume_memory=RESUME_MEMORY,
    ))]
    #[expect(clippy::too_many_arguments, reason = "keywords in Python")]
    fn new(
        ingress: String,
        egress: String,
        ranks: Vec<String>,
        run_dir: PathBuf,
        worker_epochs: Vec<u32>,
        rank_epochs: Option<Vec<u32>>,
        epoch: u32,
        method: LoadBalanceMethod,
        tokenizer_file: Option<PathBuf>,
        rank_wait_timeout: f64,
        max_queued_requests: usize,
        max_queued_tokens: Option<u64>,
        max_requests_per_worker: Option<usize>,
        resume_memory: usize,
    ) -> PyResult<Self> {
        let count = ranks.len();
        let config = PlaneConfig {
            run_dir,
            epoch,
            rank_epochs: rank_epochs.unwrap_or_else(|| vec![1; count]),
            worker_epochs,
            shards: 1,
            method: method.into(),
            tokenizer_file,
            state_page: None,
            rank_wait: seconds("rank_wait_timeout", rank_wait_timeout)?,
            max_queued: max_queued_requests,
            max_queued_tokens: max_queued_tokens.unwrap_or(u64::MAX),
            max_per_worker: max_requests_per_worker.unwrap_or(usize::MAX),
            resume_memory,
            build: build_name(),
            max_unacknowledged: MAX_UNACKNOWLEDGED,
            endpoints: Some(Endpoints { ingress, egress, ranks }),
            remote: None,
        };
        Ok(Self { plane: Plane::new(config).map_err(Error::from)?, ranks: count })
    }

    /// Bind the sockets and start the threads; each rank takes requests once it has greeted.
    fn start(&self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| {
            self.plane.start()?;
            (0..self.ranks).try_for_each(|rank| self.plane.set_rank(rank, None, true, String::new(), 0))
        })
        .map_err(Error::from)?;
        Ok(())
    }

    /// Wait up to `timeout` seconds for something to go wrong for good; what it was, or None.
    fn wait(&self, py: Python<'_>, timeout: f64) -> PyResult<Option<String>> {
        let timeout = seconds("timeout", timeout)?;
        Ok(py.detach(|| self.plane.wait(timeout)))
    }

    /// Let a life of a rank take requests, or end what it has with `reason`.
    #[pyo3(signature = (rank, active, reason="", epoch=None))]
    fn set_rank(&self, py: Python<'_>, rank: usize, active: bool, reason: &str, epoch: Option<u32>) -> PyResult<()> {
        let reason = reason.to_owned();
        Ok(py.detach(|| self.plane.set_rank(rank, epoch, active, reason, 0)).map_err(Error::from)?)
    }

    /// End what a life of a worker had: it is gone.
    #[pyo3(signature = (worker, epoch=None))]
    fn worker_down(&self, py: Python<'_>, worker: usize, epoch: Option<u32>) -> PyResult<()> {
        Ok(py.detach(|| self.plane.worker_down(worker, epoch)).map_err(Error::from)?)
    }

    /// Take no further request and wait up to `timeout` seconds until none is in flight; whether that came true.
    fn drain(&self, py: Python<'_>, timeout: f64) -> PyResult<bool> {
        let timeout = seconds("timeout", timeout)?;
        Ok(py.detach(|| self.plane.drain(timeout)).map_err(Error::from)?)
    }

    /// End all threads, waiting up to `timeout` seconds; whether they have ended.
    fn stop(&self, py: Python<'_>, timeout: f64) -> PyResult<bool> {
        let timeout = seconds("timeout", timeout)?;
        Ok(py.detach(|| self.plane.stop(timeout)))
    }

    /// Ranks, workers, requests in flight and counters, as JSON.
    fn state(&self, py: Python<'_>) -> PyResult<String> {
        Ok(py.detach(|| self.plane.state()).map_err(Error::from)?)
    }
}
