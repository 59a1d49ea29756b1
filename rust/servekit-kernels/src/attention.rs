//! Attention of one new token a sequence over keys and values in pages, read where they are.
//!
//! A sequence is cut into chunks at fixed places; each chunk gives a maximum, a sum and a weighted sum, which are put
//! together in order. So the work of one long sequence is shared by threads, and the result depends on nothing else.

use std::cell::RefCell;

use crate::isa::{Isa, Level, Task};
use crate::matrix::tile;
use crate::pool::Pool;

/// Tokens of a chunk.
const CHUNK: usize = 256;
/// Tokens between those that are asked for and those that are computed.
const AHEAD: usize = 12;
/// Numbers in a cache line.
const LINE: usize = 16;

/// Sizes that the kernel can't do.
#[derive(Debug, PartialEq, Eq)]
pub struct AttentionError {
    size: usize,
}

impl std::fmt::Display for AttentionError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "heads of {} numbers: only multiples of 16 are known", self.size)
    }
}

impl std::error::Error for AttentionError {}

/// The sizes of a model's attention and of its pages.
///
/// A layer's pages are [pages, page, 2, kv heads, head size] float32, keys before values.
#[derive(Clone, Copy, Debug)]
pub struct Attention {
    heads: usize,
    kv_heads: usize,
    size: usize,
    page: usize,
}

/// The sequences of a call.
///
/// All arrays have an entry for each sequence, in order; addresses are read only.
#[derive(Clone, Copy, Debug)]
pub struct Sequences {
    /// How many.
    pub count: usize,
    /// Which rows of queries and results are theirs.
    pub tokens: *const i64,
    /// Tokens with keys and values in the pages, the new one among them.
    pub lengths: *const i64,
    /// Page numbers in order, [count, width].
    pub tables: *const i64,
    /// Entries in a row of `tables`.
    pub width: usize,
    /// A token sees that many, itself among them; 0 for all.
    pub window: usize,
}

/// Queries [tokens, heads * size] and results of the same shape, with their distances between tokens.
#[derive(Clone, Copy, Debug)]
pub struct Rows {
    /// Queries.
    pub q: *const f32,
    /// Between tokens of `q`, in numbers.
    pub q_stride: usize,
    /// Results.
    pub out: *mut f32,
    /// Between tokens of `out`, in numbers.
    pub out_stride: usize,
}

/// One chunk of one sequence with the heads that share a KV head.
#[derive(Clone, Copy)]
struct Item {
    row: usize,
    begin: usize,
    end: usize,
    kv_head: usize,
    /// Where its part goes, in heads; none where it is the whole.
    part: Option<usize>,
}

thread_local! {
    /// What a call works on, kept from one to the next.
    static SCRATCH: RefCell<(Vec<Item>, Vec<f32>)> = const { RefCell::new((Vec::new(), Vec::new())) };
}

#[derive(Clone, Copy)]
struct Call {
    sizes: Attention,
    layer: *const f32,
    sequences: Sequences,
    rows: Rows,
    parts: *mut f32,
}

// SAFETY: threads read the same and write apart.
unsafe impl Sync for Call {}

impl Attention {
    /// Attention of `heads` query heads of `size` numbers over `kv_heads` and pages of `page` tokens.
    ///
    /// # Errors
    ///
    /// The size is no multiple of 16.
    pub fn new(heads: usize, kv_heads: usize, size: usize, page: usize) -> Result<Self, AttentionError> {
        if size == 0 || !size.is_multiple_of(16) || kv_heads == 0 || !heads.is_multiple_of(kv_heads) || page == 0 {
            return Err(AttentionError { size });
        }
        Ok(Self { heads, kv_heads, size, page })
    }

    /// Numbers that a token takes in a layer's pages.
    fn token(&self) -> usize {
        2 * self.kv_heads * self.size
    }

    /// Copies the keys and values of new tokens into a layer's pages.
    ///
    /// # Safety
    ///
    /// `kv` is [count, 2 * kv heads * size] with tokens `stride` numbers apart; `places` are `count` different places
    /// of tokens in the layer, which can be written.
    pub unsafe fn store(&self, layer: *mut f32, kv: *const f32, stride: usize, places: *const i64, count: usize) {
        for i in 0..count {
            let to = layer.add(*places.add(i) as usize * self.token());
            std::ptr::copy_nonoverlapping(kv.add(i * stride), to, self.token());
        }
    }

    /// softmax(q k / sqrt(size)) v for the new token of each sequence.
    ///
    /// # Safety
    ///
    /// All addresses can be read, `rows.out` written, tables name pages of the layer, lengths are at least 1 and fit
    /// the tables.
    pub unsafe fn attend(&self, pool: &Pool, level: Level, layer: *const f32, sequences: Sequences, rows: Rows) {
        SCRATCH.with_borrow_mut(|(items, parts)| {
            items.clear();
            let mut heads = 0;
            for row in 0..sequences.count {
                let length = *sequences.lengths.add(row) as usize;
                let seen = if sequences.window == 0 { 0 } else { length.saturating_sub(sequences.window) };
                let alone = seen / CHUNK == (length - 1) / CHUNK;
                let mut begin = seen;
                while begin < length {
                    let end = length.min((begin / CHUNK + 1) * CHUNK);
                    for kv_head in 0..self.kv_heads {
                        items.push(Item { row, begin, end, kv_head, part: (!alone).then_some(heads) });
                        heads += if alone { 0 } else { self.heads / self.kv_heads };
                    }
                    begin = end;
                }
            }
            let needed = heads * (self.size + 2);
            if parts.len() < needed {
                parts.resize(needed, 0.0);
            }
            let call = Call { sizes: *self, layer, sequences, rows, parts: parts.as_mut_ptr() };
            pool.run(items.len(), &|index| {
                let call = &call;
                // SAFETY: as the caller promised; items write apart.
                unsafe { level.run(Chunk { call: *call, item: items[index] }) };
            });
            if heads > 0 {
                call.join(items);
            }
        });
    }
}

impl Call {
    fn group(&self) -> usize {
        self.sizes.heads / self.sizes.kv_heads
    }

    unsafe fn out(&self, row: usize, kv_head: usize) -> *mut f32 {
        let token = *self.sequences.tokens.add(row) as usize;
        self.rows.out.add(token * self.rows.out_stride + kv_head * self.group() * self.sizes.size)
    }

    /// Puts the parts of cut sequences together.
    unsafe fn join(&self, items: &[Item]) {
        let (group, size) = (self.group(), self.sizes.size);
        let mut at = 0;
        while at < items.len() {
            let row = items[at].row;
            let mine = items[at..].iter().take_while(|item| item.row == row).count();
            let chunks = &items[at..at + mine];
            at += mine;
            for kv_head in 0..self.sizes.kv_heads {
                for head in 0..group {
                    let parts = chunks
                        .iter()
                        .filter(|item| item.kv_head == kv_head)
                        .filter_map(|item| item.part.map(|part| self.parts.add((part + head) * (size + 2))));
                    let Some(most) = parts.clone().map(|part| *part).reduce(f32::max) else { continue };
                    let out = self.out(row, kv_head).add(head * size);
                    let mut total = 0.0;
                    for (i, part) in parts.enumerate() {
                        let weight = (*part - most).exp();
                        total += weight * *part.add(1);
                        for d in 0..size {
                            let value = weight * *part.add(2 + d);
                            *out.add(d) = if i == 0 { value } else { *out.add(d) + value };
                        }
                    }
                    for d in 0..size {
                        *out.add(d) /= total;
                    }
                }
            }
        }
    }
}

struct Chunk {
    call: Call,
    item: Item,
}

impl Task for Chunk {
    #[inline(always)]
    unsafe fn run<S: Isa>(self) {
        let (sizes, item) = (self.call.sizes, self.item);
        let count = item.end - item.begin;
        let mut keys = [std::ptr::null::<f32>(); CHUNK];
        let table = self.call.sequences.tables.add(item.row * self.call.sequences.width);
        for (i, key) in keys.iter_mut().enumerate().take(count) {
            let token = item.begin + i;
            let place = *table.add(token / sizes.page) as usize * sizes.page + token % sizes.page;
            *key = self.call.layer.add(place * sizes.token() + item.kv_head * sizes.size);
        }
        let keys = &keys[..count];
        let group = self.call.group();
        let mut head = 0;
        while head < group {
            let left = group - head;
            head += match (S::TILE, left) {
                (6.., 4..) => self.heads::<S, 4>(keys, head),
                (3.., 3..) => self.heads::<S, 3>(keys, head),
                (_, 2..) => self.heads::<S, 2>(keys, head),
                _ => self.heads::<S, 1>(keys, head),
            };
        }
    }
}

impl Chunk {
    /// `R` query heads from `head` on of those that share the KV head; returns R.
    #[inline(always)]
    unsafe fn heads<S: Isa, const R: usize>(&self, keys: &[*const f32], head: usize) -> usize {
        let (sizes, item, size) = (self.call.sizes, self.item, self.call.sizes.size);
        let token = *self.call.sequences.tokens.add(item.row) as usize;
        let first = item.kv_head * self.call.group() + head;
        let q = self.call.rows.q.add(token * self.call.rows.q_stride + first * size);
        let mut scores = [[0f32; CHUNK]; R];
        let values = sizes.kv_heads * size;
        let mut at = 0;
        while at < keys.len() {
            // Other heads lie between those of this one: the processor does not guess where it goes on.
            for key in keys.iter().skip(at + AHEAD).take(4) {
                for line in (0..size).step_by(LINE) {
                    S::prefetch(key.add(line).cast());
                    S::prefetch(key.add(values + line).cast());
                }
            }
            let last = keys.len() - 1;
            let four = [keys[at], keys[last.min(at + 1)], keys[last.min(at + 2)], keys[last.min(at + 3)]];
            // A chunk is a multiple of four long, so the scores beyond the last token have a place.
            let mut sums = [[S::zero(); 4]; R];
            tile::<S, R>(&mut sums, q, size, four, size);
            for (row, four) in scores.iter_mut().zip(sums) {
                row[at..at + 4].copy_from_slice(&S::sums(four));
            }
            at += 4;
        }
        let (mut most, mut sum) = ([0f32; R], [0f32; R]);
        for (i, row) in scores.iter_mut().enumerate() {
            (most[i], sum[i]) = soften::<S>(row, keys.len(), 1.0 / (size as f32).sqrt());
        }
        let to: [*mut f32; R] = std::array::from_fn(|i| match item.part {
            Some(part) => self.call.parts.add((part + head + i) * (size + 2) + 2),
            None => self.call.out(item.row, item.kv_head).add((head + i) * size),
        });
        let scale = sum.map(|sum| if item.part.is_some() { 1.0 } else { 1.0 / sum });
        let mut d = 0;
        while d + 4 * S::LANES <= size {
            weigh::<S, R, 4>(&scores, keys, values + d, to.map(|to| to.add(d)), scale);
            d += 4 * S::LANES;
        }
        while d < size {
            weigh::<S, R, 1>(&scores, keys, values + d, to.map(|to| to.add(d)), scale);
            d += S::LANES;
        }
        if item.part.is_some() {
            for i in 0..R {
                to[i].sub(2).write(most[i]);
                to[i].sub(1).write(sum[i]);
            }
        }
        R
    }
}

/// Turns `count` products into weights e^(scale * product - maximum); returns maximum and sum.
#[inline(always)]
unsafe fn soften<S: Isa>(row: &mut [f32; CHUNK], count: usize, scale: f32) -> (f32, f32) {
    let padded = count.next_multiple_of(S::LANES);
    // The padding repeats a real product, so that it changes no maximum.
    let first = row[0];
    row[count..padded].fill(first);
    let mut most = S::load(row.as_ptr());
    let mut i = S::LANES;
    while i < padded {
        most = S::max(most, S::load(row.as_ptr().add(i)));
        i += S::LANES;
    }
    let most = S::largest(most) * scale;
    let (scales, less) = (S::splat(scale), S::splat(-most));
    i = 0;
    while i < padded {
        let to = row.as_mut_ptr().add(i);
        S::store(to, S::exp(S::fma(S::load(to), scales, less)));
        i += S::LANES;
    }
    row[count..padded].fill(0.0);
    let mut sum = S::zero();
    i = 0;
    while i < padded {
        sum = S::add(sum, S::load(row.as_ptr().add(i)));
        i += S::LANES;
    }
    (most, S::sum(sum))
}

/// Sums of values by weight, `D` registers of them from `offset` behind the keys on, times `scale`.
#[inline(always)]
unsafe fn weigh<S: Isa, const R: usize, const D: usize>(
    weights: &[[f32; CHUNK]; R],
    keys: &[*const f32],
    offset: usize,
    to: [*mut f32; R],
    scale: [f32; R],
) {
    let mut acc = [[S::zero(); D]; R];
    for (i, key) in keys.iter().enumerate() {
        let from = key.add(offset);
        let values: [S::V; D] = std::array::from_fn(|j| S::load(from.add(j * S::LANES)));
        for (row, weights) in acc.iter_mut().zip(weights) {
            let weight = S::splat(*weights.get_unchecked(i));
            for (sum, value) in row.iter_mut().zip(values) {
                *sum = S::fma(weight, value, *sum);
            }
        }
    }
    for ((row, to), scale) in acc.into_iter().zip(to).zip(scale) {
        for (j, sum) in row.into_iter().enumerate() {
            S::store(to.add(j * S::LANES), S::mul(sum, S::splat(scale)));
        }
    }
}
