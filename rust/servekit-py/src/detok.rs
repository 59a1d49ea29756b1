//! The detokenizer.

use std::path::PathBuf;
use std::sync::Arc;

use parking_lot::Mutex;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::PyBytes;
use servekit_core::detok::{Shard, ShardOutput, Vocabulary};
use servekit_core::wire::TextOptions;

use crate::errors::Error;
use crate::split::scan;

type Frames<'py> = Vec<(u16, u16, Bound<'py, PyBytes>)>;

fn frames(py: Python<'_>, output: ShardOutput) -> Frames<'_> {
    let frames = output.frames.into_iter();
    frames.map(|frame| (frame.route.worker, frame.route.epoch, PyBytes::new(py, frame.body.as_ref()))).collect()
}

/// Incremental detokenizer of any number of requests.
#[pyclass(frozen, module = "servekit._core")]
pub(crate) struct Detokenizer {
    shard: Mutex<Shard>,
    is_table: bool,
}

#[pymethods]
impl Detokenizer {
    #[new]
    #[pyo3(signature = (tokenizer_file=None))]
    fn new(py: Python<'_>, tokenizer_file: Option<PathBuf>) -> PyResult<Self> {
        let vocabulary = py.detach(|| tokenizer_file.map(Vocabulary::from_file).transpose()).map_err(Error::from)?;
        let is_table = vocabulary.as_ref().is_some_and(Vocabulary::is_table);
        Ok(Self { shard: Mutex::new(Shard::new(0, 1, vocabulary.map(Arc::new))), is_table })
    }

    /// Begin a request.
    #[pyo3(signature = (rid, *, stops=vec![], include_stop=false, skip_special_tokens=true, text=true, ids=false, no_stop_trim=false, stream=true))]
    #[expect(clippy::too_many_arguments, reason = "keywords in Python")]
    fn open(
        &self,
        py: Python<'_>,
        rid: u64,
        stops: Vec<String>,
        include_stop: bool,
        skip_special_tokens: bool,
        text: bool,
        ids: bool,
        no_stop_trim: bool,
        stream: bool,
    ) {
        let options = TextOptions { stops, include_stop, skip_special_tokens, text, ids, no_stop_trim };
        py.detach(|| self.shard.lock().open(rid, options, stream));
    }

    /// Take a batch; frames for workers, and requests that ended here by a stop string. Frames are `BatchStrOutput`;
    /// rows of requests without text, and of all without a tokenizer, are a `BatchTokenIDOutput` as it came.
    fn step<'py>(&self, py: Python<'py>, frame: PyBackedBytes) -> PyResult<(Frames<'py>, Vec<u64>)> {
        let mut output = py.detach(|| {
            let batch = scan(frame)?;
            let mut output = ShardOutput::default();
            self.shard.lock().batch(&batch, &mut output);
            Ok::<_, Error>(output)
        })?;
        let aborts = std::mem::take(&mut output.aborts);
        Ok((frames(py, output), aborts))
    }

    /// End a request without its rank's word.
    fn fail<'py>(&self, py: Python<'py>, rid: u64, status: u16, kind: &str, message: &str) -> Frames<'py> {
        let output = py.detach(|| {
            let mut output = ShardOutput::default();
            self.shard.lock().fail(rid, status, kind, message, &mut output);
            output
        });
        frames(py, output)
    }

    /// Requests that it knows.
    #[getter]
    fn live(&self) -> usize {
        self.shard.lock().live()
    }

    /// Rows of unknown requests, requests that failed here, requests opened twice.
    #[getter]
    fn counts(&self) -> (u64, u64, u64) {
        let counts = self.shard.lock().counts();
        (counts.dropped, counts.failed, counts.duplicates)
    }

    /// Whether text comes from a table of byte strings rather than from the tokenizer's own decoder.
    #[getter]
    fn is_table(&self) -> bool {
        self.is_table
    }
}
