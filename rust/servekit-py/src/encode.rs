//! Text to ids.

use std::path::PathBuf;

use pyo3::prelude::*;
use pyo3::pybacked::PyBackedStr;
use pyo3::types::PyBytes;
use servekit_core::encode;

use crate::errors::{Error, SettingError};

/// Texts of more bytes are encoded without the GIL.
const LONG: usize = 2048;

/// A model's tokenizer for prompts.
#[pyclass(frozen, module = "servekit._core")]
pub(crate) struct Encoder {
    encoder: encode::Encoder,
}

#[pymethods]
impl Encoder {
    #[new]
    fn new(py: Python<'_>, tokenizer_file: PathBuf, remembered: usize) -> PyResult<Self> {
        let encoder = py.detach(|| encode::Encoder::from_file(tokenizer_file, remembered)).map_err(Error::from)?;
        Ok(Self { encoder })
    }

    /// Ids of texts.
    fn encode<'py>(
        &self,
        py: Python<'py>,
        texts: Vec<PyBackedStr>,
        special: bool,
    ) -> PyResult<Vec<Bound<'py, PyBytes>>> {
        let encode = || texts.iter().map(|text| self.encoder.encode(text, special)).collect::<Result<Vec<_>, _>>();
        let long = texts.iter().map(|text| text.len()).sum::<usize>() > LONG;
        let found = if long { py.detach(encode) } else { encode() };
        let found = found.map_err(|error| SettingError::new_err(error.to_string()))?;
        Ok(found.iter().map(|ids| packed(py, ids)).collect())
    }

    /// Lookups, hits, tokens, tokens that were known, bytes.
    #[getter]
    fn counts(&self) -> (u64, u64, u64, u64, u64) {
        let counts = self.encoder.counts();
        (counts.lookups, counts.hits, counts.tokens, counts.hit_tokens, counts.bytes)
    }

    /// Whether texts are cut into words here.
    #[getter]
    fn knows_words(&self) -> bool {
        self.encoder.knows_words()
    }

    /// Characters of the longest token.
    #[getter]
    fn longest_token(&self) -> usize {
        self.encoder.longest_token()
    }
}

/// Little-endian, as ids travel.
fn packed<'py>(py: Python<'py>, ids: &[u32]) -> Bound<'py, PyBytes> {
    let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
    PyBytes::new(py, &bytes)
}
