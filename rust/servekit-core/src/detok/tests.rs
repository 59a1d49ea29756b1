use std::sync::Arc;

use rmpv::Value;

use super::*;
use crate::wire::{Kind, Rid, ScannedBatch, TextOptions};

/// Two tokens, `a` and a space. The decoder of this file panics on the space: it cuts two characters off one.
const PANICS: &str = r#"{"version": "1.0", "added_tokens": [],
    "decoder": {"type": "Strip", "content": " ", "start": 0, "stop": 2},
    "model": {"type": "WordLevel", "vocab": {"a": 0, " ": 1}, "unk_token": "a"}}"#;

/// `a` and `b`, joined by spaces.
const PLAIN: &str = r#"{"version": "1.0", "added_tokens": [],
    "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "a"}}"#;

fn shard(json: &str, index: usize, shards: usize) -> Shard {
    Shard::new(index, shards, Some(Arc::new(Vocabulary::from_json(json.as_bytes()).unwrap())))
}

/// One id for each request.
fn step(rows: &[(u64, u32)], finished: bool) -> ScannedBatch {
    let reason = if finished { Value::Array(vec!["length".into()]) } else { Value::Nil };
    let list = |values: Vec<Value>| Value::Array(values);
    let fields = list(vec![
        "BatchTokenIDOutput".into(),
        list(rows.iter().map(|(rid, _)| (*rid).into()).collect()),
        Value::Nil,
        list(vec![reason; rows.len()]),
        Value::Nil,
        Value::Nil,
        Value::Nil,
        Value::Nil,
        Value::Nil,
        list(rows.iter().map(|(_, id)| Value::Binary(id.to_le_bytes().to_vec())).collect()),
    ]);
    let mut body = Vec::new();
    rmpv::encode::write_value(&mut body, &fields).unwrap();
    ScannedBatch::parse(Kind::BatchTokenId, Arc::new(body)).unwrap()
}

/// Id, type of the finished reason and text of each row.
fn rows(output: &ShardOutput) -> Vec<(u64, Option<String>, String)> {
    let mut out = Vec::new();
    for frame in &output.frames {
        let Value::Array(fields) = rmpv::decode::read_value(&mut frame.body.as_ref()).unwrap() else { panic!() };
        let column = |i: usize| fields[i].as_array().unwrap().clone();
        assert_eq!(column(1).len(), frame.rows as usize);
        for (i, rid) in column(1).iter().enumerate() {
            let reason = column(3)[i].as_array().map(|reason| reason[0].as_str().unwrap().to_owned());
            out.push((rid.as_u64().unwrap(), reason, column(9)[i].as_str().unwrap().to_owned()));
        }
    }
    out
}

#[test]
fn a_panic_ends_its_request_alone() {
    let mut shard = shard(PANICS, 0, 1);
    let (bad, good) = (Rid::mint(1, 1, 1).0, Rid::mint(1, 1, 2).0);
    shard.open(bad, TextOptions::default(), true);
    shard.open(good, TextOptions::default(), true);
    let mut output = ShardOutput::default();
    shard.batch(&step(&[(bad, 1), (good, 0)], false), &mut output);
    assert_eq!(rows(&output), [(bad, Some("error".to_owned()), String::new()), (good, None, "a".to_owned())]);
    assert_eq!(output.aborts, [bad]);
    assert_eq!(shard.counts().failed, 1);
    let mut output = ShardOutput::default();
    shard.batch(&step(&[(bad, 0), (good, 0)], true), &mut output);
    assert_eq!(rows(&output), [(good, Some("length".to_owned()), "a".to_owned())]);
    assert_eq!((shard.live(), shard.counts().dropped), (0, 0));
}

#[test]
fn shards_share_a_frame_and_each_row_is_one_shards() {
    const SHARDS: usize = 3;
    let rids: Vec<u64> = (0..90).map(|i| Rid::mint(i % 4, 1, u64::from(i)).0).collect();
    let batch = step(&rids.iter().map(|rid| (*rid, 0)).collect::<Vec<_>>(), true);
    let mut seen = Vec::new();
    for index in 0..SHARDS {
        let mut shard = shard(PLAIN, index, SHARDS);
        let mine: Vec<u64> = rids.iter().copied().filter(|rid| shard_of(*rid, SHARDS) == index).collect();
        assert!(mine.len() > rids.len() / SHARDS / 2, "shard {index} has {} requests", mine.len());
        mine.iter().for_each(|rid| shard.open(*rid, TextOptions::default(), true));
        let mut output = ShardOutput::default();
        shard.batch(&batch, &mut output);
        assert!(output.frames.len() <= 4);
        seen.extend(rows(&output).into_iter().map(|(rid, ..)| rid));
        assert_eq!((shard.live(), shard.counts()), (0, Counts::default()));
    }
    seen.sort_unstable();
    let mut expected = rids.clone();
    expected.sort_unstable();
    assert_eq!(seen, expected);
}

/// Buffers are used again from step to step: nothing of one step, nor of another worker, may show in the next.
#[test]
fn steps_leave_nothing_behind() {
    let mut shard = shard(PLAIN, 0, 1);
    let rids: Vec<u64> = (0..40).map(|i| Rid::mint(i % 5, 1, u64::from(i)).0).collect();
    for (i, rid) in rids.iter().enumerate() {
        let options = TextOptions { ids: i % 3 == 0, ..TextOptions::default() };
        shard.open(*rid, options, true);
    }
    for (turn, there) in [(0, 0..40), (1, 7..23), (2, 0..3), (3, 0..40)] {
        let step_rows: Vec<(u64, u32)> = rids[there.clone()].iter().map(|rid| (*rid, 1)).collect();
        let mut output = ShardOutput::default();
        shard.batch(&step(&step_rows, turn == 3), &mut output);
        let mut said = rows(&output);
        said.sort_unstable();
        let mut expected: Vec<_> = there
            .map(|i| {
                let reason = (turn == 3).then(|| "length".to_owned());
                (rids[i], reason, if turn == 0 { "b" } else { " b" }.to_owned())
            })
            .collect();
        expected.sort_unstable();
        assert_eq!(said, expected, "turn {turn}");
        let workers = output.frames.iter().map(|frame| frame.route.worker).collect::<std::collections::HashSet<_>>();
        assert_eq!(workers.len(), output.frames.len(), "one frame a worker");
    }
    assert_eq!((shard.live(), shard.counts()), (0, Counts::default()));
}

#[test]
fn a_request_opened_twice_goes_on() {
    let mut shard = shard(PLAIN, 0, 1);
    let rid = Rid::mint(1, 1, 1).0;
    shard.open(rid, TextOptions::default(), true);
    let mut output = ShardOutput::default();
    shard.batch(&step(&[(rid, 0)], false), &mut output);
    shard.open(rid, TextOptions::default(), true);
    shard.batch(&step(&[(rid, 1)], false), &mut output);
    assert_eq!(rows(&output), [(rid, None, "a".to_owned()), (rid, None, " b".to_owned())]);
    assert_eq!(shard.counts().duplicates, 1);
}

#[test]
fn embeddings_pass_as_they_are() {
    let mut shard = shard(PLAIN, 0, 1);
    let rid = Rid::mint(1, 1, 1).0;
    shard.open(rid, TextOptions::default(), false);
    let mut body = b"\x94\xb4BatchEmbeddingOutput\x91\xcf".to_vec();
    body.extend_from_slice(&rid.to_be_bytes());
    body.extend_from_slice(b"\xc0\x91\x91\xa4stop");
    let batch = ScannedBatch::parse(Kind::BatchEmbedding, Arc::new(body)).unwrap();
    let mut output = ShardOutput::default();
    shard.batch(&batch, &mut output);
    let [WorkerFrame { route, kind: Kind::BatchEmbedding, rank: -1, rows: 1, body: Body::Shared(passed) }] =
        &output.frames[..]
    else {
        panic!("{:?}", output.frames);
    };
    assert_eq!(*route, Rid(rid).route());
    assert!(Arc::ptr_eq(passed, batch.shared()), "one worker's batch is not copied");
    assert_eq!(shard.live(), 0);
}

#[test]
fn embeddings_of_a_rank_pass_for_open_requests_of_that_rank_alone() {
    let mut shard = shard(PLAIN, 0, 1);
    let rids = [1, 2, 3].map(|number| Rid::mint(1, 1, number).0);
    shard.open_at(Some(0), rids[0], TextOptions::default(), false);
    shard.open_at(Some(1), rids[1], TextOptions::default(), false);
    let mut body = b"\x94\xb4BatchEmbeddingOutput\x93".to_vec();
    for rid in rids {
        body.push(0xcf);
        body.extend_from_slice(&rid.to_be_bytes());
    }
    body.extend_from_slice(b"\xc0\x93\x91\xa4stop\x91\xa4stop\x91\xa4stop");
    let batch = ScannedBatch::parse(Kind::BatchEmbedding, Arc::new(body)).unwrap();
    let mut output = ShardOutput::default();
    shard.batch_of(0, &batch, &mut output);
    shard.batch_of(0, &batch, &mut output);
    let [frame] = output.frames.as_slice() else { panic!("one frame") };
    let passed = ScannedBatch::parse(frame.kind, Arc::new(frame.body.clone())).unwrap();
    assert_eq!((passed.rids(), frame.rows, frame.rank), (&rids[..1], 1, 0));
    assert_eq!((shard.live(), shard.counts().strays, shard.counts().dropped), (1, 2, 3));
}

#[test]
fn a_file_that_is_no_tokenizer_is_an_error() {
    assert!(Vocabulary::from_json(b"{}").is_err());
    let error = Vocabulary::from_file("/nonexistent/tokenizer.json").err().map(|error| error.to_string());
    assert!(error.is_some_and(|text| text.starts_with("can't read the tokenizer /nonexistent/tokenizer.json")));
}
