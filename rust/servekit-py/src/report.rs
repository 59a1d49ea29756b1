//! A rank's report on its load.

use pyo3::prelude::*;
use servekit_core::dispatch::Report;
use servekit_core::wire::{Envelope, Load, Section};

use crate::errors::{Error, MalformedError};

/// A rank's own word on its load.
#[pyclass(frozen, eq, get_all, module = "servekit._core")]
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct RankReport {
    /// Number of the rank.
    pub(crate) rank: usize,
    /// Highest dispatch number that it has seen.
    pub(crate) last_dispatch: u64,
    /// Requests that it has not released, running or waiting.
    pub(crate) requests: u64,
    /// Tokens: held by running requests or still to compute.
    pub(crate) tokens: u64,
    /// Those still to compute.
    pub(crate) pending: u64,
}

impl RankReport {
    /// What a batch's section says.
    fn of(rank: usize, last_dispatch: u64, load: Load) -> Self {
        let Report { last_dispatch, requests, tokens, pending } = Report::of(last_dispatch, load);
        Self { rank, last_dispatch, requests, tokens, pending }
    }

    /// As the budget takes it.
    pub(crate) fn report(&self) -> Report {
        let Self { last_dispatch, requests, tokens, pending, .. } = *self;
        Report { last_dispatch, requests, tokens, pending }
    }
}

#[pymethods]
impl RankReport {
    #[new]
    #[pyo3(signature = (rank, last_dispatch, requests, tokens, pending=None))]
    fn new(rank: usize, last_dispatch: u64, requests: u64, tokens: u64, pending: Option<u64>) -> Self {
        Self { rank, last_dispatch, requests, tokens, pending: pending.unwrap_or(tokens) }
    }

    /// The report in the envelope of a rank's batch; None if it has none.
    #[staticmethod]
    fn from_envelope(frame: &[u8]) -> PyResult<Option<Self>> {
        let envelope = Envelope::parse(frame).map_err(Error::from)?;
        let Section::Batch { rank, last_dispatch, load, .. } = envelope.section else {
            return Err(MalformedError::new_err("no envelope of a batch"));
        };
        let Some(load) = load else { return Ok(None) };
        let rank = usize::try_from(rank).map_err(|_| MalformedError::new_err("a report of no rank"))?;
        Ok(Some(Self::of(rank, last_dispatch, load)))
    }

    fn __repr__(&self) -> String {
        let Self { rank, last_dispatch, requests, tokens, pending } = self;
        format!(
            "RankReport(rank={rank}, last_dispatch={last_dispatch}, requests={requests}, tokens={tokens}, \
             pending={pending})"
        )
    }
}
