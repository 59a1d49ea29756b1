//! A part of the running requests, and what becomes of their rows.

use std::collections::HashSet;
use std::collections::hash_map::Entry;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use crate::split::{Places, split_rows_by_worker};
use crate::wire::columns::batch_token_id as columns;
use crate::wire::{Kind, Rid, RidMap, Route, SPREAD, ScannedBatch, TextOptions};

use super::carried::Layout;
use super::output::{Body, Reason, Rows, ShardOutput, WorkerFrame};
use super::request::{End, Request};
use super::source::Source;
use super::vocabulary::Vocabulary;

/// HTTP status of what is the server's fault.
const SERVER_ERROR: u16 = 500;

/// The shard, of `shards`, that a request belongs to.
///
/// # Panics
/// `shards` is zero.
pub fn shard_of(rid: u64, shards: usize) -> usize {
    ((rid.wrapping_mul(SPREAD) >> 32) % shards as u64) as usize
}

/// What a shard has counted since its start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counts {
    /// Rows and failures of requests that it does not know: double finishes, and what came after an end.
    pub dropped: u64,
    /// Requests that ended because decoding them failed.
    pub failed: u64,
    /// Requests opened under an id that was in use.
    pub duplicates: u64,
    /// Rows of open requests from a rank that does not have them.
    pub strays: u64,
}

enum Stage {
    /// Its text is decoded.
    Live(Box<Request>),
    /// It wants ids alone, which go to its worker as they come.
    Ids,
    /// Ended here; the rank's finished row is still to come.
    Closing,
}

struct State {
    /// The rank that has the request; none if rows of any rank count.
    home: Option<u16>,
    stage: Stage,
}

/// One detokenizer thread's requests. It does no I/O and never blocks.
pub struct Shard {
    index: usize,
    shards: usize,
    vocabulary: Option<Arc<Vocabulary>>,
    layout: Layout,
    requests: RidMap<u64, State>,
    counts: Counts,
    /// Rows for the workers of the step at hand; kept for their buffers.
    rows: Vec<Rows>,
}

impl Shard {
    /// Shard `index` of `shards`; without a vocabulary it passes ids only.
    pub fn new(index: usize, shards: usize, vocabulary: Option<Arc<Vocabulary>>) -> Self {
        Self {
            index,
            shards,
            vocabulary,
            layout: Layout::new(),
            requests: RidMap::default(),
            counts: Counts::default(),
            rows: Vec::new(),
        }
    }

    /// Begin a request. It must be known here before anything about it is said, a refusal included. One that is known
    /// already goes on as it was, and is counted.
    pub fn open(&mut self, rid: u64, options: TextOptions, stream: bool) {
        self.open_at(None, rid, options, stream);
    }

    /// As [`Shard::open`]; of the batches that [`Shard::batch_of`] takes, only those of rank `home` count.
    pub fn open_at(&mut self, home: Option<u16>, rid: u64, options: TextOptions, stream: bool) {
        match self.requests.entry(rid) {
            Entry::Occupied(_) => self.counts.duplicates += 1,
            Entry::Vacant(entry) => {
                let stage = if options.text && self.vocabulary.is_some() {
                    Stage::Live(Box::new(Request::new(&options, stream)))
                } else {
                    Stage::Ids
                };
                entry.insert(State { home, stage });
            }
        }
    }

    /// Take this shard's rows of a batch. Rows of a request that is not open are dropped and counted. Batches that are
    /// text or embeddings already pass as they are, split by worker.
    pub fn batch(&mut self, batch: &ScannedBatch, out: &mut ShardOutput) {
        if batch.kind() == Kind::BatchTokenId { self.detokenize(batch, None, out) } else { self.pass(batch, out) }
    }

    /// Take this shard's rows of a batch that `rank` sent; all frames in `out` become that rank's. A row of a request that
    /// is at another rank is of another attempt: it is dropped and counted. What is no token ids passes as it is, as far
    /// as its requests are open.
    pub fn batch_of(&mut self, rank: u16, batch: &ScannedBatch, out: &mut ShardOutput) {
        if batch.kind() == Kind::BatchTokenId {
            self.detokenize(batch, Some(rank), out);
        } else {
            let live = self.close_finished(rank, batch);
            pass_rows(batch, |rid| live.contains(&rid), out);
        }
        out.frames.iter_mut().for_each(|frame| frame.rank = i32::from(rank));
    }

    /// The open requests among this shard's rows; those whose row is finished are closed.
    fn close_finished(&mut self, rank: u16, batch: &ScannedBatch) -> HashSet<u64> {
        let mut live = HashSet::new();
        for (row, rid) in batch.rids().iter().copied().enumerate() {
            if shard_of(rid, self.shards) != self.index {
                continue;
            }
            let Entry::Occupied(entry) = self.requests.entry(rid) else {
                self.counts.dropped += 1;
                continue;
            };
            if entry.get().home.is_some_and(|home| home != rank) {
                self.counts.strays += 1;
                continue;
            }
            if !matches!(entry.get().stage, Stage::Closing) {
                live.insert(rid);
            }
            if batch.finished(row) {
                entry.remove();
            }
        }
        live
    }

    fn detokenize(&mut self, batch: &ScannedBatch, rank: Option<u16>, out: &mut ShardOutput) {
        let mut workers = Places::new();
        let mut undecoded = HashSet::new();
        let source = Source::new(batch, self.layout.in_batch(batch));
        for (row, rid) in batch.rids().iter().copied().enumerate() {
            if self.shards > 1 && shard_of(rid, self.shards) != self.index {
                continue;
            }
            let Entry::Occupied(mut entry) = self.requests.entry(rid) else {
                self.counts.dropped += 1;
                continue;
            };
            let finished = batch.finished(row);
            if let (Some(home), Some(rank)) = (entry.get().home, rank)
                && home != rank
            {
                self.counts.strays += 1;
                continue;
            }
            let Stage::Live(request) = &mut entry.get_mut().stage else {
                if matches!(entry.get().stage, Stage::Ids) {
                    undecoded.insert(rid);
                }
                if finished {
                    entry.remove();
                }
                continue;
            };
            let vocabulary = self.vocabulary.as_deref();
            let step = || request.step(vocabulary, &self.layout, &source, row);
            // What a failing decoder leaves behind belongs to this request alone, and goes with it.
            let step =
                catch_unwind(AssertUnwindSafe(step)).unwrap_or_else(|_| Err("the detokenizer failed".to_owned()));
            let (completion_tokens, reason) = match &step {
                Ok(step) => (
                    step.completion_tokens,
                    match &step.end {
                        None => Reason::None,
                        Some(End::Rank) => {
                            Reason::Copied(batch.element(columns::FINISHED_REASONS, row).unwrap_or(&[0xc0]))
                        }
                        Some(End::Stop(matched)) => Reason::Stop(matched),
                    },
                ),
                Err(message) => {
                    self.counts.failed += 1;
                    (request.generated, Reason::Failed("error", message, SERVER_ERROR))
                }
            };
            let ended = !matches!(reason, Reason::None);
            if let Some(release) = request.take(ended) {
                let worker = workers.of(Rid(rid).route().into()) as usize;
                if worker == self.rows.len() {
                    self.rows.push(Rows::default());
                }
                self.rows[worker].push(&self.layout, row as u32, completion_tokens, &reason, release);
            }
            if finished {
                entry.remove();
            } else if ended {
                entry.get_mut().stage = Stage::Closing;
                out.aborts.push(rid);
            }
        }
        let routes = workers.keys().iter().map(|key| Route::from(*key));
        out.frames.extend(routes.zip(&mut self.rows).map(|(route, rows)| rows.frame(route, &self.layout, batch)));
        if !undecoded.is_empty() {
            pass_rows(batch, |rid| undecoded.contains(&rid), out);
        }
    }

    fn pass(&mut self, batch: &ScannedBatch, out: &mut ShardOutput) {
        let mine = |rid| self.shards == 1 || shard_of(rid, self.shards) == self.index;
        pass_rows(batch, mine, out);
        for (row, rid) in batch.rids().iter().enumerate() {
            if mine(*rid) && batch.finished(row) {
                self.requests.remove(rid);
            }
        }
    }

    /// End an open request without its rank's word: `kind` is `error` or `abort`, `status` an HTTP status for errors. Text
    /// that was held back goes out with the row. Whatever the rank still says of it is dropped.
    ///
    /// Returns whether the request was open; if it was not, nothing is sent and the call is counted.
    pub fn fail(&mut self, rid: u64, status: u16, kind: &str, message: &str, out: &mut ShardOutput) -> bool {
        match self.requests.remove(&rid) {
            None => {
                self.counts.dropped += 1;
                false
            }
            Some(State { stage: Stage::Closing, .. }) => false,
            Some(State { stage, .. }) => {
                let mut request = match stage {
                    Stage::Live(request) => request,
                    _ => Box::new(Request::new(&TextOptions::default(), false)),
                };
                let vocabulary = self.vocabulary.as_deref();
                let cut_off = || request.cut_off(vocabulary);
                // The request ends with an error in any case; only its last, incomplete character is at stake.
                if !matches!(catch_unwind(AssertUnwindSafe(cut_off)), Ok(Ok(()))) {
                    self.counts.failed += 1;
                }
                let (seen, generated) = (request.seen, request.generated);
                let mut rows = Rows::default();
                if let Some(release) = request.take(true) {
                    let reason = Reason::Failed(kind, message, status);
                    rows.push(&self.layout, 0, generated, &reason, release);
                }
                out.frames.push(rows.single(Rid(rid), &self.layout, seen));
                true
            }
        }
    }

    /// Requests that it knows, those included that ended here and whose rank has not finished them.
    pub fn live(&self) -> usize {
        self.requests.len()
    }

    /// What it has counted.
    pub fn counts(&self) -> Counts {
        self.counts
    }
}

/// Rows of a batch go to their workers as they are.
fn pass_rows(batch: &ScannedBatch, wanted: impl Fn(u64) -> bool, out: &mut ShardOutput) {
    for part in split_rows_by_worker(batch, wanted) {
        let body = Body::Shared(part.body);
        out.frames.push(WorkerFrame { route: part.route, kind: batch.kind(), rank: -1, rows: part.rows, body });
    }
}
