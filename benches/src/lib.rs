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
    token_step_of(rows, |row| rid(row, workers), id)
}

/// As [`token_step`], with request ids of the caller's own.
pub fn token_step_of(rows: usize, rid: impl Fn(usize) -> u64, id: impl Fn(usize) -> u32) -> Vec<u8> {
    body(batch_token_id::TAG, batch_token_id::COLUMNS.len(), token_columns(rows, rid, &id))
}

fn token_columns(rows: usize, rid: impl Fn(usize) -> u64, id: &impl Fn(usize) -> u32) -> Vec<(usize, Vec<Value>)> {
    let ids = (0..rows).map(|i| Value::Binary(id(i).to_le_bytes().to_vec())).collect();
    vec![
        (batch_token_id::RIDS, numbers(rows, rid)),
        (batch_token_id::FINISHED_REASONS, vec![Value::Nil; rows]),
        (batch_token_id::PROMPT_TOKENS, numbers(rows, |i| 100 + i as u64)),
        (batch_token_id::COMPLETION_TOKENS, numbers(rows, |i| 1 + i as u64)),
        (batch_token_id::CACHED_TOKENS, numbers(rows, |_| 0)),
        (batch_token_id::RETRACTION_COUNTS, numbers(rows, |_| 0)),
        (batch_token_id::DP_RANKS, numbers(rows, |_| 0)),
        (batch_token_id::DECODE_IDS, ids),
    ]
}

/// As [`token_step`], with the logprobs of the token and of the five best ones.
pub fn token_step_top5(rows: usize, workers: usize, id: impl Fn(usize) -> u32) -> Vec<u8> {
    let floats = |row: usize, n: usize| {
        let bytes = (0..n).flat_map(|i| (-0.25 * (1 + i + row % 7) as f32).to_le_bytes());
        Value::Binary(bytes.collect())
    };
    let ids = |row: usize, n: usize| {
        let bytes = (0..n as u32).flat_map(|i| (id(row) + i).to_le_bytes());
        Value::Binary(bytes.collect())
    };
    let of = |item: &dyn Fn(usize) -> Value| (0..rows).map(item).collect();
    let mut filled = token_columns(rows, |row| rid(row, workers), &id);
    filled.extend([
        (batch_token_id::OUTPUT_TOKEN_LOGPROBS_VAL, of(&|row| floats(row, 1))),
        (batch_token_id::OUTPUT_TOKEN_LOGPROBS_IDX, of(&|row| ids(row, 1))),
        (batch_token_id::OUTPUT_TOP_LOGPROBS_VAL, of(&|row| Value::Array(vec![floats(row, 5)]))),
        (batch_token_id::OUTPUT_TOP_LOGPROBS_IDX, of(&|row| Value::Array(vec![ids(row, 5)]))),
    ]);
    body(batch_token_id::TAG, batch_token_id::COLUMNS.len(), filled)
}

/// Scans a body that is known to be well formed.
pub fn scan(kind: Kind, body: &Arc<Vec<u8>>) -> ScannedBatch {
    let shared = Arc::clone(body);
    ScannedBatch::parse(kind, shared).expect("well formed")
}

/// A byte-level tokenizer in which id i is the printable character of byte 33 + i, for i below 94.
pub fn tokenizer_json() -> String {
    let tokens: Vec<String> = (0..94).map(|i| format!("{:?}:{i}", char::from(b'!' + i).to_string())).collect();
    format!(
        r#"{{"version":"1.0","truncation":null,"padding":null,"added_tokens":[],"normalizer":null,
        "pre_tokenizer":{{"type":"ByteLevel","add_prefix_space":false,"trim_offsets":true,"use_regex":true}},
        "post_processor":null,"decoder":{{"type":"ByteLevel","add_prefix_space":true,"trim_offsets":true,"use_regex":true}},
        "model":{{"type":"BPE","dropout":null,"unk_token":null,"continuing_subword_prefix":null,"end_of_word_suffix":null,
        "fuse_unk":false,"byte_fallback":false,"ignore_merges":false,"vocab":{{{}}},"merges":[]}}}}"#,
        tokens.join(",")
    )
}

/// Criterion with times that keep a whole `cargo bench` within a few minutes.
pub mod settings {
    use std::time::Duration;

    /// Time before measuring, per bench.
    pub const WARM_UP: Duration = Duration::from_millis(200);
    /// Time of measuring, per bench.
    pub const MEASURE: Duration = Duration::from_millis(600);
}
