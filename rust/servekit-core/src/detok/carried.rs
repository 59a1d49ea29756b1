//! Ids and further columns of a request's tokens, kept until the text of these tokens is sent.

use std::collections::VecDeque;

use crate::wire::columns::{batch_str, batch_token_id};
use crate::wire::msgpack::{Cursor, NIL, Sink, write_array, write_bin, write_bin_head};
use crate::wire::{Carry, Cells, Column, ColumnKind, Pack, ScannedBatch};

/// A column that rows of text get from the steps they stand for.
pub(super) struct CarriedColumn {
    name: &'static str,
    from: usize,
    kind: ColumnKind,
    carry: Carry,
}

/// What stands in a column of `BatchStrOutput`.
pub(super) enum Slot {
    /// What the detokenizer makes, or nothing: the column's place says which.
    Own,
    /// The newest step's items, from this column of `BatchTokenIDOutput`.
    Newest(usize),
    /// Column of [`Layout::carried`].
    Carried(usize),
}

/// Which columns are carried how, from the generated tables.
pub(super) struct Layout {
    pub(super) carried: Vec<CarriedColumn>,
    /// One for each column of `BatchStrOutput`.
    pub(super) slots: Vec<Slot>,
}

impl Layout {
    pub(super) fn new() -> Self {
        let mut carried = Vec::new();
        let slot = |column: &Column| {
            let from = batch_token_id::COLUMNS.iter().position(|known| known.name == column.name);
            match (column.carry, from) {
                (Carry::Own, _) | (_, None) => Slot::Own,
                (Carry::Newest, Some(from)) => Slot::Newest(from),
                (carry, Some(from)) => {
                    carried.push(CarriedColumn { name: column.name, from, kind: column.kind, carry });
                    Slot::Carried(carried.len() - 1)
                }
            }
        };
        let slots = batch_str::COLUMNS.iter().map(slot).collect();
        Self { carried, slots }
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

    /// Move the first `n` items out.
    fn take(&mut self, n: usize, out: &mut Pack) {
        let size: usize = self.sizes.drain(..n).map(|size| size as usize).sum();
        out.append(&self.bytes[..size]);
        self.bytes.drain(..size);
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
            if let Some(item) = batch.element(column.from, row).filter(|item| *item != [0xc0]) {
                push_item(column, items, item).map_err(|what| format!("{} is malformed: {what}", column.name))?;
            }
            let aligned = items.sizes.is_empty() || items.sizes.len() == self.ends.len();
            if column.carry == Carry::PerToken && !aligned {
                return Err(format!("{} has not one item for each of {k} ids", column.name));
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
    pub(super) fn write_ids(&self, n: usize, out: &mut Pack) {
        write_bin(out, &self.ids[..4 * n]);
    }

    /// Whether anything waits in a column.
    pub(super) fn has_columns(&self) -> bool {
        !self.columns.is_empty()
    }

    /// Items of column `i` of the layout that go out with the first `n` tokens.
    pub(super) fn in_column(&self, layout: &Layout, i: usize, n: usize) -> usize {
        let waiting = self.columns.get(i).map_or(0, |items| items.sizes.len());
        if layout.carried[i].carry == Carry::PerToken { n.min(waiting) } else { waiting }
    }

    /// Write column `i` of the layout for the first `n` tokens.
    pub(super) fn write_column(&mut self, layout: &Layout, i: usize, n: usize, out: &mut Pack) {
        let n = self.in_column(layout, i, n);
        let (column, items) = (&layout.carried[i], &mut self.columns[i]);
        match (column.carry, column.kind) {
            (Carry::Once, _) => {}
            (_, ColumnKind::Ragged | ColumnKind::RaggedShort) => write_bin_head(out, 4 * n),
            _ => write_array(out, n),
        }
        items.take(n, out);
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
pub(super) fn write_nothing(column: &CarriedColumn, out: &mut Pack) {
    match column.kind {
        ColumnKind::Nested => write_array(out, 0),
        _ => out.push(NIL),
    }
}
