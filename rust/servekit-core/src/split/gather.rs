//! Copying chosen rows of a batch into a body of their own.

use crate::wire::msgpack::{Cursor, write_array, write_bin_head, write_map, write_str, write_uint};
use crate::wire::{Cells, Lists, ScannedBatch, WireError};

/// A batch with the given rows, in the given order.
///
/// # Errors
/// A row is not in the batch.
pub fn take_rows(batch: &ScannedBatch, rows: &[u32]) -> Result<Vec<u8>, WireError> {
    match rows.iter().find(|row| **row as usize >= batch.rows()) {
        Some(row) => Err(WireError::Row { row: *row as usize, rows: batch.rows() }),
        None => Ok(gather(batch, rows)),
    }
}

/// A batch with one row, that of a request.
///
/// # Errors
/// The row is not in the batch.
pub fn handle_output_by_index(batch: &ScannedBatch, row: usize) -> Result<Vec<u8>, WireError> {
    match u32::try_from(row) {
        Ok(small) if row < batch.rows() => Ok(gather(batch, &[small])),
        _ => Err(WireError::Row { row, rows: batch.rows() }),
    }
}

/// One column of one row, as a column of its own.
///
/// # Errors
/// There is no such column or row.
pub fn extract_field_by_index(batch: &ScannedBatch, field: &str, row: usize) -> Result<Vec<u8>, WireError> {
    let column = batch.column(field).ok_or_else(|| WireError::Column(field.to_owned()))?;
    match u32::try_from(row) {
        Ok(small) if row < batch.rows() => {
            let mut out = Vec::new();
            write_column(batch, batch.cells().get(column).unwrap_or(&Cells::Absent), &[small], &mut out);
            Ok(out)
        }
        _ => Err(WireError::Row { row, rows: batch.rows() }),
    }
}

/// The batch with some of its rows, all of which it has.
pub(super) fn gather(batch: &ScannedBatch, rows: &[u32]) -> Vec<u8> {
    let share = batch.body().len() * rows.len() / batch.rows().max(1);
    let mut out = Vec::with_capacity(share + share / 4 + 64 + 6 * batch.cells().len());
    write_head(&mut out, batch.tag(), batch.cells().len());
    for cells in batch.cells() {
        write_column(batch, cells, rows, &mut out);
    }
    out
}

/// Start of a body: array and tag.
pub(crate) fn write_head(out: &mut Vec<u8>, tag: &str, columns: usize) {
    write_array(out, columns + 1);
    write_str(out, tag.as_bytes());
}

/// One column of the given rows, all of which the batch has.
pub(crate) fn write_column(batch: &ScannedBatch, cells: &Cells, rows: &[u32], out: &mut Vec<u8>) {
    match cells {
        Cells::Absent => out.push(0xc0),
        Cells::Shared(range) => out.extend_from_slice(&batch.body()[range.clone()]),
        Cells::List(list) => write_list(batch, *list, rows, out),
        Cells::Dict(lists) => {
            write_map(out, lists.len());
            for (key, list) in lists {
                out.extend_from_slice(&batch.body()[key.clone()]);
                write_list(batch, *list, rows, out);
            }
        }
        Cells::Stacked(tensor) => {
            write_map(out, 3);
            write_str(out, b"dtype");
            out.extend_from_slice(&batch.body()[tensor.dtype.clone()]);
            write_str(out, b"shape");
            write_array(out, tensor.shape.len() + 1);
            write_uint(out, rows.len() as u64);
            tensor.shape.iter().for_each(|n| write_uint(out, *n));
            write_str(out, b"data");
            write_bin_head(out, tensor.stride * rows.len());
            for &row in rows {
                let start = tensor.data + tensor.stride * row as usize;
                out.extend_from_slice(&batch.body()[start..start + tensor.stride]);
            }
        }
    }
}

/// The elements that the list has of these rows: a short list stays short.
fn write_list(batch: &ScannedBatch, list: Lists, rows: &[u32], out: &mut Vec<u8>) {
    let body = batch.body();
    let bounds = batch.bounds(list);
    let (start, end) = (bounds[0] as usize, bounds[list.len] as usize);
    if list.len == batch.rows() {
        write_array(out, rows.len());
        if end - start == list.len {
            // Every element is one byte, as most numbers and nils are.
            let bytes = &body[start..end];
            out.extend(rows.iter().map(|&row| bytes[row as usize]));
        } else {
            for &row in rows {
                let row = row as usize;
                out.extend_from_slice(&body[bounds[row] as usize..bounds[row + 1] as usize]);
            }
        }
    } else {
        write_short_list(body, bounds, rows, out);
    }
}

/// Rows that the list lacks are left out at the end and nil before that.
fn write_short_list(body: &[u8], bounds: &[u32], rows: &[u32], out: &mut Vec<u8>) {
    let has = |row: &u32| (*row as usize) < bounds.len() - 1;
    let kept = rows.iter().rposition(has).map_or(0, |last| last + 1);
    write_array(out, kept);
    for row in &rows[..kept] {
        if has(row) {
            let row = *row as usize;
            out.extend_from_slice(&body[bounds[row] as usize..bounds[row + 1] as usize]);
        } else {
            out.push(0xc0);
        }
    }
}

/// A text item's content.
pub(super) fn text(item: &[u8]) -> Option<&str> {
    std::str::from_utf8(Cursor::new(item).str().ok()?).ok()
}
