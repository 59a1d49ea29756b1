//! The CPU engine's arithmetic over memory that Python owns.
//!
//! Everything takes addresses, as torch's `data_ptr()` gives them, and can't check them: `servekit.engine.native` does.

#![expect(unsafe_code, reason = "the memory is Python's; each function's stub says what must be there")]

use std::sync::Arc;

use pyo3::prelude::*;
use servekit_kernels::{
    self as kernels, Attention, Format, Layer, Layers, Level, Linear, Matrix, Norm, Pool, Rows, Sequences, Step,
};

use crate::errors::{ResourceError, SettingError};

struct Inner {
    pool: Pool,
    level: Level,
}

/// The threads that share the arithmetic, and the instructions it is done with.
#[pyclass(frozen, module = "servekit._core")]
pub(crate) struct KernelPool(Arc<Inner>);

#[pymethods]
impl KernelPool {
    #[new]
    fn new(threads: usize) -> PyResult<Self> {
        let pool = Pool::new(threads).map_err(|error| ResourceError::new_err(format!("no thread: {error}")))?;
        Ok(Self(Arc::new(Inner { pool, level: Level::detect() })))
    }

    #[classattr]
    fn formats() -> Vec<(&'static str, usize, usize)> {
        Format::ALL.into_iter().map(|f| (f.name(), f.weights(), f.row_bytes(f.weights()))).collect()
    }

    #[getter]
    fn level(&self) -> &'static str {
        self.0.level.name()
    }

    #[getter]
    fn threads(&self) -> usize {
        self.0.pool.threads()
    }

    #[allow(clippy::too_many_arguments, reason = "flat arguments cost Python least")]
    fn rms_norm(&self, py: Python<'_>, x: usize, out: usize, weight: usize, eps: f32, rows: usize, width: usize) {
        py.detach(|| {
            let Inner { pool, level } = &*self.0;
            // SAFETY: the stub's promise.
            unsafe { kernels::rms_norm(pool, *level, (x as _, out as _), weight as _, eps, (rows, width)) };
        });
    }

    #[allow(clippy::too_many_arguments, reason = "flat arguments cost Python least")]
    fn rotate(
        &self,
        py: Python<'_>,
        x: usize,
        stride: usize,
        cos: usize,
        sin: usize,
        tokens: usize,
        heads: usize,
        size: usize,
    ) {
        py.detach(|| {
            let Inner { pool, level } = &*self.0;
            // SAFETY: the stub's promise.
            unsafe { kernels::rotate(pool, *level, (x as _, stride), (cos as _, sin as _), (tokens, heads, size)) };
        });
    }

    fn add(&self, py: Python<'_>, x: usize, y: usize, count: usize) {
        py.detach(|| {
            let Inner { pool, level } = &*self.0;
            // SAFETY: the stub's promise.
            unsafe { kernels::add(pool, *level, x as _, y as _, count) };
        });
    }

    fn silu_mul(&self, py: Python<'_>, x: usize, out: usize, rows: usize, width: usize) {
        py.detach(|| {
            let Inner { pool, level } = &*self.0;
            // SAFETY: the stub's promise.
            unsafe { kernels::silu_mul(pool, *level, x as _, out as _, (rows, width)) };
        });
    }
}

/// A linear layer over weights as their file stores them.
#[pyclass(frozen, module = "servekit._core")]
pub(crate) struct StoredMatrix {
    inner: Arc<Inner>,
    matrix: Matrix,
}

#[pymethods]
impl StoredMatrix {
    #[new]
    fn new(pool: &KernelPool, format: &str, weights: usize, bias: usize, rows: usize, width: usize) -> PyResult<Self> {
        let format = Format::of(format)
            .ok_or_else(|| SettingError::new_err(format!("no kernel for weights stored as {format:?}")))?;
        // SAFETY: the stub's promise.
        let matrix = unsafe { Matrix::new(format, weights as _, bias as _, rows, width) }
            .map_err(|error| SettingError::new_err(error.to_string()))?;
        Ok(Self { inner: Arc::clone(&pool.0), matrix })
    }

    fn apply(&self, py: Python<'_>, x: usize, out: usize, count: usize, stride: usize) {
        py.detach(|| {
            let Inner { pool, level } = &*self.inner;
            // SAFETY: the stub's promise.
            unsafe { self.matrix.apply(pool, *level, x as _, out as _, count, stride) };
        });
    }
}

/// Sequences of a step: arrays of int64 and how many there are.
#[derive(FromPyObject)]
struct SequencesAt {
    count: usize,
    firsts: usize,
    counts: usize,
    lengths: usize,
    tables: usize,
    width: usize,
}

impl SequencesAt {
    fn with(&self, window: usize) -> Sequences {
        let Self { count, width, .. } = *self;
        let (firsts, counts, lengths) = (self.firsts as _, self.counts as _, self.lengths as _);
        Sequences { count, firsts, counts, lengths, tables: self.tables as _, width, window }
    }
}

/// Attention of new tokens over pages.
#[pyclass(frozen, module = "servekit._core")]
pub(crate) struct PagedAttention {
    inner: Arc<Inner>,
    attention: Attention,
}

#[pymethods]
impl PagedAttention {
    #[new]
    fn new(pool: &KernelPool, heads: usize, kv_heads: usize, size: usize, page: usize) -> PyResult<Self> {
        let attention =
            Attention::new(heads, kv_heads, size, page).map_err(|error| SettingError::new_err(error.to_string()))?;
        Ok(Self { inner: Arc::clone(&pool.0), attention })
    }

    fn store(&self, py: Python<'_>, layer: usize, kv: usize, stride: usize, places: usize, count: usize) {
        py.detach(|| {
            // SAFETY: the stub's promise.
            unsafe { self.attention.store(&self.inner.pool, layer as _, (kv as _, stride), places as _, count) };
        });
    }

    #[allow(clippy::too_many_arguments, reason = "flat arguments cost Python least")]
    fn attend(
        &self,
        py: Python<'_>,
        layer: usize,
        q: usize,
        q_stride: usize,
        out: usize,
        out_stride: usize,
        sequences: SequencesAt,
        window: usize,
    ) {
        py.detach(|| {
            let Inner { pool, level } = &*self.inner;
            let rows = Rows { q: q as _, q_stride, out: out as _, out_stride };
            // SAFETY: the stub's promise.
            unsafe { self.attention.attend(pool, *level, layer as _, sequences.with(window), rows) };
        });
    }
}

/// A decoder layer's parts, as `servekit.engine.native_decoder` names them.
#[derive(FromPyObject)]
struct LayerAt<'py> {
    attention_norm: (usize, f32),
    qkv: Vec<PyRef<'py, StoredMatrix>>,
    head_norms: Option<[(usize, f32); 2]>,
    pages: usize,
    window: usize,
    output: Vec<PyRef<'py, StoredMatrix>>,
    ffn_norm: (usize, f32),
    gate_up: Vec<PyRef<'py, StoredMatrix>>,
    down: Vec<PyRef<'py, StoredMatrix>>,
}

impl LayerAt<'_> {
    fn layer(&self) -> PyResult<Layer> {
        let norm = |(weight, eps)| Norm { weight: weight as _, eps };
        let linear = |parts: &[PyRef<'_, StoredMatrix>]| {
            Linear::new(parts.iter().map(|part| part.matrix).collect())
                .map_err(|error| SettingError::new_err(error.to_string()))
        };
        Ok(Layer {
            attention_norm: norm(self.attention_norm),
            qkv: linear(&self.qkv)?,
            head_norms: self.head_norms.map(|two| two.map(norm)),
            pages: self.pages as _,
            window: self.window,
            output: linear(&self.output)?,
            ffn_norm: norm(self.ffn_norm),
            gate_up: linear(&self.gate_up)?,
            down: linear(&self.down)?,
        })
    }
}

/// The layers of a decoder, one after the other in one call.
#[pyclass(frozen, module = "servekit._core")]
pub(crate) struct DecoderLayers {
    inner: Arc<Inner>,
    layers: Layers,
}

#[pymethods]
impl DecoderLayers {
    #[new]
    fn new(attention: &PagedAttention, hidden: usize, layers: Vec<LayerAt<'_>>) -> PyResult<Self> {
        let layers = layers.iter().map(LayerAt::layer).collect::<PyResult<_>>()?;
        // SAFETY: the stub's promise.
        let layers = unsafe { Layers::new(attention.attention, hidden, layers) }
            .map_err(|error| SettingError::new_err(error.to_string()))?;
        Ok(Self { inner: Arc::clone(&attention.inner), layers })
    }

    #[allow(clippy::too_many_arguments, reason = "flat arguments cost Python least")]
    fn run(
        &self,
        py: Python<'_>,
        x: usize,
        count: usize,
        cos: usize,
        sin: usize,
        places: usize,
        sequences: SequencesAt,
    ) {
        py.detach(|| {
            let Inner { pool, level } = &*self.inner;
            let (cos, sin, places) = (cos as _, sin as _, places as _);
            let step = Step { x: x as _, count, cos, sin, places, sequences: sequences.with(0) };
            // SAFETY: the stub's promise.
            unsafe { self.layers.run(pool, *level, step) };
        });
    }
}
