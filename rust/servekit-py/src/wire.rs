//! Envelopes and their parts, as plain values.

use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};
use servekit_core::wire::{Envelope, Group, SCHEMA, Section, TextOptions};

use crate::errors::Error;

/// Hash of all message definitions, as HELLO carries it.
#[pyfunction]
pub(crate) fn schema_hash() -> u64 {
    SCHEMA
}

/// Parse an envelope.
#[pyfunction]
pub(crate) fn parse_envelope<'py>(py: Python<'py>, frame: &[u8]) -> PyResult<Bound<'py, PyDict>> {
    let envelope = Envelope::parse(frame).map_err(Error::from)?;
    let dict = PyDict::new(py);
    dict.set_item("kind", envelope.kind as u16)?;
    dict.set_item("id", envelope.id)?;
    dict.set_item("flags", envelope.flags)?;
    dict.set_item("sender", envelope.sender)?;
    dict.set_item("sender_epoch", envelope.sender_epoch)?;
    dict.set_item("receiver_epoch", envelope.receiver_epoch)?;
    dict.set_item("seq", envelope.seq)?;
    match envelope.section {
        Section::Request { rank, tokens, attempt, dispatch } => {
            dict.set_item("rank", rank)?;
            dict.set_item("tokens", tokens)?;
            dict.set_item("attempt", attempt)?;
            dict.set_item("dispatch", dispatch)?;
        }
        Section::Batch { rows, rank, last_dispatch, load } => {
            dict.set_item("rows", rows)?;
            dict.set_item("rank", rank)?;
            dict.set_item("last_dispatch", last_dispatch)?;
            let load =
                load.map(|load| (load.running, load.waiting, load.held_tokens, load.pending_tokens, load.pool_tokens));
            dict.set_item("load", load)?;
        }
        Section::Control { rank } => dict.set_item("rank", rank)?,
        Section::Hello { schema } => dict.set_item("schema", schema)?,
        Section::Empty => {}
    }
    let exts: Vec<_> = envelope.exts().map(|(kind, data)| (kind, PyBytes::new(py, data))).collect();
    dict.set_item("exts", exts)?;
    Ok(dict)
}

/// Parse a TEXT extension.
#[pyfunction]
pub(crate) fn parse_text_options<'py>(py: Python<'py>, data: &[u8]) -> PyResult<Bound<'py, PyDict>> {
    let options = TextOptions::parse(data).map_err(Error::from)?;
    let dict = PyDict::new(py);
    dict.set_item("stops", options.stops)?;
    dict.set_item("include_stop", options.include_stop)?;
    dict.set_item("skip_special_tokens", options.skip_special_tokens)?;
    dict.set_item("text", options.text)?;
    dict.set_item("ids", options.ids)?;
    dict.set_item("no_stop_trim", options.no_stop_trim)?;
    Ok(dict)
}

/// Parse a GROUP extension: id, index, size, prompt.
#[pyfunction]
pub(crate) fn parse_group(data: &[u8]) -> Result<(u64, u32, u32, u64), Error> {
    let group = Group::parse(data)?;
    Ok((group.id, group.index, group.size, group.prompt))
}
