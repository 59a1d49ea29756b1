//! Products of activations with a matrix that stays as it is stored.

use std::cell::RefCell;
use std::marker::PhantomData;
use std::ops::Range;

use crate::blocks::{Blocks, Format, Use};
use crate::isa::{Isa, Level, Task};
use crate::pool::Pool;

/// Columns of a tile: as many as [`Isa::sums`] adds up at once.
const COLUMNS: usize = 4;
/// Matrix rows of a piece of work where each is used once; small enough to share a layer evenly.
const ROWS_ONCE: usize = 32;
/// Matrix rows that are unpacked at once where each is used several times.
const ROWS_UNPACKED: usize = 32;
/// Weights of a row that lie side by side when it is unpacked: with [`COLUMNS_NEAR`] rows of these, the sums that they
/// go into and a tile's activations, the first cache is full.
const NEAR: usize = 512;
/// A rest that is shorter than this is no piece of its own: it would not pay for keeping the sums.
const REST: usize = NEAR / 4;
/// Unpacked rows whose nearest weights stay in the first cache while [`ROWS_NEAR`] rows of activations pass.
const COLUMNS_NEAR: usize = 8;
/// Rows of activations whose lane sums are kept while the weights pass; a multiple of every tile.
const ROWS_NEAR: usize = 12;

/// A matrix that can't be.
#[derive(Debug, PartialEq, Eq)]
pub enum MatrixError {
    /// The width is not a multiple of the format's block.
    Width {
        /// The format.
        format: Format,
        /// What was asked for.
        width: usize,
    },
}

impl std::fmt::Display for MatrixError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Width { format, width } => {
                write!(f, "a row of {width} weights is no multiple of the {} of {}", format.weights(), format.name())
            }
        }
    }
}

impl std::error::Error for MatrixError {}

/// Weights [rows, width] in memory of somebody else, and y = x @ weights.T + bias.
#[derive(Clone, Copy, Debug)]
pub struct Matrix {
    format: Format,
    weights: *const u8,
    bias: *const f32,
    rows: usize,
    width: usize,
}

// SAFETY: it only reads what its maker promised to leave alone.
unsafe impl Send for Matrix {}
// SAFETY: as above.
unsafe impl Sync for Matrix {}

impl Matrix {
    /// A matrix of `rows` rows in one piece.
    ///
    /// # Errors
    ///
    /// The width does not fit the format.
    ///
    /// # Safety
    ///
    /// `rows` rows of [`Format::row_bytes`] can be read at `weights`, and `rows` numbers at `bias` unless it is null,
    /// unchanged for as long as this is used.
    pub unsafe fn new(
        format: Format,
        weights: *const u8,
        bias: *const f32,
        rows: usize,
        width: usize,
    ) -> Result<Self, MatrixError> {
        if !width.is_multiple_of(format.weights()) {
            return Err(MatrixError::Width { format, width });
        }
        Ok(Self { format, weights, bias, rows, width })
    }

    /// y[i, j] = sum over k of x[i, k] * weights[j, k], plus bias[j]. A row of y depends on nothing but its row of x.
    ///
    /// # Safety
    ///
    /// x is [count, width] and can be read, y is [count, rows] with rows `stride` numbers apart and can be written,
    /// and nobody else uses y.
    pub unsafe fn apply(&self, pool: &Pool, level: Level, x: *const f32, y: *mut f32, count: usize, stride: usize) {
        let piece = if count == 1 { ROWS_ONCE } else { ROWS_UNPACKED };
        let call = Call { matrix: *self, x, y, count, stride };
        pool.run(self.rows.div_ceil(piece), &|index| {
            // By reference, so that the closure captures the whole of `call`, which can be shared, and not its pointers.
            let call = &call;
            let rows = index * piece..self.rows.min((index + 1) * piece);
            if call.count == 1 {
                self.format.with(Once { call: *call, rows, level });
                return;
            }
            UNPACKED.with_borrow_mut(|buffer| {
                let needed = ROWS_UNPACKED * self.width;
                if buffer.len() < needed {
                    buffer.resize(needed, 0.0);
                }
                self.format.with(Unpack { matrix: *self, rows: rows.clone(), to: buffer.as_mut_ptr(), level });
                // SAFETY: as the caller promised; pieces don't overlap.
                unsafe { level.run(Tiles { call: *call, rows, unpacked: buffer.as_ptr() }) };
            });
        });
    }

    /// Outputs and inputs.
    #[must_use]
    pub fn shape(&self) -> (usize, usize) {
        (self.rows, self.width)
    }

    unsafe fn row<B: Blocks>(&self, row: usize) -> *const u8 {
        self.weights.add(row * (self.width / B::WEIGHTS) * B::BYTES)
    }
}

thread_local! {
    /// Unpacked rows. It stays: a new one for each piece would go to the system and back.
    static UNPACKED: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

#[derive(Clone, Copy)]
struct Call {
    matrix: Matrix,
    x: *const f32,
    y: *mut f32,
    count: usize,
    stride: usize,
}

// SAFETY: threads read the same and write apart.
unsafe impl Sync for Call {}

impl Call {
    /// Writes results of one row of x and some rows of the matrix.
    #[inline(always)]
    unsafe fn put(&self, x_row: usize, row: usize, sums: &[f32]) {
        let (bias, to) = (self.matrix.bias, self.y.add(x_row * self.stride + row));
        for (i, sum) in sums.iter().enumerate() {
            to.add(i).write(if bias.is_null() { *sum } else { sum + *bias.add(row + i) });
        }
    }
}

/// Some rows of the matrix with one row of x: the weights go from memory into registers and nowhere else.
struct Once {
    call: Call,
    rows: Range<usize>,
    level: Level,
}

impl Use for Once {
    type Out = ();
    fn with<B: Blocks>(self) {
        // SAFETY: whoever called `apply` promised what this needs, and chose a level of this processor.
        unsafe { self.level.run(OnceOf::<B>(self.call, self.rows, PhantomData)) };
    }
}

struct OnceOf<B>(Call, Range<usize>, PhantomData<B>);

impl<B: Blocks> Task for OnceOf<B> {
    #[inline(always)]
    unsafe fn run<S: Isa>(self) {
        let Self(call, rows, _) = self;
        for row in rows.clone().step_by(COLUMNS) {
            let count = COLUMNS.min(rows.end - row);
            let four: [*const u8; COLUMNS] = std::array::from_fn(|i| call.matrix.row::<B>(row + i.min(count - 1)));
            let sums = S::sums(dots::<S, B>(four, call.x, call.matrix.width / B::WEIGHTS));
            call.put(0, row, &sums[..count]);
        }
    }
}

/// Some rows of the matrix as float32: first the [`near`] first weights of [`ROWS_UNPACKED`] rows, one row behind the
/// other, then the next of all of them. So what is used together lies together, whatever the width.
struct Unpack {
    matrix: Matrix,
    rows: Range<usize>,
    to: *mut f32,
    level: Level,
}

/// How many weights of a row of `width` lie side by side from `begin` on.
#[inline(always)]
fn near(begin: usize, width: usize) -> usize {
    let left = width - begin;
    if left < NEAR + REST { left } else { NEAR }
}

impl Use for Unpack {
    type Out = ();
    fn with<B: Blocks>(self) {
        // SAFETY: as in `Once`; the buffer has room for these rows.
        unsafe { self.level.run(UnpackOf::<B>(self.matrix, self.rows, self.to, PhantomData)) };
    }
}

struct UnpackOf<B>(Matrix, Range<usize>, *mut f32, PhantomData<B>);

impl<B: Blocks> Task for UnpackOf<B> {
    #[inline(always)]
    unsafe fn run<S: Isa>(self) {
        let Self(matrix, rows, to, _) = self;
        for row in rows.clone() {
            let stored = matrix.row::<B>(row);
            let mut begin = 0;
            while begin < matrix.width {
                let near = near(begin, matrix.width);
                let mut to = to.add(begin * ROWS_UNPACKED + (row - rows.start) * near);
                for at in (begin..begin + near).step_by(32) {
                    let block = stored.add(at / B::WEIGHTS * B::BYTES);
                    let weights = B::part::<S>(block, at % B::WEIGHTS / 32);
                    for lanes in weights.into_iter().take(32 / S::LANES) {
                        S::store(to, lanes);
                        to = to.add(S::LANES);
                    }
                }
                begin += near;
            }
        }
    }
}

/// Unpacked rows of the matrix with all rows of x.
struct Tiles {
    call: Call,
    rows: Range<usize>,
    unpacked: *const f32,
}

impl Task for Tiles {
    #[inline(always)]
    unsafe fn run<S: Isa>(self) {
        // Lane sums that wait for the next weights.
        let mut sums = [[S::zero(); COLUMNS_NEAR]; ROWS_NEAR];
        for first in (0..self.call.count).step_by(ROWS_NEAR) {
            let end = self.call.count.min(first + ROWS_NEAR);
            for column in (0..self.rows.len()).step_by(COLUMNS_NEAR) {
                let mut begin = 0;
                while begin < self.call.matrix.width {
                    let mut at = first;
                    while at < end {
                        let sums = sums.as_mut_ptr().add(at - first);
                        at += match (S::TILE, end - at) {
                            (6.., 6..) => self.row_of_tiles::<S, 6>(at, column, begin, sums),
                            (6.., 5) => self.row_of_tiles::<S, 5>(at, column, begin, sums),
                            (4.., 4..) => self.row_of_tiles::<S, 4>(at, column, begin, sums),
                            (3.., 3 | 5..) => self.row_of_tiles::<S, 3>(at, column, begin, sums),
                            // Two and two: a single row has too few sums to keep the processor busy.
                            (_, 2..) => self.row_of_tiles::<S, 2>(at, column, begin, sums),
                            _ => self.row_of_tiles::<S, 1>(at, column, begin, sums),
                        };
                    }
                    begin += near(begin, self.call.matrix.width);
                }
            }
        }
    }
}

impl Tiles {
    /// `R` rows of x from row `at` on with the weights from `begin` on of columns from `column` on; returns R.
    ///
    /// `sums` are those rows' lane sums. Each goes through all weights in their order, so where they are cut, and who
    /// else is computed, changes nothing.
    #[inline(always)]
    unsafe fn row_of_tiles<S: Isa, const R: usize>(
        &self,
        at: usize,
        column: usize,
        begin: usize,
        sums: *mut [S::V; COLUMNS_NEAR],
    ) -> usize {
        let width = self.call.matrix.width;
        let near = near(begin, width);
        let x = self.call.x.add(at * width + begin);
        let weights = self.unpacked.add(begin * ROWS_UNPACKED);
        for column in (column..self.rows.len().min(column + COLUMNS_NEAR)).step_by(COLUMNS) {
            let place = column % COLUMNS_NEAR;
            let mut acc = [[S::zero(); COLUMNS]; R];
            if begin > 0 {
                for (i, four) in acc.iter_mut().enumerate() {
                    *four = std::array::from_fn(|j| (*sums.add(i))[place + j]);
                }
            }
            let w = weights.add(column * near);
            if near == NEAR {
                // With distances that the compiler knows one address is enough.
                tile::<S, R>(&mut acc, x, width, [w, w.add(NEAR), w.add(2 * NEAR), w.add(3 * NEAR)], NEAR);
            } else {
                tile::<S, R>(&mut acc, x, width, [w, w.add(near), w.add(2 * near), w.add(3 * near)], near);
            }
            if begin + near < width {
                for (i, four) in acc.into_iter().enumerate() {
                    (&mut (*sums.add(i)))[place..place + COLUMNS].copy_from_slice(&four);
                }
                continue;
            }
            let (row, count) = (self.rows.start + column, COLUMNS.min(self.rows.len() - column));
            for (i, four) in acc.into_iter().enumerate() {
                self.call.put(at + i, row, &S::sums(four)[..count]);
            }
        }
        R
    }
}

/// Lane sums of four stored rows with one row of x, in the order of [`tile`].
#[inline(always)]
unsafe fn dots<S: Isa, B: Blocks>(rows: [*const u8; COLUMNS], x: *const f32, blocks: usize) -> [S::V; COLUMNS] {
    let mut acc = [S::zero(); COLUMNS];
    // Four rows side by side are no pattern that the processor sees through by itself.
    let ahead = COLUMNS * blocks * B::BYTES;
    for block in 0..blocks {
        for row in rows {
            S::prefetch(row.wrapping_add(block * B::BYTES + ahead));
        }
        for part in 0..B::WEIGHTS / 32 {
            let x = x.add(block * B::WEIGHTS + part * 32);
            for (acc, row) in acc.iter_mut().zip(rows) {
                let weights = B::part::<S>(row.add(block * B::BYTES), part);
                for (i, lanes) in weights.into_iter().enumerate().take(32 / S::LANES) {
                    *acc = S::fma(lanes, S::load(x.add(i * S::LANES)), *acc);
                }
            }
        }
    }
    acc
}

/// Adds to the lane sums of `R` rows at x with four others, `width` numbers each, a multiple of the lanes.
///
/// # Safety
///
/// All of that can be read, rows of x `stride` numbers apart.
#[inline(always)]
pub(crate) unsafe fn tile<S: Isa, const R: usize>(
    sums: &mut [[S::V; COLUMNS]; R],
    x: *const f32,
    stride: usize,
    others: [*const f32; COLUMNS],
    width: usize,
) {
    // A copy, that it may live in registers.
    let mut acc = *sums;
    for k in (0..width).step_by(S::LANES) {
        let rows: [S::V; R] = std::array::from_fn(|i| S::load(x.add(i * stride + k)));
        for (j, other) in others.into_iter().enumerate() {
            let weights = S::load(other.add(k));
            for (row, x) in acc.iter_mut().zip(rows) {
                row[j] = S::fma(weights, x, row[j]);
            }
        }
    }
    *sums = acc;
}
