//! Attention of new tokens over keys and values in pages, read where they are.
//!
//! A sequence is cut into chunks at fixed places; each chunk gives a maximum, a sum and a weighted sum, which are put
//! together in order. So a token's result is the same to the last bit whether it is computed alone or with others of
//! its sequence, and by however many threads.

mod chunk;

use std::cell::RefCell;
use std::ops::Range;

use crate::isa::Level;
use crate::pool::Pool;
use chunk::Chunks;

/// Tokens of a chunk.
const CHUNK: usize = 256;
/// New tokens of a sequence that go through its keys and values together.
const BLOCK: usize = 8;
/// New tokens whose keys and values are worth another thread to store.
const STORED: usize = 64;

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
    /// The first of their rows among queries and results; a sequence's rows lie side by side.
    pub firsts: *const i64,
    /// Their rows: new tokens, at least 1.
    pub counts: *const i64,
    /// Tokens with keys and values in the pages, the new ones at their end.
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

/// Some new tokens of one sequence, with the heads that share a KV head, and chunks that they see.
#[derive(Clone, Debug)]
struct Item {
    sequence: usize,
    kv_head: usize,
    /// Which of the sequence's new tokens.
    tokens: Range<usize>,
    chunks: Range<usize>,
    /// Where its part goes, in heads, if the token sees more than this chunk.
    part: Option<usize>,
}

/// A sequence whose one new token is computed by several items.
struct Cut {
    sequence: usize,
    /// The first of its parts, in heads: [chunks, heads].
    part: usize,
    chunks: usize,
}

/// What a call works on.
#[derive(Default)]
struct Work {
    items: Vec<Item>,
    cuts: Vec<Cut>,
    parts: Vec<f32>,
}

thread_local! {
    /// Kept from one call to the next.
    static WORK: RefCell<Work> = RefCell::default();
    /// What an item needs for itself.
    static SCRATCH: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
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

/// New keys and values, see [`Attention::store`].
#[derive(Clone, Copy)]
struct Fresh(*mut f32, *const f32, *const i64);

// SAFETY: as above.
unsafe impl Sync for Fresh {}

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

    /// Query heads, KV heads and their size.
    #[must_use]
    pub fn heads(&self) -> (usize, usize, usize) {
        (self.heads, self.kv_heads, self.size)
    }

    /// Numbers that a token takes in a layer's pages.
    fn token(&self) -> usize {
        2 * self.kv_heads * self.size
    }

    /// Numbers of a part: maximum, sum, and sums of values.
    fn part(&self) -> usize {
        self.size + 2
    }

    /// Copies the keys and values of new tokens into a layer's pages.
    ///
    /// # Safety
    ///
    /// `kv` is [count, 2 * kv heads * size] with tokens `stride` numbers apart; `places` are `count` different places
    /// of tokens in the layer, which can be written.
    pub unsafe fn store(
        &self,
        pool: &Pool,
        layer: *mut f32,
        (kv, stride): (*const f32, usize),
        places: *const i64,
        count: usize,
    ) {
        let fresh = Fresh(layer, kv, places);
        pool.run(count.div_ceil(STORED), &|piece| {
            // By reference, so that the closure captures the whole, which can be shared, and not its pointers.
            let &Fresh(layer, kv, places) = &fresh;
            for i in piece * STORED..count.min((piece + 1) * STORED) {
                // SAFETY: as the caller promised; places are different.
                unsafe {
                    let to = layer.add(*places.add(i) as usize * self.token());
                    std::ptr::copy_nonoverlapping(kv.add(i * stride), to, self.token());
                }
            }
        });
    }

    /// softmax(q k / sqrt(size)) v for the new tokens of each sequence, which see each other in their order.
    ///
    /// # Safety
    ///
    /// All addresses can be read, `rows.out` written, tables name pages of the layer, counts are at least 1, lengths
    /// at least as large and fit the tables.
    pub unsafe fn attend(&self, pool: &Pool, level: Level, layer: *const f32, sequences: Sequences, rows: Rows) {
        WORK.with_borrow_mut(|Work { items, cuts, parts }| {
            let call = Call { sizes: *self, layer, sequences, rows, parts: std::ptr::null_mut() };
            let heads = call.share_out(items, cuts);
            let needed = heads * self.part();
            if parts.len() < needed {
                parts.resize(needed, 0.0);
            }
            let call = Call { parts: parts.as_mut_ptr(), ..call };
            pool.run(items.len(), &|index| {
                let (call, item) = (&call, &items[index]);
                SCRATCH.with_borrow_mut(|scratch| {
                    let needed = Chunks::scratch(self, item);
                    if scratch.len() < needed {
                        scratch.resize(needed, 0.0);
                    }
                    // SAFETY: as the caller promised; items write apart.
                    unsafe { level.run(Chunks { call, item, scratch: scratch.as_mut_ptr() }) };
                });
            });
            for cut in cuts {
                let part = |chunk: usize, head| call.parts.add((cut.part + chunk * self.heads + head) * self.part());
                for head in 0..self.heads {
                    let parts = (0..cut.chunks).map(|chunk| part(chunk, head).cast_const());
                    join(parts, call.out(cut.sequence, 0, 0).add(head * self.size), self.size);
                }
            }
        });
    }
}

impl Call {
    /// Query heads that share a KV head.
    fn group(&self) -> usize {
        self.sizes.heads / self.sizes.kv_heads
    }

    /// The tokens of its sequence that a new token sees.
    unsafe fn seen(&self, sequence: usize, token: usize) -> Range<usize> {
        let (length, count) = (*self.sequences.lengths.add(sequence), *self.sequences.counts.add(sequence));
        let end = (length - count) as usize + token + 1;
        if self.sequences.window == 0 { 0..end } else { end.saturating_sub(self.sequences.window)..end }
    }

    unsafe fn query(&self, sequence: usize, token: usize, kv_head: usize) -> *const f32 {
        let row = *self.sequences.firsts.add(sequence) as usize + token;
        self.rows.q.add(row * self.rows.q_stride + kv_head * self.group() * self.sizes.size)
    }

    unsafe fn out(&self, sequence: usize, token: usize, kv_head: usize) -> *mut f32 {
        let row = *self.sequences.firsts.add(sequence) as usize + token;
        self.rows.out.add(row * self.rows.out_stride + kv_head * self.group() * self.sizes.size)
    }

    /// Makes the items of a call; returns how many parts of heads they leave. Of several new tokens there are enough
    /// items for all threads; the chunks of a single one are items of their own, so that they share a long sequence.
    unsafe fn share_out(&self, items: &mut Vec<Item>, cuts: &mut Vec<Cut>) -> usize {
        items.clear();
        cuts.clear();
        let mut parts = 0;
        for sequence in 0..self.sequences.count {
            let count = *self.sequences.counts.add(sequence) as usize;
            for first in (0..count).step_by(BLOCK) {
                let tokens = first..count.min(first + BLOCK);
                let (begin, end) = (self.seen(sequence, first).start, self.seen(sequence, tokens.end - 1).end);
                let chunks = begin / CHUNK..(end - 1) / CHUNK + 1;
                if count > 1 || chunks.len() == 1 {
                    items.extend((0..self.sizes.kv_heads).map(|kv_head| Item {
                        sequence,
                        kv_head,
                        tokens: tokens.clone(),
                        chunks: chunks.clone(),
                        part: None,
                    }));
                    continue;
                }
                cuts.push(Cut { sequence, part: parts, chunks: chunks.len() });
                for chunk in chunks {
                    for kv_head in 0..self.sizes.kv_heads {
                        let part = Some(parts + kv_head * self.group());
                        items.push(Item { sequence, kv_head, tokens: 0..1, chunks: chunk..chunk + 1, part });
                    }
                    parts += self.sizes.heads;
                }
            }
        }
        parts
    }
}

/// Puts the parts of one token's head together.
///
/// # Safety
///
/// The parts can be read, `size` numbers at `out` written.
unsafe fn join(parts: impl Iterator<Item = *const f32> + Clone, out: *mut f32, size: usize) {
    // A sum of nothing is that of a chunk in which this token sees none.
    let parts = parts.filter(|part| *part.add(1) != 0.0);
    let most = parts.clone().map(|part| *part).fold(f32::NEG_INFINITY, f32::max);
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
