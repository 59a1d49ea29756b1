//! The arithmetic of the CPU engine, in float32.
//!
//! * `matrix`: a linear layer over weights that stay as their file stores them. They are unpacked in registers (one
//!   row) or into the first cache (several) and multiplied with float32 activations, so nothing is rounded that the
//!   file did not round.
//! * `attention`: new tokens over keys and values that are read from their pages in place.
//! * `elementwise`: norm, rotary positions and gate, each in one pass.
//! * `decoder`: layers of all of these, one after the other.
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
mod decoder;
mod elementwise;
mod isa;
mod matrix;
mod pool;

pub use attention::{Attention, AttentionError, Rows, Sequences};
pub use blocks::Format;
pub use decoder::{DecoderError, Layer, Layers, Linear, Norm, Step};
pub use elementwise::{add, norm_heads, rms_norm, rotate, silu_mul};
pub use isa::Level;
pub use matrix::{Matrix, MatrixError};
pub use pool::Pool;
