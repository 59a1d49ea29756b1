//! Splitting and merging batches.

use std::sync::Arc;

use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::PyBytes;
use servekit_core::split;
use servekit_core::wire::{ScannedBatch, batch_kind};

use crate::errors::Error;

/// Scan a body without copying it: the batch holds on to the Python object.
pub(crate) fn scan(frame: PyBackedBytes) -> Result<ScannedBatch, Error> {
    Ok(ScannedBatch::parse(batch_kind(&frame)?, Arc::new(frame))?)
}

/// Split a batch by the workers that its request ids lead back to.
///
/// Bodies are copied out under the GIL; scanning and splitting run without it.
#[pyfunction]
pub(crate) fn split_batch(frame: Bound<'_, PyBytes>) -> PyResult<Vec<(u16, u16, Bound<'_, PyBytes>)>> {
    let py = frame.py();
    let backed = PyBackedBytes::from(frame.clone());
    let (rows, parts) = py.detach(|| scan(backed).map(|batch| (batch.rows(), split::split_by_worker(&batch))))?;
    Ok(parts
        .into_iter()
        .map(|part| {
            let whole = part.rows as usize == rows;
            let body = if whole { frame.clone() } else { PyBytes::new(py, (*part.body).as_ref()) };
            (part.route.worker, part.route.epoch, body)
        })
        .collect())
}

/// Split a batch by the names in its column `http_worker_ipcs`.
#[pyfunction]
pub(crate) fn split_batch_by_name(py: Python<'_>, frame: PyBackedBytes) -> PyResult<Vec<(String, Bound<'_, PyBytes>)>> {
    let parts = py.detach(|| scan(frame).and_then(|batch| Ok(split::split_by_name(&batch)?)))?;
    Ok(parts.into_iter().map(|(name, body)| (name, PyBytes::new(py, &body))).collect())
}

/// The batch of one row.
#[pyfunction]
pub(crate) fn handle_output_by_index(
    py: Python<'_>,
    frame: PyBackedBytes,
    index: usize,
) -> PyResult<Bound<'_, PyBytes>> {
    let row = py.detach(|| scan(frame).and_then(|batch| Ok(split::handle_output_by_index(&batch, index)?)))?;
    Ok(PyBytes::new(py, &row))
}

/// One column of one row, as msgpack of a column of its own.
#[pyfunction]
pub(crate) fn extract_field_by_index<'py>(
    py: Python<'py>,
    frame: PyBackedBytes,
    field: &str,
    index: usize,
) -> PyResult<Bound<'py, PyBytes>> {
    let field = py.detach(|| scan(frame).and_then(|batch| Ok(split::extract_field_by_index(&batch, field, index)?)))?;
    Ok(PyBytes::new(py, &field))
}

/// Merge batches of one kind; `positions[p][i]` is the place of row i of part p.
#[pyfunction]
pub(crate) fn merge_batches(
    py: Python<'_>,
    frames: Vec<PyBackedBytes>,
    positions: Vec<Vec<u32>>,
) -> PyResult<Bound<'_, PyBytes>> {
    let merged = py.detach(|| {
        let parts = frames.into_iter().map(scan).collect::<Result<Vec<_>, _>>()?;
        Ok::<_, Error>(split::merge(&parts, &positions)?)
    })?;
    Ok(PyBytes::new(py, &merged))
}
