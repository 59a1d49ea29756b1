//! What a shard has to say, as one `BatchStrOutput` for each worker.

use crate::split::{write_column, write_head};
use crate::wire::columns::batch_str as columns;
use crate::wire::msgpack::{Sink, write_array, write_int, write_nil, write_str, write_uint};
use crate::wire::{Cells, Kind, Pack, Rid, Route, ScannedBatch};

use super::carried::{Layout, write_nothing};
use super::request::{Release, Seen};

/// A body for one worker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkerFrame {
    /// Whose it is.
    pub route: Route,
    /// `BatchStr`; of a batch that passed the shard unchanged, its own kind.
    pub kind: Kind,
    /// Rows in it.
    pub rows: u32,
    /// A batch of that kind.
    pub body: Vec<u8>,
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
    fn write(&self, out: &mut Vec<u8>) {
        match self {
            Self::None => write_nil(out),
            Self::Copied(item) => out.extend_from_slice(item),
            Self::Stop(matched) => {
                write_array(out, 4);
                write_str(out, b"stop");
                write_str(out, matched.as_bytes());
                write_nil(out);
                write_uint(out, 0);
            }
            Self::Failed(kind, message, status) => {
                write_array(out, 4);
                write_str(out, kind.as_bytes());
                write_nil(out);
                write_str(out, message.as_bytes());
                write_uint(out, u64::from(*status));
            }
        }
    }
}

/// A column that few rows have something in: written only if one does.
#[derive(Default)]
struct Optional {
    items: Vec<u8>,
    rows: usize,
}

impl Optional {
    /// Fill rows that had nothing, up to `rows`.
    fn fill(&mut self, rows: usize, nothing: impl Fn(&mut Vec<u8>)) {
        for _ in self.rows..rows {
            nothing(&mut self.items);
        }
        self.rows = rows;
    }
}

/// Rows for one worker.
pub(super) struct Rows {
    route: Route,
    count: usize,
    /// Rows of the batch that they come from.
    sources: Vec<u32>,
    rids: Vec<u8>,
    reasons: Vec<u8>,
    completion_tokens: Vec<u8>,
    texts: Vec<u8>,
    ids: Optional,
    carried: Vec<Optional>,
}

impl Rows {
    pub(super) fn new(route: Route) -> Self {
        Self {
            route,
            count: 0,
            sources: Vec::new(),
            rids: Vec::new(),
            reasons: Vec::new(),
            completion_tokens: Vec::new(),
            texts: Vec::new(),
            ids: Optional::default(),
            carried: Vec::new(),
        }
    }

    /// Add a row; `source` is the batch's row that it comes from.
    pub(super) fn push(
        &mut self,
        layout: &Layout,
        rid: Rid,
        source: u32,
        completion_tokens: u64,
        reason: &Reason<'_>,
        mut release: Release<'_>,
    ) {
        self.sources.push(source);
        write_uint(&mut self.rids, rid.0);
        reason.write(&mut self.reasons);
        write_uint(&mut self.completion_tokens, completion_tokens);
        release.write_text(&mut self.texts);
        let mut ids = Vec::new();
        if release.write_ids(&mut ids) {
            self.ids.fill(self.count, |out| out.extend_from_slice(&[0xc4, 0]));
            self.ids.items.extend_from_slice(&ids);
            self.ids.rows += 1;
        }
        for (i, column) in layout.carried.iter().enumerate() {
            let mut item = Vec::new();
            if release.write_column(layout, i, &mut item) {
                self.carried.resize_with(layout.carried.len(), Optional::default);
                let optional = &mut self.carried[i];
                optional.fill(self.count, |out| write_nothing(column, out));
                optional.items.extend_from_slice(&item);
                optional.rows += 1;
            }
        }
        release.done();
        self.count += 1;
    }

    /// The frame of rows that come from a batch.
    pub(super) fn into_frame(mut self, layout: &Layout, batch: &ScannedBatch) -> WorkerFrame {
        self.frame(layout, |column, sources, out| {
            let from = layout.newest.iter().find(|(to, _)| *to == column).map(|(_, from)| *from);
            match from.and_then(|from| batch.cells().get(from)) {
                Some(cells) => write_column(batch, cells, sources, out),
                None => write_column(batch, &Cells::Absent, sources, out),
            }
        })
    }

    /// The frame of a single row that comes from no batch.
    pub(super) fn into_single(mut self, layout: &Layout, seen: Seen) -> WorkerFrame {
        self.frame(layout, |column, _, out| {
            let number = match column {
                columns::PROMPT_TOKENS => seen.prompt_tokens,
                columns::CACHED_TOKENS => seen.cached_tokens,
                columns::RETRACTION_COUNTS => seen.retraction_count,
                columns::DP_RANKS => seen.dp_rank,
                _ => return write_nil(out),
            };
            write_array(out, 1);
            write_int(out, number);
        })
    }

    fn frame(&mut self, layout: &Layout, newest: impl Fn(usize, &[u32], &mut Pack)) -> WorkerFrame {
        let count = self.count;
        let size = self.rids.len() + self.reasons.len() + self.texts.len() + self.ids.items.len() + 16 * count + 128;
        let mut out = Pack::with_room(size);
        let list = |items: &[u8], out: &mut Pack| {
            write_array(out, count);
            out.append(items);
        };
        write_head(&mut out, columns::TAG, columns::COLUMNS.len());
        for column in 0..columns::COLUMNS.len() {
            match column {
                columns::RIDS => list(&self.rids, &mut out),
                columns::FINISHED_REASONS => list(&self.reasons, &mut out),
                columns::COMPLETION_TOKENS => list(&self.completion_tokens, &mut out),
                columns::OUTPUT_STRS => list(&self.texts, &mut out),
                columns::OUTPUT_IDS if self.ids.rows > 0 => {
                    self.ids.fill(count, |out| out.extend_from_slice(&[0xc4, 0]));
                    list(&self.ids.items, &mut out);
                }
                columns::OUTPUT_IDS => write_nil(&mut out),
                column => match layout.carried.iter().position(|carried| carried.to == column) {
                    Some(i) => match self.carried.get_mut(i).filter(|optional| optional.rows > 0) {
                        Some(optional) => {
                            optional.fill(count, |out| write_nothing(&layout.carried[i], out));
                            list(&optional.items, &mut out);
                        }
                        None => write_nil(&mut out),
                    },
                    None => newest(column, &self.sources, &mut out),
                },
            }
        }
        WorkerFrame { route: self.route, kind: Kind::BatchStr, rows: count as u32, body: out.into_vec() }
    }
}
