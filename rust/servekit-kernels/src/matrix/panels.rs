//! Many rows of activations with unpacked rows of the matrix.
//!
//! A register holds one lane of the sums of [`Isa::LANES`] rows of x, so nothing is added across a register. For that
//! the rows are packed into panels: [block, lane, step, row], where k = begin of the block + lane + LANES * step.

use std::ops::Range;

use super::Call;
use crate::isa::{Isa, Task};

/// Registers of rows in a panel.
pub(super) const WIDE: usize = 2;
/// Matrix rows whose sums are made together: with the panel's, as many as keep the processor busy.
pub(super) const COLUMNS: usize = 6;
/// Most lanes.
const LANES: usize = 16;
/// Numbers of a block: so much of these matrix rows stays in the first cache while the panel's lanes pass.
const BLOCK: usize = 512;
/// A rest that is shorter than this is no block of its own: it would not pay for keeping the sums.
const REST: usize = BLOCK / 4;

/// The blocks of rows of `width` numbers.
#[inline(always)]
fn blocks(width: usize) -> impl Iterator<Item = Range<usize>> {
    let mut begin = 0;
    std::iter::from_fn(move || {
        let left = width - begin;
        let block = begin..begin + if left < BLOCK + REST { left } else { BLOCK };
        begin = block.end;
        (left > 0).then_some(block)
    })
}

/// Packs one panel.
pub(super) struct Pack {
    pub(super) call: Call,
    pub(super) panel: usize,
    pub(super) to: *mut f32,
}

impl Task for Pack {
    #[inline(always)]
    unsafe fn run<S: Isa>(self) {
        let (width, rows) = (self.call.matrix.width, WIDE * S::LANES);
        for block in blocks(width) {
            let apart = block.len() / S::LANES * rows;
            for (step, k) in block.clone().step_by(S::LANES).enumerate() {
                for register in 0..WIDE {
                    let row = self.panel * rows + register * S::LANES;
                    let to = self.to.add(block.start * rows + step * rows + register * S::LANES);
                    if row + S::LANES <= self.call.count {
                        S::transpose(self.call.x.add(row * width + k), width, to, apart);
                        continue;
                    }
                    // What fills a panel up is computed for nobody.
                    for i in 0..S::LANES {
                        let from = self.call.x.add((row + i).min(self.call.count - 1) * width + k);
                        for lane in 0..S::LANES {
                            *to.add(lane * apart + i) = *from.add(lane);
                        }
                    }
                }
            }
        }
    }
}

/// All panels with unpacked rows of the matrix.
pub(super) struct Panels {
    pub(super) call: Call,
    pub(super) packed: *const f32,
    pub(super) panels: usize,
    pub(super) rows: Range<usize>,
    pub(super) unpacked: *const f32,
}

/// Sums of one lane, of all rows and columns of a block.
type Sums<S> = [[<S as Isa>::V; WIDE]; COLUMNS];

/// Where sums wait; made once, as filling it takes as long as some of the products.
struct Waiting<S: Isa> {
    /// For the next block, by turn.
    turns: [Sums<S>; LANES],
    /// For the other half of a pair, by level.
    halves: [Sums<S>; LANES.ilog2() as usize],
    /// To become rows.
    by_column: [[f32; WIDE * LANES]; LANES],
    by_row: [[f32; LANES]; LANES],
}

impl Task for Panels {
    #[inline(always)]
    unsafe fn run<S: Isa>(self) {
        let size = WIDE * S::LANES * self.call.matrix.width;
        let none = [[S::zero(); WIDE]; COLUMNS];
        let mut waiting = Waiting::<S> {
            turns: [none; LANES],
            halves: [none; LANES.ilog2() as usize],
            by_column: [[0.0; WIDE * LANES]; LANES],
            by_row: [[0.0; LANES]; LANES],
        };
        for panel in 0..self.panels {
            for column in (0..self.rows.len()).step_by(COLUMNS) {
                let count = COLUMNS.min(self.rows.len() - column);
                let width = self.call.matrix.width;
                let weights = std::array::from_fn(|i| self.unpacked.add((column + i.min(count - 1)) * width));
                let sums = self.sums(self.packed.add(panel * size), weights, &mut waiting);
                self.put(panel * WIDE * S::LANES, column..column + count, sums, &mut waiting);
            }
        }
    }
}

impl Panels {
    /// The sums of a panel's rows with some rows of the matrix.
    #[inline(always)]
    unsafe fn sums<S: Isa>(
        &self,
        panel: *const f32,
        weights: [*const f32; COLUMNS],
        waiting: &mut Waiting<S>,
    ) -> Sums<S> {
        let (width, rows) = (self.call.matrix.width, WIDE * S::LANES);
        let mut all = [[S::zero(); WIDE]; COLUMNS];
        for block in blocks(width) {
            let steps = block.len() / S::LANES;
            for turn in 0..S::LANES {
                let lane = S::lane(turn);
                let panel = panel.add((block.start + lane * steps) * rows);
                let weights = weights.map(|weights| weights.add(block.start + lane));
                let mut sums = if block.start == 0 { [[S::zero(); WIDE]; COLUMNS] } else { waiting.turns[turn] };
                products::<S>(&mut sums, panel, weights, steps);
                if block.end < width {
                    waiting.turns[turn] = sums;
                    continue;
                }
                // The lanes are added in pairs, and the pairs likewise.
                let mut level = 0;
                while turn >> level & 1 == 1 {
                    for (sums, half) in sums.iter_mut().zip(waiting.halves[level]) {
                        for (sum, half) in sums.iter_mut().zip(half) {
                            *sum = S::add(half, *sum);
                        }
                    }
                    level += 1;
                }
                if turn == S::LANES - 1 {
                    all = sums;
                } else {
                    waiting.halves[level] = sums;
                }
            }
        }
        all
    }

    /// Writes sums with some rows of the matrix to rows of y from `first` on.
    #[inline(always)]
    unsafe fn put<S: Isa>(&self, first: usize, columns: Range<usize>, sums: Sums<S>, waiting: &mut Waiting<S>) {
        let (call, row, count) = (&self.call, self.rows.start + columns.start, columns.len());
        for (i, (to, sums)) in waiting.by_column.iter_mut().zip(sums).enumerate() {
            let bias =
                if call.matrix.bias.is_null() { None } else { Some(*call.matrix.bias.add(row + i.min(count - 1))) };
            for (j, sum) in sums.into_iter().enumerate() {
                let sum = bias.map_or(sum, |bias| S::add(sum, S::splat(bias)));
                S::store(to.as_mut_ptr().add(j * S::LANES), sum);
            }
        }
        for register in 0..WIDE {
            let from = waiting.by_column.as_ptr().cast::<f32>().add(register * S::LANES);
            S::transpose(from, WIDE * LANES, waiting.by_row.as_mut_ptr().cast(), LANES);
            let first = first + register * S::LANES;
            for (i, sums) in waiting.by_row.iter().enumerate().take(S::LANES.min(call.count.saturating_sub(first))) {
                let to = call.y.add((first + i) * call.stride + row);
                if count == COLUMNS {
                    // A size that the compiler knows.
                    to.cast::<[f32; COLUMNS]>().write_unaligned(*sums.as_ptr().cast());
                } else {
                    std::ptr::copy_nonoverlapping(sums.as_ptr(), to, count);
                }
            }
        }
    }
}

/// Adds to one lane of the sums of a panel's rows with rows of the matrix.
#[inline(always)]
unsafe fn products<S: Isa>(sums: &mut Sums<S>, panel: *const f32, weights: [*const f32; COLUMNS], steps: usize) {
    // A copy, that it may live in registers.
    let mut acc = *sums;
    // In twos, which halves what the loop itself costs: a block is a multiple of 32 numbers, so of two steps.
    for step in (0..steps).step_by(2) {
        for step in [step, step + 1] {
            let rows: [S::V; WIDE] = std::array::from_fn(|i| S::load(panel.add((step * WIDE + i) * S::LANES)));
            for (sums, weights) in acc.iter_mut().zip(weights) {
                let weight = S::splat(*weights.add(step * S::LANES));
                for (sum, row) in sums.iter_mut().zip(rows) {
                    *sum = S::fma(weight, row, *sum);
                }
            }
        }
    }
    *sums = acc;
}
