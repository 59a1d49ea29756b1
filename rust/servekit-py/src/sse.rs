//! Event streams of an HTTP worker.

use parking_lot::Mutex;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::{PyBytes, PyList};
use servekit_core::sse;
use servekit_core::state_page::monotonic_ns;

use crate::errors::Error;
use crate::split::scan;

/// What `render` returns: sinks with their events, the batch of the rows that are left, and what was metered.
type Rendered<'py> = (Bound<'py, PyList>, Option<Bound<'py, PyBytes>>, Metered);
/// Rank, -1 if none is told, new tokens, and gaps.
type Metered = (i64, u64, Vec<(f64, u64)>);

/// Streams whose events differ in their text alone.
#[pyclass(frozen, module = "servekit._core")]
pub(crate) struct TextStreams {
    streams: Mutex<sse::TextStreams<Py<PyAny>>>,
}

#[pymethods]
impl TextStreams {
    #[new]
    fn new() -> Self {
        Self { streams: Mutex::default() }
    }

    /// Begin to render the rows of a request.
    fn open(&self, rid: u64, before: &[u8], after: &[u8], chunked: bool, sink: Py<PyAny>, tokens: u64) {
        self.streams.lock().open(rid, sse::Template::new(before, after, chunked), sink, tokens, monotonic_ns());
    }

    /// Leave a request's rows alone again; tokens that its rows reported last.
    fn close(&self, rid: u64) -> Option<u64> {
        self.streams.lock().close(rid)
    }

    /// Tokens that a request's rows reported last.
    fn tokens(&self, rid: u64) -> Option<u64> {
        self.streams.lock().tokens(rid)
    }

    /// Make events of a batch. The GIL is kept: what takes time is to make Python's objects.
    fn render<'py>(&self, py: Python<'py>, body: PyBackedBytes) -> PyResult<Rendered<'py>> {
        let batch = scan(body)?;
        let mut written = Vec::with_capacity(batch.rows());
        let (left, tally) = self
            .streams
            .lock()
            .render(&batch, monotonic_ns(), |sink, event| written.push((sink.clone_ref(py), PyBytes::new(py, event))))
            .map_err(Error::from)?;
        let gaps = tally.gaps.into_iter().map(|(gap, streams)| (gap as f64 / 1e9, streams)).collect();
        let rank = tally.rank.and_then(|rank| i64::try_from(rank).ok()).unwrap_or(-1);
        let left = left.map(|left| PyBytes::new(py, &left));
        Ok((PyList::new(py, written)?, left, (rank, tally.generated, gaps)))
    }

    fn __len__(&self) -> usize {
        self.streams.lock().live()
    }
}

/// The text as it stands between the quotes of a JSON string.
#[pyfunction]
pub(crate) fn escape_json<'py>(py: Python<'py>, text: &str) -> Bound<'py, PyBytes> {
    let mut out = Vec::with_capacity(text.len() + 16);
    sse::escape_json(text, &mut out);
    PyBytes::new(py, &out)
}
