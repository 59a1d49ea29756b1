//! Copying chosen rows of a batch into a body of their own.

use crate::wire::msgpack::{Cursor, NIL, Sink, write_array, write_bin_head, write_map, write_str, write_uint};
use crate::wire::{Cells, Lists, Pack, Places, ScannedBatch, WireError};

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
            let mut out = Pack::default();
            write_column(batch, batch.cells().get(column).unwrap_or(&Cells::Absent), &[small], &mut out);
            Ok(out.into_vec())
        }
        _ => Err(WireError::Row { row, rows: batch.rows() }),
    }
}

/// The batch with some of its rows, all of which it has.
pub(super) fn gather(batch: &ScannedBatch, rows: &[u32]) -> Vec<u8> {
    let mut out = Pack::with_room(share(batch, rows.len()));
    gather_to(batch, rows, &mut out);
    out.into_vec()
}

/// About as many bytes as a body with so many rows of the batch has.
pub(super) fn share(batch: &ScannedBatch, rows: usize) -> usize {
    let share = batch.body().len() * rows / batch.rows().max(1);
    share + share / 4 + 64 + 3 * batch.cells().len()
}

/// As [`gather`].
pub(super) fn gather_to(batch: &ScannedBatch, rows: &[u32], out: &mut Pack) {
    write_head(out, batch.tag(), batch.cells().len());
    // Most columns of most batches are absent.
    let mut absent = 0;
    for cells in batch.cells() {
        if matches!(cells, Cells::Absent) {
            absent += 1;
        } else {
            out.fill(NIL, std::mem::take(&mut absent));
            write_column(batch, cells, rows, out);
        }
    }
    out.fill(NIL, absent);
}

/// Start of a body: array and tag.
pub(crate) fn write_head(out: &mut impl Sink, tag: &str, columns: usize) {
    write_array(out, columns + 1);
    write_str(out, tag.as_bytes());
}

/// One column of the given rows, all of which the batch has.
pub(crate) fn write_column(batch: &ScannedBatch, cells: &Cells, rows: &[u32], out: &mut Pack) {
    match cells {
        Cells::Absent => out.push(NIL),
        Cells::Shared(range) => out.append(&batch.body()[range.clone()]),
        Cells::List(list) => write_list(batch, *list, rows, out),
        Cells::Dict(lists) => {
            write_map(out, lists.len());
            for (key, list) in lists {
                out.append(&batch.body()[key.clone()]);
                write_list(batch, *list, rows, out);
            }
        }
        Cells::Stacked(tensor) => {
            write_map(out, 3);
            write_str(out, b"dtype");
            out.append(&batch.body()[tensor.dtype.clone()]);
            write_str(out, b"shape");
            write_array(out, tensor.shape.len() + 1);
            write_uint(out, rows.len() as u64);
            tensor.shape.iter().for_each(|n| write_uint(out, *n));
            write_str(out, b"data");
            write_bin_head(out, tensor.stride * rows.len());
            out.copy_rows(&batch.body()[tensor.data..], tensor.stride, rows);
        }
    }
}

/// The elements that the list has of these rows: a short list stays short.
fn write_list(batch: &ScannedBatch, list: Lists, rows: &[u32], out: &mut Pack) {
    if list.len < batch.rows() {
        return write_short_list(batch, list, rows, out);
    }
    write_array(out, rows.len());
    match list.places {
        Places::Even { start, size } => out.copy_rows(&batch.body()[start..], size, rows),
        Places::Same { start } => out.fill(batch.body()[start], rows.len()),
        Places::Mixed { .. } => out.copy_ranges(batch.body(), batch.ranges(list), rows),
    }
}

/// Rows that the list lacks are left out at the end and nil before that.
fn write_short_list(batch: &ScannedBatch, list: Lists, rows: &[u32], out: &mut Pack) {
    let has = |row: &u32| (*row as usize) < list.len;
    let kept = rows.iter().rposition(has).map_or(0, |last| last + 1);
    write_array(out, kept);
    for row in &rows[..kept] {
        if has(row) {
            out.append(&batch.body()[batch.range(list, *row as usize)]);
        } else {
            out.push(NIL);
        }
    }
}

/// A text item's content.
pub(super) fn text(item: &[u8]) -> Option<&str> {
    std::str::from_utf8(Cursor::new(item).str().ok()?).ok()
}
