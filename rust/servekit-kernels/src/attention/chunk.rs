//! What one chunk of a sequence means to some queries.

use std::ops::Range;

use super::{Attention, CHUNK, Call, Item, join};
use crate::isa::{Isa, Task};
use crate::matrix::tile;

/// Tokens between those that are asked for and those that are computed.
const AHEAD: usize = 12;
/// Numbers in a cache line.
const LINE: usize = 16;

/// One item's chunks, one after the other.
pub(super) struct Chunks<'a> {
    pub(super) call: &'a Call,
    pub(super) item: &'a Item,
    /// As many numbers as [`Chunks::scratch`] says: queries, then parts of each chunk.
    pub(super) scratch: *mut f32,
}

/// Keys of a chunk's tokens, each before its value, of one KV head.
struct Keys {
    at: [*const f32; CHUNK],
    /// How far a value lies behind its key.
    values: usize,
}

impl Chunks<'_> {
    /// Numbers that an item needs for itself.
    pub(super) fn scratch(sizes: &Attention, item: &Item) -> usize {
        let rows = item.tokens.len() * (sizes.heads / sizes.kv_heads);
        rows * sizes.size + if item.chunks.len() > 1 { item.chunks.len() * rows * sizes.part() } else { 0 }
    }

    /// Rows of the item: tokens, and of each its heads.
    fn rows(&self) -> usize {
        self.item.tokens.len() * self.call.group()
    }

    unsafe fn out(&self, row: usize) -> *mut f32 {
        let (group, item) = (self.call.group(), self.item);
        let token = item.tokens.start + row / group;
        self.call.out(item.sequence, token, item.kv_head).add(row % group * self.call.sizes.size)
    }

    /// The tokens of a chunk that a row sees.
    unsafe fn seen(&self, row: usize, chunk: usize) -> Range<usize> {
        let all = self.call.seen(self.item.sequence, self.item.tokens.start + row / self.call.group());
        let begin = chunk * CHUNK;
        all.start.saturating_sub(begin).min(CHUNK)..all.end.saturating_sub(begin).min(CHUNK)
    }

    unsafe fn keys(&self, chunk: usize, count: usize) -> Keys {
        let (sizes, sequences) = (self.call.sizes, self.call.sequences);
        let table = sequences.tables.add(self.item.sequence * sequences.width);
        let mut at = [std::ptr::null(); CHUNK];
        for (i, key) in at.iter_mut().enumerate().take(count) {
            let token = chunk * CHUNK + i;
            let place = *table.add(token / sizes.page) as usize * sizes.page + token % sizes.page;
            *key = self.call.layer.add(place * sizes.token() + self.item.kv_head * sizes.size);
        }
        Keys { at, values: sizes.kv_heads * sizes.size }
    }
}

impl Task for Chunks<'_> {
    #[inline(always)]
    unsafe fn run<S: Isa>(self) {
        let (item, sizes, rows) = (self.item, self.call.sizes, self.rows());
        let heads = self.call.group() * sizes.size;
        for (i, token) in item.tokens.clone().enumerate() {
            let from = self.call.query(item.sequence, token, item.kv_head);
            std::ptr::copy_nonoverlapping(from, self.scratch.add(i * heads), heads);
        }
        let own = self.scratch.add(rows * sizes.size);
        for (i, chunk) in item.chunks.clone().enumerate() {
            let keys = self.keys(chunk, self.seen(rows - 1, chunk).end);
            let parts = match item.part {
                Some(part) => Some(self.call.parts.add(part * sizes.part())),
                None => (item.chunks.len() > 1).then(|| own.add(i * rows * sizes.part())),
            };
            let mut row = 0;
            while row < rows {
                row += match (S::TILE, rows - row) {
                    (6.., 6..) => self.some::<S, 6>(&keys, chunk, row, parts),
                    (6.., 4..) => self.some::<S, 4>(&keys, chunk, row, parts),
                    (3.., 3..) => self.some::<S, 3>(&keys, chunk, row, parts),
                    (_, 2..) => self.some::<S, 2>(&keys, chunk, row, parts),
                    _ => self.some::<S, 1>(&keys, chunk, row, parts),
                };
            }
        }
        if item.chunks.len() > 1 {
            for row in 0..rows {
                let parts = (0..item.chunks.len()).map(|i| own.add((i * rows + row) * sizes.part()).cast_const());
                join(parts, self.out(row), sizes.size);
            }
        }
    }
}

impl Chunks<'_> {
    /// `R` rows from `row` on with a chunk; returns R. Their parts, or the whole where there are none, are written.
    #[inline(always)]
    unsafe fn some<S: Isa, const R: usize>(
        &self,
        keys: &Keys,
        chunk: usize,
        row: usize,
        parts: Option<*mut f32>,
    ) -> usize {
        let size = self.call.sizes.size;
        let to: [*mut f32; R] = std::array::from_fn(|i| match parts {
            Some(parts) => parts.add((row + i) * self.call.sizes.part() + 2),
            None => self.out(row + i),
        });
        let seen: [Range<usize>; R] = std::array::from_fn(|i| self.seen(row + i, chunk));
        // Whole registers, so that a token stands in the same lane for all who see it.
        let begin = seen[0].start - seen[0].start % S::LANES;
        let end = seen[R - 1].end;
        let q = self.scratch.add(row * size);
        let mut scores = [[0f32; CHUNK]; R];
        let mut at = begin;
        while at < end {
            // Other heads lie between those of this one: the processor does not guess where it goes on.
            for key in keys.at[..end].iter().skip(at + AHEAD).take(4) {
                for line in (0..size).step_by(LINE) {
                    S::prefetch(key.add(line).cast());
                    S::prefetch(key.add(keys.values + line).cast());
                }
            }
            // A chunk is a multiple of four long, so the scores beyond the last token have a place.
            let four = std::array::from_fn(|i| keys.at[(at + i).min(end - 1)]);
            let mut sums = [[S::zero(); 4]; R];
            tile::<S, R>(&mut sums, q, size, four, size);
            for (row, four) in scores.iter_mut().zip(sums) {
                row[at..at + 4].copy_from_slice(&S::sums(four));
            }
            at += 4;
        }
        let (mut most, mut sum) = ([0f32; R], [0f32; R]);
        for (i, row) in scores.iter_mut().enumerate() {
            (most[i], sum[i]) = soften::<S>(row, begin..end, seen[i].clone(), 1.0 / (size as f32).sqrt());
        }
        // A part is divided when all are put together.
        let by = if parts.is_some() { [1.0; R] } else { sum };
        let weighted = &keys.at[begin..end];
        let mut d = 0;
        while d + 4 * S::LANES <= size {
            weigh::<S, R, 4>(&scores, begin, weighted, keys.values + d, to.map(|to| to.add(d)), by);
            d += 4 * S::LANES;
        }
        while d < size {
            weigh::<S, R, 1>(&scores, begin, weighted, keys.values + d, to.map(|to| to.add(d)), by);
            d += S::LANES;
        }
        if parts.is_some() {
            for i in 0..R {
                to[i].sub(2).write(most[i]);
                to[i].sub(1).write(sum[i]);
            }
        }
        R
    }
}

/// Turns products within `all`, which begins with a whole register, into weights e^(scale * product - maximum) where
/// they are `seen` and 0 elsewhere; returns maximum and sum, a sum of 0 if none is.
#[inline(always)]
unsafe fn soften<S: Isa>(row: &mut [f32; CHUNK], all: Range<usize>, seen: Range<usize>, scale: f32) -> (f32, f32) {
    if seen.is_empty() {
        row[all].fill(0.0);
        return (f32::NEG_INFINITY, 0.0);
    }
    let (begin, end) = (seen.start - seen.start % S::LANES, seen.end.next_multiple_of(S::LANES));
    // The padding repeats a real product, so that it changes no maximum.
    let real = row[seen.start];
    row[begin..seen.start].fill(real);
    row[seen.end..end].fill(real);
    let mut most = S::load(row.as_ptr().add(begin));
    let mut i = begin + S::LANES;
    while i < end {
        most = S::max(most, S::load(row.as_ptr().add(i)));
        i += S::LANES;
    }
    let most = S::largest(most) * scale;
    let (scales, less) = (S::splat(scale), S::splat(-most));
    i = begin;
    while i < end {
        let to = row.as_mut_ptr().add(i);
        S::store(to, S::exp(S::fma(S::load(to), scales, less)));
        i += S::LANES;
    }
    row[all.start..seen.start].fill(0.0);
    row[seen.end..end.max(all.end)].fill(0.0);
    let mut sum = S::zero();
    i = begin;
    while i < end {
        sum = S::add(sum, S::load(row.as_ptr().add(i)));
        i += S::LANES;
    }
    (most, S::sum(sum))
}

/// Sums of values by weight, those of `keys` from `begin` on: `D` registers from `offset` behind each key on, divided.
#[inline(always)]
unsafe fn weigh<S: Isa, const R: usize, const D: usize>(
    weights: &[[f32; CHUNK]; R],
    begin: usize,
    keys: &[*const f32],
    offset: usize,
    to: [*mut f32; R],
    by: [f32; R],
) {
    let mut acc = [[S::zero(); D]; R];
    for (i, key) in keys.iter().enumerate() {
        let from = key.add(offset);
        let values: [S::V; D] = std::array::from_fn(|j| S::load(from.add(j * S::LANES)));
        for (row, weights) in acc.iter_mut().zip(weights) {
            let weight = S::splat(*weights.get_unchecked(begin + i));
            for (sum, value) in row.iter_mut().zip(values) {
                *sum = S::fma(weight, value, *sum);
            }
        }
    }
    for ((row, to), by) in acc.into_iter().zip(to).zip(by) {
        for (j, sum) in row.into_iter().enumerate() {
            S::store(to.add(j * S::LANES), S::div(sum, S::splat(by)));
        }
    }
}
