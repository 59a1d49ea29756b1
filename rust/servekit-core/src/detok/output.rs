//! What a shard has to say, as one `BatchStrOutput` for each worker.

use std::fmt;

use crate::split::{write_column, write_head};
use crate::wire::columns::batch_str as columns;
use crate::wire::msgpack::{NIL, Sink, write_array, write_bin_head, write_int, write_str, write_uint};
use crate::wire::{Cells, Kind, Pack, Rid, Route, ScannedBatch, SharedBytes};

use super::carried::{Layout, Slot, write_nothing};
use super::request::Release;
use super::source::Seen;

/// Bytes of a frame for one worker.
#[derive(Clone)]
pub enum Body {
    /// Made for the worker.
    Own(Vec<u8>),
    /// A batch that passes as it came.
    Shared(SharedBytes),
}

impl AsRef<[u8]> for Body {
    fn as_ref(&self) -> &[u8] {
        match self {
            Self::Own(bytes) => bytes,
            Self::Shared(bytes) => (**bytes).as_ref(),
        }
    }
}

impl fmt::Debug for Body {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Body({} bytes)", self.as_ref().len())
    }
}

/// A body for one worker.
#[derive(Debug, Clone)]
pub struct WorkerFrame {
    /// Whose it is.
    pub route: Route,
    /// `BatchStr`; of a batch that passed the shard unchanged, its own kind.
    pub kind: Kind,
    /// The rank that its rows come from, -1 if that was not told.
    pub rank: i32,
    /// Rows in it.
    pub rows: u32,
    /// A batch of that kind.
    pub body: Body,
}

/// What the calls of a shard have to say; the caller takes it out.
#[derive(Debug, Default)]
pub struct ShardOutput {
    /// To be sent, in this order.
    pub frames: Vec<WorkerFrame>,
    /// Requests that ended here while their rank goes on: it must be told.
    pub aborts: Vec<u64>,
}

/// How a row ends its request.
pub(super) enum Reason<'a> {
    /// It does not.
    None,
    /// Item of the batch.
    Copied(&'a [u8]),
    /// A stop string.
    Stop(&'a str),
    /// Abort or error: type, message, HTTP status.
    Failed(&'a str, &'a str, u16),
}

impl Reason<'_> {
    fn write(&self, out: &mut Pack) {
        match self {
            Self::None => out.push(NIL),
            Self::Copied(item) => out.append(item),
            Self::Stop(matched) => {
                write_array(out, 4);
                write_str(out, b"stop");
                write_str(out, matched.as_bytes());
                out.push(NIL);
                write_uint(out, 0);
            }
            Self::Failed(kind, message, status) => {
                write_array(out, 4);
                write_str(out, kind.as_bytes());
                out.push(NIL);
                write_str(out, message.as_bytes());
                write_uint(out, u64::from(*status));
            }
        }
    }
}

/// A column that few rows have something in.
#[derive(Default)]
struct Optional {
    items: Pack,
    rows: usize,
}

impl Optional {
    /// Begin an item of row `row`; rows before it that had nothing get what stands for nothing.
    fn begin(&mut self, row: usize, nothing: impl Fn(&mut Pack)) -> &mut Pack {
        self.fill(row, nothing);
        self.rows += 1;
        &mut self.items
    }

    fn fill(&mut self, rows: usize, nothing: impl Fn(&mut Pack)) {
        for _ in self.rows..rows {
            nothing(&mut self.items);
        }
        self.rows = rows;
    }

    fn clear(&mut self) {
        self.items.clear();
        self.rows = 0;
    }
}

/// Rows for one worker. Made for a batch, and used again for those after it.
#[derive(Default)]
pub(super) struct Rows {
    /// Rows of the batch that they come from.
    sources: Vec<u32>,
    count: usize,
    reasons: Optional,
    completion_tokens: Pack,
    texts: Pack,
    ids: Optional,
    carried: Vec<Optional>,
    body: Pack,
}

fn no_ids(out: &mut Pack) {
    write_bin_head(out, 0);
}

impl Rows {
    fn clear(&mut self) {
        self.sources.clear();
        self.count = 0;
        self.completion_tokens.clear();
        self.texts.clear();
        self.reasons.clear();
        self.ids.clear();
        self.carried.iter_mut().for_each(Optional::clear);
        self.body.clear();
    }

    /// Add a row; `source` is the batch's row that it comes from.
    pub(super) fn push(
        &mut self,
        layout: &Layout,
        source: u32,
        completion_tokens: u64,
        reason: &Reason<'_>,
        mut release: Release<'_>,
    ) {
        let row = self.count;
        self.count += 1;
        self.sources.push(source);
        if !matches!(reason, Reason::None) {
            reason.write(self.reasons.begin(row, |out| out.push(NIL)));
        }
        write_uint(&mut self.completion_tokens, completion_tokens);
        release.write_text(&mut self.texts);
        if release.has_ids() {
            release.write_ids(self.ids.begin(row, no_ids));
        }
        if release.has_columns() {
            self.carried.resize_with(layout.carried.len(), Optional::default);
            for (i, (column, optional)) in layout.carried.iter().zip(&mut self.carried).enumerate() {
                if release.has_column(layout, i) {
                    release.write_column(layout, i, optional.begin(row, |out| write_nothing(column, out)));
                }
            }
        }
        release.done();
    }

    /// The frame of rows that come from a batch. What is here is then empty again.
    pub(super) fn frame(&mut self, route: Route, layout: &Layout, batch: &ScannedBatch) -> WorkerFrame {
        self.write(layout, |place, sources, out| match (place, &layout.slots[place]) {
            // Both kinds of batch begin with the ids of their requests.
            (columns::RIDS, _) => write_column(batch, &batch.cells()[columns::RIDS], sources, out),
            (_, Slot::Newest(from)) => {
                write_column(batch, batch.cells().get(*from).unwrap_or(&Cells::Absent), sources, out);
            }
            _ => out.push(NIL),
        });
        self.take(route)
    }

    /// The frame of a single row that comes from no batch.
    pub(super) fn single(&mut self, rid: Rid, layout: &Layout, seen: Seen) -> WorkerFrame {
        self.write(layout, |place, _, out| {
            let number = match place {
                columns::RIDS => {
                    write_array(out, 1);
                    return write_uint(out, rid.0);
                }
                columns::PROMPT_TOKENS => seen.prompt_tokens,
                columns::CACHED_TOKENS => seen.cached_tokens,
                columns::RETRACTION_COUNTS => seen.retraction_count,
                columns::DP_RANKS => seen.dp_rank,
                _ => return out.push(NIL),
            };
            write_array(out, 1);
            write_int(out, number);
        });
        self.take(rid.route())
    }

    fn take(&mut self, route: Route) -> WorkerFrame {
        let body = Body::Own(self.body.as_slice().to_vec());
        let frame = WorkerFrame { route, kind: Kind::BatchStr, rank: -1, rows: self.count as u32, body };
        self.clear();
        frame
    }

    /// Write the body; `others` writes the columns that are not made here.
    fn write(&mut self, layout: &Layout, others: impl Fn(usize, &[u32], &mut Pack)) {
        let Self { count, body, .. } = self;
        let list = |items: &Pack, out: &mut Pack| {
            write_array(out, *count);
            out.append(items.as_slice());
        };
        let optional = |column: &mut Optional, out: &mut Pack, nothing: &dyn Fn(&mut Pack)| {
            if column.rows == 0 {
                return out.push(NIL);
            }
            column.fill(*count, nothing);
            list(&column.items, out);
        };
        write_head(body, columns::TAG, columns::COLUMNS.len());
        for (place, slot) in layout.slots.iter().enumerate() {
            match (place, slot) {
                (columns::FINISHED_REASONS, _) => {
                    self.reasons.fill(*count, |out| out.push(NIL));
                    list(&self.reasons.items, body);
                }
                (columns::COMPLETION_TOKENS, _) => list(&self.completion_tokens, body),
                (columns::OUTPUT_STRS, _) => list(&self.texts, body),
                (columns::OUTPUT_IDS, _) => optional(&mut self.ids, body, &no_ids),
                (_, Slot::Carried(i)) => match self.carried.get_mut(*i) {
                    Some(column) => optional(column, body, &|out| write_nothing(&layout.carried[*i], out)),
                    None => body.push(NIL),
                },
                _ => others(place, &self.sources, body),
            }
        }
    }
}
