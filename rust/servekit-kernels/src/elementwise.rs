//! What lies between the products: norm, rotary positions, gate.

use crate::isa::{Isa, Level, Task};
use crate::pool::Pool;

/// Numbers in a piece of work; fewer are not worth another thread.
const PIECE: usize = 1 << 14;

/// Rows of a piece.
fn rows_a_piece(width: usize) -> usize {
    PIECE.div_ceil(width.max(1))
}

/// Cuts rows into pieces and does a task, made for a range of rows, with each.
unsafe fn over_rows<T: Task>(
    pool: &Pool,
    level: Level,
    rows: usize,
    width: usize,
    task: impl Fn(usize, usize) -> T + Sync,
) {
    let each = rows_a_piece(width);
    pool.run(rows.div_ceil(each), &|piece| {
        let first = piece * each;
        // SAFETY: as the caller promised; pieces don't overlap.
        unsafe { level.run(task(first, rows.min(first + each))) };
    });
}

/// Addresses that threads share: they read the same and write apart.
#[derive(Clone, Copy)]
struct Shared<T>(T);

// SAFETY: see above; each use keeps to its own rows.
unsafe impl<T> Sync for Shared<T> {}

/// y = x / sqrt(mean(x^2) + eps) * weight for each row (https://arxiv.org/abs/1910.07467).
///
/// # Safety
///
/// x and y are [rows, width], weight is [width]; y may be x.
pub unsafe fn rms_norm(
    pool: &Pool,
    level: Level,
    (x, y): (*const f32, *mut f32),
    weight: *const f32,
    eps: f32,
    (rows, width): (usize, usize),
) {
    let to = Shared((x, y, weight));
    over_rows(pool, level, rows, width, move |first, last| {
        let to = to;
        let (x, y, weight) = to.0;
        // SAFETY: rows of the caller's.
        let (x, y) = unsafe { (x.add(first * width), y.add(first * width)) };
        Norm { x, y, weight, eps, rows: last - first, width }
    });
}

struct Norm {
    x: *const f32,
    y: *mut f32,
    weight: *const f32,
    eps: f32,
    rows: usize,
    width: usize,
}

impl Task for Norm {
    #[inline(always)]
    unsafe fn run<S: Isa>(self) {
        let whole = self.width - self.width % S::LANES;
        for row in 0..self.rows {
            let (x, y) = (self.x.add(row * self.width), self.y.add(row * self.width));
            let mut acc = [S::zero(); 4];
            let mut i = 0;
            while i + 4 * S::LANES <= whole {
                for (j, sum) in acc.iter_mut().enumerate() {
                    let v = S::load(x.add(i + j * S::LANES));
                    *sum = S::fma(v, v, *sum);
                }
                i += 4 * S::LANES;
            }
            while i < whole {
                let v = S::load(x.add(i));
                acc[0] = S::fma(v, v, acc[0]);
                i += S::LANES;
            }
            let [a, b, c, d] = S::sums(acc);
            let mut sum = (a + b) + (c + d);
            for i in whole..self.width {
                sum += *x.add(i) * *x.add(i);
            }
            let scale = 1.0 / (sum / self.width as f32 + self.eps).sqrt();
            let scales = S::splat(scale);
            i = 0;
            while i < whole {
                S::store(y.add(i), S::mul(S::mul(S::load(x.add(i)), scales), S::load(self.weight.add(i))));
                i += S::LANES;
            }
            for i in whole..self.width {
                *y.add(i) = *x.add(i) * scale * *self.weight.add(i);
            }
        }
    }
}

/// The same for each head of tokens, in place.
///
/// # Safety
///
/// x is [tokens, heads, size] with tokens `stride` numbers apart, weight is [size].
pub unsafe fn norm_heads(
    pool: &Pool,
    level: Level,
    (x, stride): (*mut f32, usize),
    weight: *const f32,
    eps: f32,
    (tokens, heads, size): (usize, usize, usize),
) {
    let to = Shared((x, weight));
    over_rows(pool, level, tokens, heads * size, move |first, last| {
        let to = to;
        let (x, weight) = to.0;
        // SAFETY: tokens of the caller's.
        let x = unsafe { x.add(first * stride) };
        HeadNorm { x, stride, weight, eps, tokens: last - first, heads, size }
    });
}

struct HeadNorm {
    x: *mut f32,
    stride: usize,
    weight: *const f32,
    eps: f32,
    tokens: usize,
    heads: usize,
    size: usize,
}

impl Task for HeadNorm {
    #[inline(always)]
    unsafe fn run<S: Isa>(self) {
        let Self { weight, eps, heads, size, .. } = self;
        for token in 0..self.tokens {
            let x = self.x.add(token * self.stride);
            Norm { x, y: x, weight, eps, rows: heads, width: size }.run::<S>();
        }
    }
}

/// x += y, `count` numbers each.
///
/// # Safety
///
/// Both can be read and x written; they are apart.
pub unsafe fn add(pool: &Pool, level: Level, x: *mut f32, y: *const f32, count: usize) {
    let to = Shared((x, y));
    over_rows(pool, level, count.div_ceil(PIECE), PIECE, move |first, last| {
        let to = to;
        let (x, y) = to.0;
        let (begin, end) = (first * PIECE, count.min(last * PIECE));
        // SAFETY: numbers of the caller's.
        unsafe { Sum { x: x.add(begin), y: y.add(begin), count: end - begin } }
    });
}

struct Sum {
    x: *mut f32,
    y: *const f32,
    count: usize,
}

impl Task for Sum {
    #[inline(always)]
    unsafe fn run<S: Isa>(self) {
        let whole = self.count - self.count % S::LANES;
        let mut i = 0;
        while i < whole {
            S::store(self.x.add(i), S::add(S::load(self.x.add(i)), S::load(self.y.add(i))));
            i += S::LANES;
        }
        for i in whole..self.count {
            *self.x.add(i) += *self.y.add(i);
        }
    }
}

/// Rotates the halves of each head against each other, in place (https://arxiv.org/abs/2104.09864).
///
/// # Safety
///
/// x is [tokens, heads, size] with tokens `stride` numbers apart; cos and sin are [tokens, size], whose second half
/// repeats the first of cos and is the negative of the first of sin. The size is even.
pub unsafe fn rotate(
    pool: &Pool,
    level: Level,
    (x, stride): (*mut f32, usize),
    (cos, sin): (*const f32, *const f32),
    (tokens, heads, size): (usize, usize, usize),
) {
    let to = Shared((x, cos, sin));
    over_rows(pool, level, tokens, heads * size, move |first, last| {
        let to = to;
        let (x, cos, sin) = to.0;
        // SAFETY: tokens of the caller's.
        let (x, cos, sin) = unsafe { (x.add(first * stride), cos.add(first * size), sin.add(first * size)) };
        Rotation { x, stride, cos, sin, tokens: last - first, heads, size }
    });
}

struct Rotation {
    x: *mut f32,
    stride: usize,
    cos: *const f32,
    sin: *const f32,
    tokens: usize,
    heads: usize,
    size: usize,
}

impl Task for Rotation {
    #[inline(always)]
    unsafe fn run<S: Isa>(self) {
        let half = self.size / 2;
        let whole = half - half % S::LANES;
        for token in 0..self.tokens {
            let cos = self.cos.add(token * self.size);
            // The second half holds the sine itself.
            let sin = self.sin.add(token * self.size + half);
            for head in 0..self.heads {
                let low = self.x.add(token * self.stride + head * self.size);
                let high = low.add(half);
                let mut i = 0;
                while i < whole {
                    let (c, s) = (S::load(cos.add(i)), S::load(sin.add(i)));
                    let (a, b) = (S::load(low.add(i)), S::load(high.add(i)));
                    S::store(low.add(i), S::sub(S::mul(a, c), S::mul(b, s)));
                    S::store(high.add(i), S::fma(a, s, S::mul(b, c)));
                    i += S::LANES;
                }
                for i in whole..half {
                    let (c, s, a, b) = (*cos.add(i), *sin.add(i), *low.add(i), *high.add(i));
                    *low.add(i) = a * c - b * s;
                    *high.add(i) = b * c + a * s;
                }
            }
        }
    }
}

/// y = gate / (1 + e^-gate) * up (https://arxiv.org/abs/2002.05202).
///
/// # Safety
///
/// x is [rows, 2 * width], gates before ups; y is [rows, width] and apart from x.
pub unsafe fn silu_mul(pool: &Pool, level: Level, x: *const f32, y: *mut f32, (rows, width): (usize, usize)) {
    let to = Shared((x, y));
    over_rows(pool, level, rows, width, move |first, last| {
        let to = to;
        let (x, y) = to.0;
        // SAFETY: rows of the caller's.
        let (x, y) = unsafe { (x.add(first * 2 * width), y.add(first * width)) };
        Gate { x, y, rows: last - first, width }
    });
}

struct Gate {
    x: *const f32,
    y: *mut f32,
    rows: usize,
    width: usize,
}

impl Task for Gate {
    #[inline(always)]
    unsafe fn run<S: Isa>(self) {
        let whole = self.width - self.width % S::LANES;
        for row in 0..self.rows {
            let gate = self.x.add(row * 2 * self.width);
            let (up, y) = (gate.add(self.width), self.y.add(row * self.width));
            let mut i = 0;
            while i < whole {
                let g = S::load(gate.add(i));
                let below = S::add(S::exp(S::sub(S::zero(), g)), S::splat(1.0));
                S::store(y.add(i), S::mul(S::div(g, below), S::load(up.add(i))));
                i += S::LANES;
            }
            for i in whole..self.width {
                let g = *gate.add(i);
                *y.add(i) = g / (1.0 + (-g).exp()) * *up.add(i);
            }
        }
    }
}
