//! Frames as a decode step makes them, and the settings of criterion that all benches share.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a bench ends by panicking")]

use std::sync::Arc;

use rmpv::Value;
use servekit_core::wire::columns::{batch_str, batch_token_id};
use servekit_core::wire::{Kind, Rid, ScannedBatch};

/// A request id of the `i`-th request, spread over workers.
pub fn rid(i: usize, workers: usize) -> u64 {
    Rid::mint((i % workers) as u16, 1, i as u64).0
}

fn body(tag: &str, columns: usize, filled: Vec<(usize, Vec<Value>)>) -> Vec<u8> {
    let mut values = vec![Value::Nil; columns + 1];
    values[0] = tag.into();
    for (column, items) in filled {
        values[column + 1] = Value::Array(items);
    }
    let mut bytes = Vec::new();
    rmpv::encode::write_value(&mut bytes, &Value::Array(values)).expect("a vector takes all bytes");
    bytes
}

fn numbers(rows: usize, number: impl Fn(usize) -> u64) -> Vec<Value> {
    (0..rows).map(|i| number(i).into()).collect()
}

/// A `BatchStrOutput` of one step: a word of text for each request, nobody finishes.
pub fn str_step(rows: usize, workers: usize) -> Vec<u8> {
    let filled = vec![
        (batch_str::RIDS, numbers(rows, |i| rid(i, workers))),
        (batch_str::FINISHED_REASONS, vec![Value::Nil; rows]),
        (batch_str::PROMPT_TOKENS, numbers(rows, |i| 100 + i as u64)),
        (batch_str::COMPLETION_TOKENS, numbers(rows, |i| 1 + i as u64)),
        (batch_str::CACHED_TOKENS, numbers(rows, |_| 0)),
        (batch_str::RETRACTION_COUNTS, numbers(rows, |_| 0)),
        (batch_str::DP_RANKS, numbers(rows, |_| 0)),
        (batch_str::OUTPUT_STRS, (0..rows).map(|i| [" the", " river", " runs", ","][i % 4].into()).collect()),
    ];
    body(batch_str::TAG, batch_str::COLUMNS.len(), filled)
}

/// A `BatchTokenIDOutput` of one step: the token `id(row)` for each request, nobody finishes.
pub fn token_step(rows: usize, workers: usize, id: impl Fn(usize) -> u32) -> Vec<u8> {
    let ids = (0..rows).map(|i| Value::Binary(id(i).to_le_bytes().to_vec())).collect();
    let filled = vec![
        (batch_token_id::RIDS, numbers(rows, |i| rid(i, workers))),
        (batch_token_id::FINISHED_REASONS, vec![Value::Nil; rows]),
        (batch_token_id::PROMPT_TOKENS, numbers(rows, |i| 100 + i as u64)),
        (batch_token_id::COMPLETION_TOKENS, numbers(rows, |i| 1 + i as u64)),
        (batch_token_id::CACHED_TOKENS, numbers(rows, |_| 0)),
        (batch_token_id::RETRACTION_COUNTS, numbers(rows, |_| 0)),
        (batch_token_id::DP_RANKS, numbers(rows, |_| 0)),
        (batch_token_id::DECODE_IDS, ids),
    ];
    body(batch_token_id::TAG, batch_token_id::COLUMNS.len(), filled)
}

/// Scans a body that is known to be well formed.
pub fn scan(kind: Kind, body: &Arc<Vec<u8>>) -> ScannedBatch {
    let shared = Arc::clone(body);
    ScannedBatch::parse(kind, shared).expect("well formed")
}

/// Criterion with times that keep a whole `cargo bench` within a few minutes.
pub mod settings {
    use std::time::Duration;

    /// Time before measuring, per bench.
    pub const WARM_UP: Duration = Duration::from_millis(500);
    /// Time of measuring, per bench.
    pub const MEASURE: Duration = Duration::from_secs(2);
}
