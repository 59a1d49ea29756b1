//! The layers of a decoder, one after the other: what a model's file says layer by layer, without a way back between.

use std::sync::{Mutex, PoisonError};

use crate::attention::{Attention, Rows, Sequences};
use crate::elementwise::{add, norm_heads, rms_norm, rotate, silu_mul};
use crate::isa::Level;
use crate::matrix::Matrix;
use crate::pool::Pool;

/// Layers that can't be.
#[derive(Debug, PartialEq, Eq)]
pub enum DecoderError {
    /// A linear layer has matrices of different widths, or none.
    Linear,
    /// A linear layer has not the shape that it has between the others.
    Shape {
        /// Which one.
        name: &'static str,
        /// Its outputs and inputs.
        found: (usize, usize),
        /// What they should be.
        expected: (usize, usize),
    },
}

impl std::fmt::Display for DecoderError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Linear => write!(f, "a linear layer needs matrices of one width"),
            Self::Shape { name, found, expected } => {
                write!(f, "{name} has {found:?} outputs and inputs, expected {expected:?}")
            }
        }
    }
}

impl std::error::Error for DecoderError {}

/// Outputs of several matrices, one after the other.
#[derive(Clone, Debug)]
pub struct Linear {
    parts: Vec<Matrix>,
    shape: (usize, usize),
}

impl Linear {
    /// A layer over these matrices.
    ///
    /// # Errors
    ///
    /// Their widths differ, or there is none.
    pub fn new(parts: Vec<Matrix>) -> Result<Self, DecoderError> {
        let width = parts.first().ok_or(DecoderError::Linear)?.shape().1;
        if parts.iter().any(|part| part.shape().1 != width) {
            return Err(DecoderError::Linear);
        }
        let rows = parts.iter().map(|part| part.shape().0).sum();
        Ok(Self { parts, shape: (rows, width) })
    }

    /// Outputs and inputs.
    #[must_use]
    pub fn shape(&self) -> (usize, usize) {
        self.shape
    }

    /// y = x @ weights.T + bias, see [`Matrix::apply`].
    ///
    /// # Safety
    ///
    /// x is [count, inputs] and can be read, y is [count, outputs] and can be written, and nobody else uses y.
    pub unsafe fn apply(&self, pool: &Pool, level: Level, x: *const f32, y: *mut f32, count: usize) {
        let mut at = 0;
        for part in &self.parts {
            part.apply(pool, level, x, y.add(at), count, self.shape.0);
            at += part.shape().0;
        }
    }
}

/// The weight and epsilon of a norm, see [`rms_norm`].
#[derive(Clone, Copy, Debug)]
pub struct Norm {
    /// As many numbers as a row has.
    pub weight: *const f32,
    /// Added to the mean of the squares.
    pub eps: f32,
}

/// One layer: attention and gated feed-forward network, each behind a norm and added to what came in.
#[derive(Clone, Debug)]
pub struct Layer {
    /// Before attention.
    pub attention_norm: Norm,
    /// Queries, keys and values.
    pub qkv: Linear,
    /// Of each head of queries and of keys.
    pub head_norms: Option<[Norm; 2]>,
    /// Keys and values, see [`Attention`].
    pub pages: *mut f32,
    /// See [`Sequences::window`].
    pub window: usize,
    /// Of what was seen.
    pub output: Linear,
    /// Before the network.
    pub ffn_norm: Norm,
    /// Gates, then ups.
    pub gate_up: Linear,
    /// Of the gated.
    pub down: Linear,
}

/// The layers of a decoder of one width.
pub struct Layers {
    attention: Attention,
    hidden: usize,
    layers: Vec<Layer>,
    /// Between the operations; kept from one step to the next.
    between: Mutex<Vec<f32>>,
}

// SAFETY: addresses that its maker promised to leave alone, and pages that are written by one step at a time.
unsafe impl Send for Layers {}
// SAFETY: as above.
unsafe impl Sync for Layers {}

/// New tokens of a step.
#[derive(Clone, Copy, Debug)]
pub struct Step {
    /// Their states [count, hidden], in and out.
    pub x: *mut f32,
    /// How many.
    pub count: usize,
    /// Rotary tables, see [`rotate`].
    pub cos: *const f32,
    /// The other.
    pub sin: *const f32,
    /// Where their keys and values go, see [`Attention::store`].
    pub places: *const i64,
    /// Whose they are. The window is each layer's own.
    pub sequences: Sequences,
}

impl Layers {
    /// Layers of states of `hidden` numbers.
    ///
    /// # Errors
    ///
    /// Linear layers that don't fit each other.
    ///
    /// # Safety
    ///
    /// For as long as this is used, weights of norms can be read and don't change: `hidden` numbers, and a head's size
    /// for those of heads; pages can be written, and are by nobody else during a step.
    pub unsafe fn new(attention: Attention, hidden: usize, layers: Vec<Layer>) -> Result<Self, DecoderError> {
        let (heads, kv_heads, size) = attention.heads();
        for layer in &layers {
            let wide = layer.down.shape().1;
            for (name, linear, expected) in [
                ("qkv", &layer.qkv, ((heads + 2 * kv_heads) * size, hidden)),
                ("output", &layer.output, (hidden, heads * size)),
                ("gate_up", &layer.gate_up, (2 * wide, hidden)),
                ("down", &layer.down, (hidden, wide)),
            ] {
                let found = linear.shape();
                if found != expected {
                    return Err(DecoderError::Shape { name, found, expected });
                }
            }
        }
        Ok(Self { attention, hidden, layers, between: Mutex::default() })
    }

    /// A step of all layers.
    ///
    /// # Safety
    ///
    /// What is said of [`Step`]'s parts; nobody else uses `x`.
    pub unsafe fn run(&self, pool: &Pool, level: Level, step: Step) {
        let Step { x, count, .. } = step;
        let (heads, kv_heads, size) = self.attention.heads();
        let (qkv_width, seen_width) = ((heads + 2 * kv_heads) * size, heads * size);
        let widest = self.layers.iter().map(|layer| layer.down.shape().1).max().unwrap_or(0);
        let mut between = self.between.lock().unwrap_or_else(PoisonError::into_inner);
        // A row, as it comes into an operation and goes out of it: never more than these at once.
        let (narrow, wide) = (self.hidden.max(seen_width).max(widest), qkv_width.max(2 * widest).max(self.hidden));
        if between.len() < count * (narrow + wide) {
            between.resize(count * (narrow + wide), 0.0);
        }
        let small = between.as_mut_ptr();
        let large = small.add(count * narrow);
        let norm = |norm: Norm| rms_norm(pool, level, (x, small), norm.weight, norm.eps, (count, self.hidden));
        for layer in &self.layers {
            norm(layer.attention_norm);
            let (qkv, stride) = (large, qkv_width);
            layer.qkv.apply(pool, level, small, qkv, count);
            if let Some([q, k]) = layer.head_norms {
                norm_heads(pool, level, (qkv, stride), q.weight, q.eps, (count, heads, size));
                norm_heads(pool, level, (qkv.add(seen_width), stride), k.weight, k.eps, (count, kv_heads, size));
            }
            rotate(pool, level, (qkv, stride), (step.cos, step.sin), (count, heads + kv_heads, size));
            self.attention.store(pool, layer.pages, (qkv.add(seen_width), stride), step.places, count);
            let rows = Rows { q: qkv, q_stride: stride, out: small, out_stride: seen_width };
            let sequences = Sequences { window: layer.window, ..step.sequences };
            self.attention.attend(pool, level, layer.pages, sequences, rows);
            layer.output.apply(pool, level, small, large, count);
            add(pool, level, x, large, count * self.hidden);
            norm(layer.ffn_norm);
            layer.gate_up.apply(pool, level, small, large, count);
            silu_mul(pool, level, large, small, (count, layer.down.shape().1));
            layer.down.apply(pool, level, small, large, count);
            add(pool, level, x, large, count * self.hidden);
        }
    }
}
