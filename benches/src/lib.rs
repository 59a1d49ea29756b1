//! Frames as a decode step makes them, and the settings of criterion that all benches share.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a bench ends by panicking")]

use std::sync::Arc;

use rmpv::Value;
use servekit_core::detok::{Shard, Vocabulary};
use servekit_core::wire::columns::{batch_str, batch_token_id};
use servekit_core::wire::{Kind, Rid, ScannedBatch, TextOptions};

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

/// Numbers below `below` that follow no pattern which a branch predictor could learn.
fn scattered(i: usize, below: u64) -> u64 {
    let mixed = (i as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    ((mixed ^ (mixed >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 32) % below
}

/// Columns that batches of text and of ids have in common: prompts of up to 2000 tokens, up to 500 tokens said.
fn counts(rows: usize, workers: usize) -> Vec<(usize, Vec<Value>)> {
    vec![
        (batch_str::RIDS, numbers(rows, |i| rid(i, workers))),
        (batch_str::FINISHED_REASONS, vec![Value::Nil; rows]),
        (batch_str::PROMPT_TOKENS, numbers(rows, |i| 16 + scattered(i, 2000))),
        (batch_str::COMPLETION_TOKENS, numbers(rows, |i| 1 + scattered(i + rows, 500))),
        (batch_str::CACHED_TOKENS, numbers(rows, |_| 0)),
        (batch_str::RETRACTION_COUNTS, numbers(rows, |_| 0)),
        (batch_str::DP_RANKS, numbers(rows, |_| 0)),
    ]
}

/// A `BatchStrOutput` of one step: a word of text for each request, nobody finishes.
pub fn str_step(rows: usize, workers: usize) -> Vec<u8> {
    const WORDS: [&str; 8] = [" the", " river", " runs", ",", " a", "ing", " mountain", "."];
    let mut filled = counts(rows, workers);
    let texts = (0..rows).map(|i| WORDS[scattered(i + 2 * rows, 8) as usize].into()).collect();
    filled.push((batch_str::OUTPUT_STRS, texts));
    body(batch_str::TAG, batch_str::COLUMNS.len(), filled)
}

/// Four bytes a number.
fn packed(numbers: impl Iterator<Item = u32>) -> Value {
    Value::Binary(numbers.flat_map(u32::to_le_bytes).collect())
}

/// A `BatchTokenIDOutput` of one step: a token below `vocabulary` for each request, nobody finishes. With `top` above 0
/// also the token's logprob and those of the `top` likeliest.
pub fn token_step(rows: usize, workers: usize, vocabulary: u32, top: u32) -> Vec<u8> {
    use batch_token_id as columns;
    let id = |i: usize| scattered(i + 3 * rows, u64::from(vocabulary)) as u32;
    let ids = || (0..rows).map(|i| packed([id(i)].into_iter())).collect::<Vec<_>>();
    let mut filled = counts(rows, workers);
    filled.push((columns::DECODE_IDS, ids()));
    if top > 0 {
        let nested = || (0..rows).map(|i| Value::Array(vec![packed((0..top).map(|k| id(i) ^ k))])).collect();
        filled.push((columns::OUTPUT_TOKEN_LOGPROBS_VAL, ids()));
        filled.push((columns::OUTPUT_TOKEN_LOGPROBS_IDX, ids()));
        filled.push((columns::OUTPUT_TOP_LOGPROBS_VAL, nested()));
        filled.push((columns::OUTPUT_TOP_LOGPROBS_IDX, nested()));
    }
    body(columns::TAG, columns::COLUMNS.len(), filled)
}

/// Ids of SmolLM2's tokenizer.
pub const VOCABULARY: u32 = 49152;

/// The `tokenizer.json` that `SERVEKIT_BENCH_TOKENIZER` names; without it one made up of as many tokens as SmolLM2's.
pub fn tokenizer() -> Vec<u8> {
    match std::env::var_os("SERVEKIT_BENCH_TOKENIZER") {
        Some(path) => std::fs::read(path).expect("a tokenizer.json"),
        None => made_up_tokenizer(VOCABULARY).into_bytes(),
    }
}

/// A `BatchTokenIDOutput` that ends requests.
pub fn last_step(rids: &[u64]) -> Vec<u8> {
    use batch_token_id as columns;
    let filled = vec![
        (columns::RIDS, rids.iter().map(|rid| (*rid).into()).collect()),
        (columns::FINISHED_REASONS, vec![Value::Array(vec!["length".into()]); rids.len()]),
    ];
    body(columns::TAG, columns::COLUMNS.len(), filled)
}

/// A byte-level tokenizer of `size` tokens, at most 26^4, each a word of up to four letters.
fn made_up_tokenizer(size: u32) -> String {
    // Names differ, as they must: the id's digits to base 26, every second one behind the mark of a space.
    let name = |id: u32| {
        let digits = [1, 26, 676, 17576].map(|unit| char::from(b'a' + (id / unit % 26) as u8));
        let known = 1 + id.checked_ilog(26).unwrap_or(0) as usize;
        digits[..known].iter().collect::<String>()
    };
    let tokens: Vec<String> =
        (0..size).map(|id| format!("\"{}{}\":{id}", if id % 2 == 0 { "\u{120}" } else { "" }, name(id))).collect();
    format!(
        r#"{{"version":"1.0","truncation":null,"padding":null,"added_tokens":[],"normalizer":null,
        "pre_tokenizer":{{"type":"ByteLevel","add_prefix_space":false,"trim_offsets":true,"use_regex":true}},
        "post_processor":null,"decoder":{{"type":"ByteLevel","add_prefix_space":true,"trim_offsets":true,"use_regex":true}},
        "model":{{"type":"BPE","dropout":null,"unk_token":null,"continuing_subword_prefix":null,"end_of_word_suffix":null,
        "fuse_unk":false,"byte_fallback":false,"ignore_merges":false,"vocab":{{{}}},"merges":[]}}}}"#,
        tokens.join(",")
    )
}

/// The vocabulary of [`tokenizer`].
pub fn vocabulary() -> Arc<Vocabulary> {
    Arc::new(Vocabulary::from_json(&tokenizer()).expect("a tokenizer"))
}

/// A shard in which the requests of a step are open, every second one with a stop string that is never said.
pub fn shard(vocabulary: Arc<Vocabulary>, rows: usize, workers: usize) -> Shard {
    let mut shard = Shard::new(0, 1, Some(vocabulary));
    for i in 0..rows {
        let stops = if i % 2 == 0 { vec!["\n\nUser:".to_owned()] } else { Vec::new() };
        shard.open(rid(i, workers), TextOptions { stops, ..TextOptions::default() }, true);
    }
    shard
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
    pub const WARM_UP: Duration = Duration::from_millis(200);
    /// Time of measuring, per bench.
    pub const MEASURE: Duration = Duration::from_millis(600);
}
