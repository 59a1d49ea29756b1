//! Splitting a batch by row: byte ranges are copied, nothing is decoded.

mod gather;
mod merge;

use std::collections::HashMap;
use std::hash::Hash;

use crate::wire::{Rid, Route, ScannedBatch, SharedBytes, WireError};

pub use gather::{extract_field_by_index, handle_output_by_index, take_rows};
pub(crate) use gather::{write_column, write_head};
pub use merge::merge;

/// What one worker gets of a batch.
#[derive(Clone)]
pub struct Part {
    /// Whose it is.
    pub route: Route,
    /// Rows in it, in the order of the batch.
    pub rows: u32,
    /// Body of the same kind. The whole batch's own bytes if all rows are the worker's.
    pub body: SharedBytes,
}

/// Split by the route in each row's request id. Routes come in the order of their first rows.
pub fn split_by_worker(batch: &ScannedBatch) -> Vec<Part> {
    split_rows_by_worker(batch, |_| true)
}

/// As [`split_by_worker`], of the rows whose request id passes the filter.
pub fn split_rows_by_worker(batch: &ScannedBatch, wanted: impl Fn(u64) -> bool) -> Vec<Part> {
    let keys = batch.rids().iter().enumerate().filter(|(_, rid)| wanted(**rid));
    let groups = group(keys.map(|(row, rid)| (Rid(*rid).route(), row as u32)));
    groups
        .into_iter()
        .map(|(route, rows)| {
            let whole = rows.len() == batch.rows();
            let count = rows.len() as u32;
            let body = if whole { batch.shared().clone() } else { std::sync::Arc::new(gather::gather(batch, &rows)) };
            Part { route, rows: count, body }
        })
        .collect()
}

/// Split by the names in the column `http_worker_ipcs`, for callers that route by name.
///
/// # Errors
/// The batch lacks the column, or a name is no UTF-8 text.
pub fn split_by_name(batch: &ScannedBatch) -> Result<Vec<(String, Vec<u8>)>, WireError> {
    const COLUMN: &str = "http_worker_ipcs";
    let column = batch.column(COLUMN).unwrap_or_default();
    let mut names = Vec::with_capacity(batch.rows());
    for row in 0..batch.rows() {
        let item = batch.element(column, row).ok_or_else(|| WireError::Column(COLUMN.to_owned()))?;
        names.push((
            gather::text(item).ok_or(WireError::Body { column: COLUMN, at: 0, what: "not a text" })?,
            row as u32,
        ));
    }
    Ok(group(names).into_iter().map(|(name, rows)| (name.to_owned(), gather::gather(batch, &rows))).collect())
}

/// Rows by key, keys in the order of their first rows. Few keys are searched for in line, many by their hash.
fn group<K: Copy + Eq + Hash>(rows: impl IntoIterator<Item = (K, u32)>) -> Vec<(K, Vec<u32>)> {
    const FEW: usize = 16;
    let mut groups: Vec<(K, Vec<u32>)> = Vec::new();
    let mut places = HashMap::new();
    for (key, row) in rows {
        let place = if groups.len() <= FEW {
            groups.iter().position(|(known, _)| *known == key)
        } else {
            if places.is_empty() {
                places.extend(groups.iter().enumerate().map(|(place, (key, _))| (*key, place)));
            }
            places.get(&key).copied()
        };
        match place {
            Some(place) => groups[place].1.push(row),
            None => {
                if !places.is_empty() {
                    places.insert(key, groups.len());
                }
                groups.push((key, vec![row]));
            }
        }
    }
    groups
}

#[cfg(test)]
mod tests;
