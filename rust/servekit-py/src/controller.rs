//! Dispatch as a thread of its own, over sockets that the caller names.

use pyo3::prelude::*;
use pyo3::types::PyDict;
use servekit_core::plane::{Controller, ControllerConfig, Endpoints};

use crate::dispatch::LoadBalanceMethod;
use crate::errors::{Error, seconds};
use crate::process::build_name;

/// Sends each request to the rank that a method chooses, and learns from the ranks' batches what they hold.
#[pyclass(frozen, module = "servekit._core")]
pub(crate) struct DataParallelController(Controller);

#[pymethods]
impl DataParallelController {
    #[new]
    #[pyo3(signature = (*, ingress, egress, ranks, method=LoadBalanceMethod::Auto, output=None, epoch=1))]
    fn new(
        ingress: String,
        egress: String,
        ranks: Vec<String>,
        method: LoadBalanceMethod,
        output: Option<String>,
        epoch: u32,
    ) -> PyResult<Self> {
        let endpoints = Endpoints { ingress, egress, ranks };
        let config = ControllerConfig { endpoints, output, method: method.into(), epoch, build: build_name() };
        Ok(Self(Controller::new(config).map_err(Error::from)?))
    }

    /// Bind the sockets and start the thread.
    fn start(&self, py: Python<'_>) -> PyResult<()> {
        Ok(py.detach(|| self.0.start()).map_err(Error::from)?)
    }

    /// Wait up to `timeout` seconds for something to go wrong for good; what it was, or None.
    fn wait(&self, py: Python<'_>, timeout: f64) -> PyResult<Option<String>> {
        let timeout = seconds("timeout", timeout)?;
        Ok(py.detach(|| self.0.wait(timeout)))
    }

    /// End the thread, waiting up to `timeout` seconds; whether it has ended.
    fn stop(&self, py: Python<'_>, timeout: f64) -> PyResult<bool> {
        let timeout = seconds("timeout", timeout)?;
        Ok(py.detach(|| self.0.stop(timeout)))
    }

    /// Let a rank take requests, or not.
    fn set_active(&self, py: Python<'_>, rank: usize, active: bool) {
        py.detach(|| self.0.with_budget(|budget| budget.set_active(rank, active)));
    }

    /// Whether each rank takes requests.
    #[getter]
    fn active(&self, py: Python<'_>) -> Vec<bool> {
        py.detach(|| self.0.with_budget(|budget| budget.ranks().iter().map(|rank| rank.active()).collect()))
    }

    /// Requests of each rank.
    #[getter]
    fn total_requests(&self, py: Python<'_>) -> Vec<u64> {
        py.detach(|| self.0.with_budget(|budget| budget.ranks().iter().map(|rank| rank.requests()).collect()))
    }

    /// Tokens of each rank.
    #[getter]
    fn total_tokens(&self, py: Python<'_>) -> Vec<u64> {
        py.detach(|| self.0.with_budget(|budget| budget.ranks().iter().map(|rank| rank.tokens()).collect()))
    }

    /// What it has counted.
    fn counters<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let counts = py.detach(|| self.0.counts());
        let dict = PyDict::new(py);
        for (name, value) in [
            ("dispatched", counts.dispatched),
            ("refused", counts.refused),
            ("broadcast", counts.broadcast),
            ("reports", counts.reports),
            ("reports_ignored", counts.reports_ignored),
            ("dropped", counts.dropped),
            ("malformed", counts.malformed),
        ] {
            dict.set_item(name, value)?;
        }
        Ok(dict)
    }
}
