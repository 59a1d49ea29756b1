//! A few rows of activations with unpacked rows of the matrix: lanes run along both.

use std::marker::PhantomData;
use std::ops::Range;

use super::{COLUMNS, Call, Matrix};
use crate::blocks::{Blocks, Use};
use crate::isa::{Isa, Level, Task};

/// Some rows of the matrix as float32, one behind the other.
pub(super) struct Unpack {
    pub(super) matrix: Matrix,
    pub(super) rows: Range<usize>,
    pub(super) to: *mut f32,
    pub(super) level: Level,
}

impl Use for Unpack {
    type Out = ();
    fn with<B: Blocks>(self) {
        // SAFETY: whoever called `apply` promised that the rows can be read; the buffer has room for them.
        unsafe { self.level.run(UnpackOf::<B>(self.matrix, self.rows, self.to, PhantomData)) };
    }
}

struct UnpackOf<B>(Matrix, Range<usize>, *mut f32, PhantomData<B>);

impl<B: Blocks> Task for UnpackOf<B> {
    #[inline(always)]
    unsafe fn run<S: Isa>(self) {
        let Self(matrix, rows, mut to, _) = self;
        for row in rows {
            let stored = matrix.row::<B>(row);
            for block in 0..matrix.width / B::WEIGHTS {
                for part in 0..B::WEIGHTS / 32 {
                    let weights = B::part::<S>(stored.add(block * B::BYTES), part);
                    for lanes in weights.into_iter().take(32 / S::LANES) {
                        S::store(to, lanes);
                        to = to.add(S::LANES);
                    }
                }
            }
        }
    }
}

/// Rows of x from `first` on with unpacked rows of the matrix.
pub(super) struct Tiles {
    pub(super) call: Call,
    pub(super) first: usize,
    pub(super) rows: Range<usize>,
    pub(super) unpacked: *const f32,
}

impl Task for Tiles {
    #[inline(always)]
    unsafe fn run<S: Isa>(self) {
        for column in (0..self.rows.len()).step_by(COLUMNS) {
            let mut at = self.first;
            while at < self.call.count {
                at += match (S::TILE, self.call.count - at) {
                    (6.., 6..) => self.one::<S, 6>(at, column),
                    (6.., 5) => self.one::<S, 5>(at, column),
                    (4.., 4..) => self.one::<S, 4>(at, column),
                    (3.., 3 | 5..) => self.one::<S, 3>(at, column),
                    // Two and two: a single row has too few sums to keep the processor busy.
                    (_, 2..) => self.one::<S, 2>(at, column),
                    _ => self.one::<S, 1>(at, column),
                };
            }
        }
    }
}

impl Tiles {
    /// `R` rows of x from row `at` on with four columns; returns R.
    #[inline(always)]
    unsafe fn one<S: Isa, const R: usize>(&self, at: usize, column: usize) -> usize {
        let (width, count) = (self.call.matrix.width, COLUMNS.min(self.rows.len() - column));
        let weights = std::array::from_fn(|i| self.unpacked.add((column + i.min(count - 1)) * width));
        let mut sums = [[S::zero(); COLUMNS]; R];
        tile::<S, R>(&mut sums, self.call.x.add(at * width), width, weights, width);
        for (i, four) in sums.into_iter().enumerate() {
            self.call.put(at + i, self.rows.start + column, &S::sums(four)[..count]);
        }
        R
    }
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
