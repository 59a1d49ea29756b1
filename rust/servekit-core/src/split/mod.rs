//! Splitting a batch by row: byte ranges are copied, nothing is decoded.

mod gather;
mod group;
mod merge;

use std::collections::HashMap;
use std::sync::Arc;

use crate::wire::{Pack, Rid, Route, ScannedBatch, SharedBytes, WireError};

use group::Groups;

pub use gather::{extract_field_by_index, handle_output_by_index, take_rows};
pub(crate) use gather::{write_column, write_head};
pub(crate) use group::Places;
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
    let rids = batch.rids();
    if let Some(route) = common_route(rids)
        && rids.iter().all(|rid| wanted(*rid))
    {
        return vec![Part { route, rows: rids.len() as u32, body: batch.shared().clone() }];
    }
    let keyed = (0..).zip(rids).filter(|(_, rid)| wanted(**rid)).map(|(row, rid)| (Rid(*rid).route().into(), row));
    let groups = Groups::of(keyed, rids.len());
    // All bodies are put together at the same place and then copied to vectors that just hold them.
    let most = groups.iter().map(|(_, rows)| rows.len()).max().unwrap_or(0);
    let mut body = Pack::with_room(gather::share(batch, most));
    let part = |(key, rows): (u32, &[u32])| {
        body.clear();
        gather::gather_to(batch, rows, &mut body);
        Part { route: Route::from(key), rows: rows.len() as u32, body: Arc::new(body.as_slice().to_vec()) }
    };
    groups.iter().map(part).collect()
}

/// The route that all ids have; none if there are several or no ids.
fn common_route(rids: &[u64]) -> Option<Route> {
    let route = Rid(*rids.first()?).route();
    rids.iter().all(|rid| Rid(*rid).route() == route).then_some(route)
}

/// Split by the names in the column `http_worker_ipcs`, for callers that route by name.
///
/// # Errors
/// The batch lacks the column, or a name is no UTF-8 text.
pub fn split_by_name(batch: &ScannedBatch) -> Result<Vec<(String, Vec<u8>)>, WireError> {
    const COLUMN: &str = "http_worker_ipcs";
    let column = batch.column(COLUMN).unwrap_or_default();
    let mut names: Vec<&str> = Vec::new();
    let mut keys = HashMap::new();
    let mut keyed = Vec::with_capacity(batch.rows());
    for row in 0..batch.rows() {
        let item = batch.element(column, row).ok_or_else(|| WireError::Column(COLUMN.to_owned()))?;
        let name = gather::text(item).ok_or(WireError::Body { column: COLUMN, at: 0, what: "not a text" })?;
        let key = *keys.entry(name).or_insert_with(|| {
            names.push(name);
            names.len() as u32 - 1
        });
        keyed.push((key, row as u32));
    }
    let groups = Groups::of(keyed.into_iter(), batch.rows());
    Ok(names
        .into_iter()
        .zip(groups.iter())
        .map(|(name, (_, rows))| (name.to_owned(), gather::gather(batch, rows)))
        .collect())
}

#[cfg(test)]
mod tests;
