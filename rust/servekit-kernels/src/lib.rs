//! The arithmetic of the CPU engine, in float32.
//!
//! * `matrix`: a linear layer over weights that stay as their file stores them. They are unpacked in registers (one
//!   row) or into the first cache (several) and multiplied with float32 activations, so nothing is rounded that the
//!   file did not round.
//! * `attention`: one new token a sequence over keys and values that are read from their pages in place.
//! * `elementwise`: norm, rotary positions and gate, each in one pass.
//! * `pool`: the threads that share this work.
//! * `isa`: the vector instructions, behind one trait: AVX-512, AVX2, and plain Rust for every other processor.
//!
//! A row's result never depends on the other rows of its call nor on the number of threads: every sum has one order.

#![expect(
    unsafe_op_in_unsafe_fn,
    reason = "kernels work on a caller's memory line by line; each function says what it needs"
)]

mod attention;
mod blocks;
mod elementwise;
mod isa;
mod matrix;
mod pool;

pub use attention::{Attention, AttentionError, Rows, Sequences};
pub use blocks::Format;
pub use elementwise::{add, rms_norm, rotate, silu_mul};
pub use isa::Level;
pub use matrix::{Matrix, MatrixError};
pub use pool::Pool;
