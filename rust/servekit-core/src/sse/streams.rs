//! The live streams of one worker.

use super::Template;
use crate::split::take_rows;
use crate::wire::columns::batch_str::{COMPLETION_TOKENS, DP_RANKS, OUTPUT_STRS};
use crate::wire::msgpack::{Broken, Cursor};
use crate::wire::{RidMap, ScannedBatch, WireError};

struct Stream<S> {
    template: Template,
    sink: S,
    completion_tokens: u64,
    piece_ns: u64,
}

impl<S> Stream<S> {
    /// A row has come.
    fn meter(&mut self, batch: &ScannedBatch, row: usize, now_ns: u64, tally: &mut Tally) -> Result<(), WireError> {
        if let Some(item) = batch.element(COMPLETION_TOKENS, row).filter(|item| *item != [0xc0]) {
            let tokens = Cursor::new(item).uint().map_err(|broken| malformed("completion_tokens", broken))?;
            tally.generated += tokens.saturating_sub(self.completion_tokens);
            self.completion_tokens = tokens;
        }
        if tally.rank.is_none()
            && let Some(item) = batch.element(DP_RANKS, row).filter(|item| *item != [0xc0])
        {
            tally.rank = Some(Cursor::new(item).uint().map_err(|broken| malformed("dp_ranks", broken))?);
        }
        let gap = now_ns.saturating_sub(self.piece_ns);
        self.piece_ns = now_ns;
        // Streams that move together have one gap.
        match tally.gaps.last_mut() {
            Some((last, streams)) if *last == gap => *streams += 1,
            _ => tally.gaps.push((gap, 1)),
        }
        Ok(())
    }
}

/// What the rows of open streams brought, their last rows included.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Tokens beyond those that were reported before.
    pub generated: u64,
    /// Which rank made them: a batch is of one step of one rank.
    pub rank: Option<u64>,
    /// Nanoseconds since a stream's row before, and of how many streams in a row that is true.
    pub gaps: Vec<(u64, u64)>,
}

/// Streams whose rows need nothing but their text in a template, by request id. `S` is where a stream's bytes go.
pub struct TextStreams<S> {
    streams: RidMap<u64, Stream<S>>,
    scratch: Vec<u8>,
    event: Vec<u8>,
}

impl<S> Default for TextStreams<S> {
    fn default() -> Self {
        Self { streams: RidMap::default(), scratch: Vec::new(), event: Vec::new() }
    }
}

impl<S> TextStreams<S> {
    /// Begin to render the rows of a request; one that was open is replaced.
    ///
    /// `completion_tokens` is what its rows reported so far, the last of them at `now_ns`.
    pub fn open(&mut self, rid: u64, template: Template, sink: S, completion_tokens: u64, now_ns: u64) {
        self.streams.insert(rid, Stream { template, sink, completion_tokens, piece_ns: now_ns });
    }

    /// Leave a request's rows alone again: how many tokens its rows reported last; None if not open.
    pub fn close(&mut self, rid: u64) -> Option<u64> {
        self.streams.remove(&rid).map(|stream| stream.completion_tokens)
    }

    /// Tokens that a request's rows reported last; None if it is not open.
    pub fn tokens(&self, rid: u64) -> Option<u64> {
        self.streams.get(&rid).map(|stream| stream.completion_tokens)
    }

    /// Streams that are open.
    pub fn live(&self) -> usize {
        self.streams.len()
    }

    /// Hand each open stream its event, in the order of the rows, and return the batch of all other rows, if there are
    /// any: those of requests that are not open, and last rows, with which a request is closed here. `now_ns` is on the
    /// same clock as that of `open`.
    ///
    /// # Errors
    /// The batch has no texts, or one is not UTF-8; `write` was called for the rows before that.
    pub fn render(
        &mut self,
        batch: &ScannedBatch,
        now_ns: u64,
        mut write: impl FnMut(&S, &[u8]),
    ) -> Result<(Option<Vec<u8>>, Tally), WireError> {
        let mut left = Vec::new();
        let mut tally = Tally::default();
        for (row, &rid) in batch.rids().iter().enumerate() {
            if batch.finished(row) {
                if let Some(mut stream) = self.streams.remove(&rid) {
                    stream.meter(batch, row, now_ns, &mut tally)?;
                }
                left.push(row as u32);
                continue;
            }
            let Some(stream) = self.streams.get_mut(&rid) else {
                left.push(row as u32);
                continue;
            };
            let text = text(batch, row).map_err(|broken| malformed("output_strs", broken))?;
            stream.meter(batch, row, now_ns, &mut tally)?;
            if !text.is_empty() {
                stream.template.event(text, &mut self.scratch, &mut self.event);
                write(&stream.sink, &self.event);
            }
        }
        let left = match left.len() {
            0 => None,
            all if all == batch.rows() => Some(batch.body().to_vec()),
            _ => Some(take_rows(batch, &left)?),
        };
        Ok((left, tally))
    }
}

fn text(batch: &ScannedBatch, row: usize) -> Result<&str, Broken> {
    let item = batch.element(OUTPUT_STRS, row).ok_or((0, "there are no texts"))?;
    std::str::from_utf8(Cursor::new(item).str()?).map_err(|_| (0, "not UTF-8"))
}

fn malformed(column: &'static str, (at, what): Broken) -> WireError {
    WireError::Body { column, at, what }
}
