//! Which data-parallel rank takes a request.

use parking_lot::Mutex;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use servekit_core::dispatch::{self, DpBudget, LoadBalanceMethod as Method, Prompt};
use servekit_core::router::frames;

use crate::errors::{Error, SettingError};
use crate::report::RankReport;

/// How a rank is chosen among the active ones.
#[pyclass(frozen, eq, hash, from_py_object, module = "servekit._core", rename_all = "SCREAMING_SNAKE_CASE")]
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum LoadBalanceMethod {
    Auto,
    RoundRobin,
    FollowBootstrapRoom,
    TotalRequests,
    TotalTokens,
    CacheAware,
}

impl From<LoadBalanceMethod> for Method {
    fn from(method: LoadBalanceMethod) -> Self {
        match method {
            LoadBalanceMethod::Auto => Self::Auto,
            LoadBalanceMethod::RoundRobin => Self::RoundRobin,
            LoadBalanceMethod::FollowBootstrapRoom => Self::FollowBootstrapRoom,
            LoadBalanceMethod::TotalRequests => Self::TotalRequests,
            LoadBalanceMethod::TotalTokens => Self::TotalTokens,
            LoadBalanceMethod::CacheAware => Self::CacheAware,
        }
    }
}

impl From<Method> for LoadBalanceMethod {
    fn from(method: Method) -> Self {
        match method {
            Method::Auto => Self::Auto,
            Method::RoundRobin => Self::RoundRobin,
            Method::FollowBootstrapRoom => Self::FollowBootstrapRoom,
            Method::TotalRequests => Self::TotalRequests,
            Method::TotalTokens => Self::TotalTokens,
            Method::CacheAware => Self::CacheAware,
        }
    }
}

#[pymethods]
impl LoadBalanceMethod {
    /// The method of that name on the command line.
    #[staticmethod]
    fn from_name(name: &str) -> PyResult<Self> {
        Ok(name.parse::<Method>().map_err(Error::from)?.into())
    }

    /// Its name on the command line.
    #[getter]
    fn name(&self) -> &'static str {
        Method::from(*self).name()
    }
}

/// The load of each rank: what it last reported, plus what was dispatched and not yet seen by it.
#[pyclass(frozen, module = "servekit._core")]
pub(crate) struct DPBudget(Mutex<DpBudget>);

#[pymethods]
impl DPBudget {
    #[new]
    fn new(dp_size: usize) -> PyResult<Self> {
        if !(1..=4096).contains(&dp_size) {
            return Err(SettingError::new_err(format!("dp_size is {dp_size}, must be 1 to 4096")));
        }
        Ok(Self(Mutex::new(DpBudget::new(dp_size))))
    }

    /// Choose a rank for a request of `tokens` prompt tokens and book it there: rank and number of the dispatch.
    #[pyo3(signature = (method, tokens, room=None, prefixes=None))]
    fn dispatch(
        &self,
        method: &Bound<'_, LoadBalanceMethod>,
        tokens: u64,
        room: Option<u64>,
        prefixes: Option<&[u8]>,
    ) -> PyResult<(usize, u64)> {
        let method = Method::from(*method.get());
        let prefixes = frames::prefix_hashes(prefixes.unwrap_or_default()).map_err(Error::from)?;
        let prompt = Prompt { tokens, room, prefixes: &prefixes };
        let dispatched = self.0.lock().dispatch(method, prompt).map_err(Error::from)?;
        Ok((dispatched.rank, dispatched.dispatch))
    }

    /// Book a request at a rank that somebody named, as if it had been chosen: number of the dispatch.
    #[pyo3(signature = (rank, tokens, prefixes=None))]
    fn credit(&self, rank: i64, tokens: u64, prefixes: Option<&[u8]>) -> PyResult<u64> {
        let prefixes = frames::prefix_hashes(prefixes.unwrap_or_default()).map_err(Error::from)?;
        let prompt = Prompt { tokens, room: None, prefixes: &prefixes };
        Ok(self.0.lock().credit(rank, prompt).map_err(Error::from)?.dispatch)
    }

    /// Take a rank's report; False if it is older than one that is known, or speaks of dispatches that never were.
    fn update(&self, report: &Bound<'_, RankReport>) -> bool {
        let report = report.get();
        self.0.lock().update(report.rank, report.report())
    }

    /// Take back a dispatch that no report will show; False if one has.
    fn release(&self, rank: usize, dispatch: u64) -> bool {
        self.0.lock().release(rank, dispatch)
    }

    /// Forget all that a rank was charged with, and what it had cached.
    fn reset(&self, rank: usize) {
        self.0.lock().reset(rank);
    }

    /// Forget what every rank had cached.
    fn forget_prefixes(&self) {
        self.0.lock().forget_prefixes();
    }

    /// Let a rank take requests, or not.
    fn set_active(&self, rank: usize, active: bool) {
        self.0.lock().set_active(rank, active);
    }

    /// Whether each rank takes requests.
    #[getter]
    fn active(&self) -> Vec<bool> {
        self.0.lock().ranks().iter().map(|rank| rank.active()).collect()
    }

    /// Requests of each rank.
    #[getter]
    fn total_requests(&self) -> Vec<u64> {
        self.0.lock().ranks().iter().map(|rank| rank.requests()).collect()
    }

    /// Tokens of each rank.
    #[getter]
    fn total_tokens(&self) -> Vec<u64> {
        self.0.lock().ranks().iter().map(|rank| rank.tokens()).collect()
    }
}

/// Names of a prompt's prefixes of whole 64-token chunks, for the PREFIX_HASHES extension and `DPBudget.dispatch`.
#[pyfunction]
#[pyo3(signature = (input_ids, salt=None))]
pub(crate) fn prefix_hashes<'py>(
    py: Python<'py>,
    input_ids: &[u8],
    salt: Option<&[u8]>,
) -> PyResult<Bound<'py, PyBytes>> {
    if !input_ids.len().is_multiple_of(size_of::<u32>()) {
        return Err(SettingError::new_err(format!("{} bytes are no list of u32", input_ids.len())));
    }
    let hashes = dispatch::prefix_hashes(input_ids, salt.unwrap_or_default());
    let bytes: Vec<u8> = hashes.into_iter().flat_map(u64::to_le_bytes).collect();
    Ok(PyBytes::new(py, &bytes))
}
