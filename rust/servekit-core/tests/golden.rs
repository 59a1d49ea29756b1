//! The golden frames, which Python writes, are read here and written again.
#![expect(clippy::unwrap_used, reason = "a test that panics is a test that fails")]

use std::sync::Arc;

use serde_json::Value;
use servekit_core::wire::{Envelope, EnvelopeBuilder, Ext, Group, Kind, SCHEMA, ScannedBatch, Section, TextOptions};
use servekit_core::{split, wire};

fn frames() -> Vec<Value> {
    let json = include_str!("../../../tests/data/golden.json");
    serde_json::from_str(json).unwrap()
}

fn bytes(hex: &Value) -> Vec<u8> {
    let hex = hex.as_str().unwrap();
    (0..hex.len()).step_by(2).map(|i| u8::from_str_radix(&hex[i..i + 2], 16).unwrap()).collect()
}

fn frame(name: &str) -> (Vec<u8>, Vec<u8>) {
    let frame = frames().into_iter().find(|frame| frame["name"] == name).unwrap();
    (bytes(&frame["envelope"]), bytes(&frame["body"]))
}

fn rebuild(envelope: &Envelope<'_>) -> Vec<u8> {
    EnvelopeBuilder {
        flags: envelope.flags,
        sender: envelope.sender,
        sender_epoch: envelope.sender_epoch,
        receiver_epoch: envelope.receiver_epoch,
        seq: envelope.seq,
        id: envelope.id,
        exts: envelope.exts().map(|(kind, data)| (kind, data.to_vec())).collect(),
        ..EnvelopeBuilder::new(envelope.kind, envelope.section)
    }
    .encode()
}

#[test]
fn every_envelope_is_read_and_written_again() {
    for frame in frames() {
        let golden = bytes(&frame["envelope"]);
        let envelope = Envelope::parse(&golden).unwrap();
        assert_eq!(envelope.kind as u64, frame["fields"]["kind"].as_u64().unwrap());
        assert_eq!(envelope.id, frame["fields"]["id"].as_u64().unwrap());
        assert_eq!(rebuild(&envelope), golden, "{}", frame["name"]);
    }
}

#[test]
fn hello_has_this_schema() {
    let (envelope, body) = frame("HELLO");
    assert_eq!(Envelope::parse(&envelope).unwrap().section, Section::Hello { schema: SCHEMA });
    assert_eq!(body, [0xc0]);
}

#[test]
fn extensions_are_read_and_unknown_ones_kept() {
    let (golden, _) = frame("GENERATE");
    let envelope = Envelope::parse(&golden).unwrap();
    let text = envelope.ext(Ext::Text).unwrap();
    let options = TextOptions::parse(text).unwrap();
    assert_eq!(options.stops, ["END", "§"]);
    assert!(options.include_stop && options.ids && options.text && !options.skip_special_tokens);
    assert_eq!(options.encode(), text);
    let group = envelope.ext(Ext::Group).unwrap();
    assert_eq!(Group::parse(group).unwrap(), Group { id: envelope.id, index: 1, size: 2, prompt: 0 });
    assert_eq!(Group::parse(group).unwrap().encode(), group);
    assert_eq!(envelope.exts().last(), Some((999, b"kept".as_slice())));
}

#[test]
fn a_request_is_patched_in_place() {
    let (mut golden, _) = frame("GENERATE");
    let before = Envelope::parse(&golden).unwrap();
    let (id, exts) = (before.id, before.exts().count());
    assert!(wire::patch_request(&mut golden, 3, 2, 99, 7, 55));
    let after = Envelope::parse(&golden).unwrap();
    assert_eq!(after.section, Section::Request { rank: 3, tokens: 3, attempt: 2, dispatch: 99 });
    assert_eq!((after.receiver_epoch, after.seq, after.id, after.exts().count()), (7, 55, id, exts));
    assert!(!wire::patch_request(&mut golden[..63], 3, 2, 99, 7, 55));
}

#[test]
fn batches_are_scanned_and_split() {
    for (name, kind) in [
        ("BATCH_TOKEN_ID", Kind::BatchTokenId),
        ("BATCH_STR", Kind::BatchStr),
        ("BATCH_EMBEDDING", Kind::BatchEmbedding),
    ] {
        let (envelope, body) = frame(name);
        let Section::Batch { rows, .. } = Envelope::parse(&envelope).unwrap().section else { panic!("{name}") };
        let batch = ScannedBatch::parse(kind, Arc::new(body.clone())).unwrap();
        assert_eq!(batch.rows(), rows as usize);
        let parts = split::split_by_worker(&batch);
        assert_eq!(parts.iter().map(|part| part.route.worker).collect::<Vec<_>>(), [3, 4]);
        let parts: Vec<_> = parts.into_iter().map(|part| ScannedBatch::parse(kind, part.body).unwrap()).collect();
        assert_eq!(split::merge(&parts, &[vec![0], vec![1]]).unwrap(), body);
        assert!((0..body.len()).all(|cut| ScannedBatch::parse(kind, Arc::new(body[..cut].to_vec())).is_err()));
    }
}

#[test]
fn every_cut_of_an_envelope_is_refused() {
    for frame in frames() {
        let golden = bytes(&frame["envelope"]);
        assert!((0..golden.len()).all(|cut| Envelope::parse(&golden[..cut]).is_err()));
        // With a length that fits, cutting an extension must be noticed.
        for cut in 40..golden.len() {
            let mut cut = golden[..cut].to_vec();
            let length = (cut.len() as u32).to_le_bytes();
            cut[..4].copy_from_slice(&length);
            if let Ok(envelope) = Envelope::parse(&cut) {
                assert_eq!(rebuild(&envelope), cut);
            }
        }
    }
}
