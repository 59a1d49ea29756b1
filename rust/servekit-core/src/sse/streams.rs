//! The live streams of one worker.

use std::collections::HashMap;

use super::Template;
use crate::split::take_rows;
use crate::wire::columns::batch_str::{COMPLETION_TOKENS, OUTPUT_STRS};
use crate::wire::msgpack::{Broken, Cursor};
use crate::wire::{ScannedBatch, WireError};

struct Stream<S> {
    template: Template,
    sink: S,
    progress: Progress,
}

/// How far a stream has come.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Progress {
    /// Tokens so far, as the rows say.
    pub tokens: u64,
    /// When its last row came, in seconds of the caller's clock.
    pub at: f64,
}

/// What a batch brought to the open streams, in sums.
#[derive(Debug, Default, PartialEq)]
pub struct Sums {
    /// Tokens beyond those of the rows before.
    pub tokens: u64,
    /// When the row before came, and for how many streams: streams that move together share it.
    pub since: Vec<(f64, u64)>,
}

impl Sums {
    fn add(&mut self, tokens: u64, since: f64) {
        self.tokens += tokens;
        match self.since.iter_mut().rev().find(|(at, _)| *at == since) {
            Some((_, streams)) => *streams += 1,
            None => self.since.push((since, 1)),
        }
    }
}

/// Streams whose rows need nothing but their text in a template, by request id. `S` is where a stream's bytes go.
pub struct TextStreams<S> {
    streams: HashMap<u64, Stream<S>>,
    scratch: Vec<u8>,
    event: Vec<u8>,
}

impl<S> Default for TextStreams<S> {
    fn default() -> Self {
        Self { streams: HashMap::new(), scratch: Vec::new(), event: Vec::new() }
    }
}

impl<S> TextStreams<S> {
    /// Begin to render the rows of a request that has come so far; one that was open is replaced.
    pub fn open(&mut self, rid: u64, template: Template, sink: S, progress: Progress) {
        self.streams.insert(rid, Stream { template, sink, progress });
    }

    /// Leave a request's rows alone again; None if it is not open.
    pub fn close(&mut self, rid: u64) -> Option<Progress> {
        self.streams.remove(&rid).map(|stream| stream.progress)
    }

    /// How far a request has come; None if it is not open.
    pub fn progress(&self, rid: u64) -> Option<Progress> {
        self.streams.get(&rid).map(|stream| stream.progress)
    }

    /// Streams that are open.
    pub fn live(&self) -> usize {
        self.streams.len()
    }

    /// Hand each open stream its event, in the order of the rows.
    ///
    /// Returned are sums over these rows, and the batch of all others, if there are any: rows of requests that are not
    /// open, and last rows. `now` is the caller's clock in seconds.
    ///
    /// # Errors
    /// The batch has no texts, or one is not UTF-8; `write` was called for the rows before that.
    pub fn render(
        &mut self,
        batch: &ScannedBatch,
        now: f64,
        mut write: impl FnMut(&S, &[u8]),
    ) -> Result<(Sums, Option<Vec<u8>>), WireError> {
        let mut left = Vec::new();
        let mut sums = Sums::default();
        for (row, rid) in batch.rids().iter().enumerate() {
            let stream = if batch.finished(row) { None } else { self.streams.get_mut(rid) };
            let Some(Stream { template, sink, progress }) = stream else {
                left.push(row as u32);
                continue;
            };
            let text = text(batch, row).map_err(|broken| malformed("output_strs", broken))?;
            let tokens = match batch.element(COMPLETION_TOKENS, row) {
                Some(item) => Cursor::new(item).uint().map_err(|broken| malformed("completion_tokens", broken))?,
                None => progress.tokens,
            };
            sums.add(tokens.saturating_sub(progress.tokens), progress.at);
            *progress = Progress { tokens, at: now };
            if !text.is_empty() {
                template.event(text, &mut self.scratch, &mut self.event);
                write(sink, &self.event);
            }
        }
        let left = match left.len() {
            0 => None,
            all if all == batch.rows() => Some(batch.body().to_vec()),
            _ => Some(take_rows(batch, &left)?),
        };
        Ok((sums, left))
    }
}

fn text(batch: &ScannedBatch, row: usize) -> Result<&str, Broken> {
    let item = batch.element(OUTPUT_STRS, row).ok_or((0, "there are no texts"))?;
    std::str::from_utf8(Cursor::new(item).str()?).map_err(|_| (0, "not UTF-8"))
}

fn malformed(column: &'static str, (at, what): Broken) -> WireError {
    WireError::Body { column, at, what }
}
