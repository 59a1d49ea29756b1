//! Ids and further columns of a request's tokens, kept until the text of these tokens is sent.

use std::collections::VecDeque;

use crate::wire::columns::{batch_str, batch_token_id};
use crate::wire::msgpack::{Cursor, write_array, write_bin, write_bin_head, write_nil};
use crate::wire::{Carry, Cells, ColumnKind, ScannedBatch};

/// A column that rows of text get from the steps they stand for.
pub(super) struct CarriedColumn {
    /// Place in `BatchStrOutput`.
    pub(super) to: usize,
    from: usize,
    kind: ColumnKind,
    carry: Carry,
}

/// Which columns are carried how, from the generated tables.
pub(super) struct Layout {
    pub(super) carried: Vec<CarriedColumn>,
    /// Columns copied from the newest step: place in `BatchStrOutput` and in `BatchTokenIDOutput`.
    pub(super) newest: Vec<(usize, usize)>,
}

impl Layout {
    pub(super) fn new() -> Self {
        let (mut carried, mut newest) = (Vec::new(), Vec::new());
        for (to, column) in batch_str::COLUMNS.iter().enumerate() {
            let Some(from) = batch_token_id::COLUMNS.iter().position(|known| known.name == column.name) else {
                continue;
            };
            match column.carry {
                Carry::Own => {}
                Carry::Newest => newest.push((to, from)),
                carry => carried.push(CarriedColumn { to, from, kind: column.kind, carry }),
            }
        }
        Self { carried, newest }
    }

    /// Whether a batch has any carried column at all.
    pub(super) fn in_batch(&self, batch: &ScannedBatch) -> bool {
        let there = |column: &CarriedColumn| !matches!(batch.cells().get(column.from), None | Some(Cells::Absent));
        self.carried.iter().any(there)
    }
}

/// Items of a carried column that are not sent yet.
#[derive(Default)]
struct Items {
    bytes: Vec<u8>,
    sizes: VecDeque<u32>,
    /// Of a column that is sent once: it was seen.
    seen: bool,
}

impl Items {
    fn push(&mut self, item: &[u8]) {
        self.bytes.extend_from_slice(item);
        self.sizes.push_back(item.len() as u32);
    }

    /// Drop items at the end, so that at most `len` are left.
    fn truncate(&mut self, len: usize) {
        while self.sizes.len() > len {
            let size = self.sizes.pop_back().unwrap_or(0) as usize;
            self.bytes.truncate(self.bytes.len() - size);
        }
    }

    /// Bytes of the first `n` items.
    fn take(&mut self, n: usize) -> std::vec::Drain<'_, u8> {
        let size: usize = self.sizes.drain(..n).map(|size| size as usize).sum();
        self.bytes.drain(..size)
    }
}

/// What waits for its text. A token's id and logprobs go out with the end of its text, never before.
#[derive(Default)]
pub(super) struct Carried {
    /// For each waiting token, how long the whole text is when the token's own is in it.
    ends: VecDeque<u64>,
    ids: Vec<u8>,
    columns: Vec<Items>,
}

impl Carried {
    /// A token was decoded, after which the text that came in is `end` bytes long.
    pub(super) fn push(&mut self, id: u32, end: u64) {
        let end = self.ends.back().map_or(end, |last| end.max(*last));
        self.ends.push_back(end);
        self.ids.extend_from_slice(&id.to_le_bytes());
    }

    /// Forget tokens at the end, once those and the columns of their row are in.
    pub(super) fn drop_last(&mut self, n: usize) {
        let left = self.ends.len().saturating_sub(n);
        self.ends.truncate(left);
        self.ids.truncate(4 * left);
    }

    /// Take a row's columns; its tokens are pushed already.
    ///
    /// # Errors
    /// A column has not one item for each of the row's `k` ids.
    pub(super) fn push_columns(
        &mut self,
        layout: &Layout,
        batch: &ScannedBatch,
        row: usize,
        k: usize,
    ) -> Result<(), String> {
        self.columns.resize_with(layout.carried.len(), Items::default);
        for (column, items) in layout.carried.iter().zip(&mut self.columns) {
            let name = || batch_str::COLUMNS[column.to].name;
            if let Some(item) = batch.element(column.from, row).filter(|item| *item != [0xc0]) {
                push_item(column, items, item).map_err(|what| format!("{} is malformed: {what}", name()))?;
            }
            let aligned = items.sizes.is_empty() || items.sizes.len() == self.ends.len();
            if column.carry == Carry::PerToken && !aligned {
                return Err(format!("{} has not one item for each of {k} ids", name()));
            }
        }
        Ok(())
    }

    /// Cut columns to the tokens that are left.
    pub(super) fn cut_columns(&mut self, layout: &Layout) {
        for (column, items) in layout.carried.iter().zip(&mut self.columns) {
            if column.carry == Carry::PerToken {
                items.truncate(self.ends.len());
            }
        }
    }

    /// Tokens whose text ends within the first `sent` bytes.
    pub(super) fn released(&self, sent: u64) -> usize {
        self.ends.partition_point(|end| *end <= sent)
    }

    /// Tokens that wait.
    pub(super) fn waiting(&self) -> usize {
        self.ends.len()
    }

    /// Write the ids of the first `n` tokens.
    pub(super) fn write_ids(&self, n: usize, out: &mut Vec<u8>) {
        write_bin(out, &self.ids[..4 * n]);
    }

    /// Write column `i` of the layout for the first `n` tokens; false, and nothing written, if there is nothing.
    pub(super) fn write_column(&mut self, layout: &Layout, i: usize, n: usize, out: &mut Vec<u8>) -> bool {
        let column = &layout.carried[i];
        let Some(items) = self.columns.get_mut(i).filter(|items| !items.sizes.is_empty()) else { return false };
        let n = if column.carry == Carry::PerToken { n.min(items.sizes.len()) } else { items.sizes.len() };
        if n == 0 {
            return false;
        }
        match (column.carry, column.kind) {
            (Carry::Once, _) => {}
            (_, ColumnKind::Ragged | ColumnKind::RaggedShort) => write_bin_head(out, 4 * n),
            _ => write_array(out, n),
        }
        out.extend(items.take(n));
        true
    }

    /// The first `n` tokens are sent.
    pub(super) fn release(&mut self, n: usize) {
        self.ends.drain(..n);
        self.ids.drain(..4 * n);
    }
}

fn push_item(column: &CarriedColumn, items: &mut Items, item: &[u8]) -> Result<(), &'static str> {
    let mut cursor = Cursor::new(item);
    match (column.carry, column.kind) {
        (Carry::Once, _) => {
            if !items.seen {
                items.push(item);
            }
        }
        (_, ColumnKind::Ragged | ColumnKind::RaggedShort) => {
            let (numbers, rest) = cursor.bin().map_err(|(_, what)| what)?.as_chunks::<4>();
            if !rest.is_empty() {
                return Err("bytes are no 4-byte numbers");
            }
            numbers.iter().for_each(|number| items.push(number));
        }
        _ => {
            for _ in 0..cursor.array().map_err(|(_, what)| what)? {
                let start = cursor.at;
                cursor.skip().map_err(|(_, what)| what)?;
                items.push(&item[start..cursor.at]);
            }
        }
    }
    items.seen = true;
    Ok(())
}

/// What a row without anything in a column gets.
pub(super) fn write_nothing(column: &CarriedColumn, out: &mut Vec<u8>) {
    match column.kind {
        ColumnKind::Nested => write_array(out, 0),
        _ => write_nil(out),
    }
}
