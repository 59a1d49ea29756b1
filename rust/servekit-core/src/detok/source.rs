//! What the rows of a step are read from.

use crate::wire::columns::batch_token_id as columns;
use crate::wire::msgpack::Cursor;
use crate::wire::{Cells, Lists, Places, ScannedBatch};

/// A batch, and what its columns of numbers have in common.
pub(super) struct Source<'a> {
    pub(super) batch: &'a ScannedBatch,
    /// It has carried columns.
    pub(super) carries: bool,
    pub(super) completion_tokens: Numbers,
    prompt_tokens: Numbers,
    cached_tokens: Numbers,
    retraction_counts: Numbers,
    dp_ranks: Numbers,
}

impl<'a> Source<'a> {
    pub(super) fn new(batch: &'a ScannedBatch, carries: bool) -> Self {
        let numbers = |column| Numbers::of(batch, column);
        Self {
            batch,
            carries,
            completion_tokens: numbers(columns::COMPLETION_TOKENS),
            prompt_tokens: numbers(columns::PROMPT_TOKENS),
            cached_tokens: numbers(columns::CACHED_TOKENS),
            retraction_counts: numbers(columns::RETRACTION_COUNTS),
            dp_ranks: numbers(columns::DP_RANKS),
        }
    }
}

/// A column of one number a row.
#[derive(Clone, Copy)]
pub(super) enum Numbers {
    /// The same for all rows, or nothing.
    Same(Option<i64>),
    Each(Lists),
}

impl Numbers {
    fn of(batch: &ScannedBatch, column: usize) -> Self {
        match batch.cells().get(column) {
            Some(Cells::List(Lists { places: Places::Same { start }, .. })) => Self::Same(number(batch, *start)),
            Some(Cells::List(list)) => Self::Each(*list),
            _ => Self::Same(None),
        }
    }

    /// A row's number; None if there is none, or none that fits.
    #[inline]
    pub(super) fn of_row(&self, batch: &ScannedBatch, row: usize) -> Option<i64> {
        match self {
            Self::Same(number) => *number,
            Self::Each(list) => number(batch, batch.range(*list, row).start),
        }
    }
}

#[inline]
fn number(batch: &ScannedBatch, at: usize) -> Option<i64> {
    Cursor { bytes: batch.body(), at }.int().ok()
}

/// Counts that a row of text shows, as last seen.
#[derive(Debug, Clone, Copy)]
pub(super) struct Seen {
    pub(super) prompt_tokens: i64,
    pub(super) cached_tokens: i64,
    pub(super) retraction_count: i64,
    pub(super) dp_rank: i64,
}

impl Default for Seen {
    fn default() -> Self {
        Self { prompt_tokens: 0, cached_tokens: 0, retraction_count: 0, dp_rank: -1 }
    }
}

impl Seen {
    /// Take a row's; what it lacks stays.
    #[inline]
    pub(super) fn update(&mut self, source: &Source<'_>, row: usize) {
        let newest = |numbers: &Numbers, old| numbers.of_row(source.batch, row).unwrap_or(old);
        self.prompt_tokens = newest(&source.prompt_tokens, self.prompt_tokens);
        self.cached_tokens = newest(&source.cached_tokens, self.cached_tokens);
        self.retraction_count = newest(&source.retraction_counts, self.retraction_count);
        self.dp_rank = newest(&source.dp_ranks, self.dp_rank);
    }
}
