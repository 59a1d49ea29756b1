//! The CPU engine's arithmetic over memory that Python owns.
//!
//! Everything takes addresses, as torch's `data_ptr()` gives them, and can't check them: `servekit.engine.native` does.

#![expect(unsafe_code, reason = "the memory is Python's; each function's stub says what must be there")]

use std::sync::Arc;

use pyo3::prelude::*;
use servekit_kernels::{self as kernels, Attention, Format, Level, Matrix, Pool, Rows, Sequences};

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

/// Attention of one new token a sequence over pages.
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
            unsafe { self.attention.store(layer as _, kv as _, stride, places as _, count) };
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
        tokens: usize,
        lengths: usize,
        tables: usize,
        width: usize,
        count: usize,
        window: usize,
    ) {
        py.detach(|| {
            let Inner { pool, level } = &*self.inner;
            let sequences =
                Sequences { count, tokens: tokens as _, lengths: lengths as _, tables: tables as _, width, window };
            let rows = Rows { q: q as _, q_stride, out: out as _, out_stride };
            // SAFETY: the stub's promise.
            unsafe { self.attention.attend(pool, *level, layer as _, sequences, rows) };
        });
    }
}
