//! Products of activations with a matrix that stays as it is stored.
//!
//! Every sum has one order: lane l of a register adds up the products of k = l, l + LANES, and so on, and
//! [`Isa::sums`] adds the lanes. A row alone (here) and a few rows (`tiles`) are computed in just that way; with many
//! rows (`panels`) a register holds one lane of many rows' sums, and the lanes come one after the other.

use std::cell::RefCell;
use std::marker::PhantomData;
use std::ops::Range;

use crate::blocks::{Blocks, Format, Use};
use crate::isa::{Isa, Level, Task};
use crate::pool::Pool;

mod panels;
mod tiles;

use panels::{Pack, Panels, WIDE};
pub(crate) use tiles::tile;
use tiles::{Tiles, Unpack};

/// Columns of a tile: as many as [`Isa::sums`] adds up at once.
const COLUMNS: usize = 4;
/// Matrix rows of a piece of work where each is used once, least and most: what a thread reads in one go comes faster
/// from memory than many small pieces, as long as a layer is shared evenly.
const ROWS_ONCE: (usize, usize) = (32, 256);
/// Matrix rows that are unpacked at once where each is used several times.
const ROWS_UNPACKED: usize = 48;
/// The same in numbers, which stay in the second cache beside a panel.
const UNPACKED_NUMBERS: usize = 1 << 16;

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
        let call = Call { matrix: *self, x, y, count, stride };
        if count == 1 {
            let piece = self.rows.div_ceil(4 * pool.threads()).clamp(ROWS_ONCE.0, ROWS_ONCE.1);
            let piece = piece.next_multiple_of(COLUMNS);
            pool.run(self.rows.div_ceil(piece), &|index| {
                // By reference, so that the closure captures the whole of `call`, which can be shared, and not its
                // pointers.
                let call = &call;
                let rows = index * piece..self.rows.min((index + 1) * piece);
                self.format.with(Once { call: *call, rows, level });
            });
            return;
        }
        PACKED.with_borrow_mut(|packed| {
            let wide = WIDE * level.lanes();
            // A panel that is nearly full costs less than tiles.
            let panels = (count + wide / 4 - 1) / wide;
            let needed = panels * wide * self.width;
            if packed.len() < needed {
                packed.resize(needed, 0.0);
            }
            let packed = Packed(packed.as_mut_ptr());
            pool.run(panels, &|panel| {
                let (call, packed) = (&call, &packed);
                // SAFETY: as the caller promised; panels lie side by side.
                unsafe { level.run(Pack { call: *call, panel, to: packed.0.add(panel * wide * self.width) }) };
            });
            let piece = self.piece(pool.threads());
            pool.run(self.rows.div_ceil(piece), &|index| {
                let (call, packed) = (&call, &packed);
                let rows = index * piece..self.rows.min((index + 1) * piece);
                UNPACKED.with_borrow_mut(|buffer| {
                    let needed = piece * self.width;
                    if buffer.len() < needed {
                        buffer.resize(needed, 0.0);
                    }
                    self.format.with(Unpack { matrix: *self, rows: rows.clone(), to: buffer.as_mut_ptr(), level });
                    let unpacked = buffer.as_ptr();
                    let first = count.min(panels * wide);
                    // SAFETY: as the caller promised; pieces don't overlap.
                    unsafe {
                        level.run(Panels { call: *call, packed: packed.0, panels, rows: rows.clone(), unpacked });
                        level.run(Tiles { call: *call, first, rows, unpacked });
                    }
                });
            });
        });
    }

    /// Rows that are unpacked at once, where several threads share them.
    fn piece(&self, threads: usize) -> usize {
        let fit = (UNPACKED_NUMBERS / self.width.max(1)).min(ROWS_UNPACKED).min(self.rows.div_ceil(4 * threads));
        fit.next_multiple_of(panels::COLUMNS)
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
    /// Panels of activations, likewise.
    static PACKED: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// Where panels are.
struct Packed(*mut f32);

// SAFETY: threads write apart, then read the same.
unsafe impl Sync for Packed {}

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
            // Two and two: sums that wait for each other stand further apart.
            for two in (0..COLUMNS).step_by(2) {
                let a = B::part::<S>(rows[two].add(block * B::BYTES), part);
                let b = B::part::<S>(rows[two + 1].add(block * B::BYTES), part);
                for i in 0..32 / S::LANES {
                    let x = S::load(x.add(i * S::LANES));
                    acc[two] = S::fma(a[i], x, acc[two]);
                    acc[two + 1] = S::fma(b[i], x, acc[two + 1]);
                }
            }
        }
    }
    acc
}
