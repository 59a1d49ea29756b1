use std::sync::Arc;

use proptest::prelude::*;
use rmpv::Value;

use super::*;
use crate::wire::{Kind, ScannedBatch, WireError};

const COLUMNS: usize = 9;

/// Id, text, tokens so far, end.
type Row<'a> = (u64, &'a str, u64, bool);

/// What was written to whom, and the batch of what was left.
type Rendered = (Vec<(u8, String)>, Option<Vec<u8>>);

fn batch(rows: &[Row<'_>]) -> ScannedBatch {
    let column = |value: &dyn Fn(&Row<'_>) -> Value| Value::Array(rows.iter().map(value).collect());
    let mut fields = vec![Value::Nil; COLUMNS + 1];
    fields[0] = "BatchStrOutput".into();
    fields[1] = column(&|row| row.0.into());
    fields[3] = column(&|row| if row.3 { Value::Array(vec!["stop".into()]) } else { Value::Nil });
    fields[5] = column(&|row| row.2.into());
    fields[8] = column(&|_| 3.into());
    fields[9] = column(&|row| row.1.into());
    scan(fields)
}

fn scan(fields: Vec<Value>) -> ScannedBatch {
    let mut body = Vec::new();
    rmpv::encode::write_value(&mut body, &Value::Array(fields)).unwrap();
    ScannedBatch::parse(Kind::BatchStr, Arc::new(body)).unwrap()
}

fn render(streams: &mut TextStreams<u8>, batch: &ScannedBatch) -> Result<Rendered, WireError> {
    let mut written = Vec::new();
    let (left, _) =
        streams.render(batch, 0, |sink, event| written.push((*sink, String::from_utf8(event.to_vec()).unwrap())))?;
    Ok((written, left))
}

proptest! {
    #[test]
    fn what_is_escaped_reads_as_the_text(text in any::<String>()) {
        let mut out = Vec::new();
        escape_json(&text, &mut out);
        let json = format!("\"{}\"", std::str::from_utf8(&out).unwrap());
        prop_assert_eq!(serde_json::from_str::<String>(&json).unwrap(), text);
    }

    #[test]
    fn no_reader_of_lines_finds_one_in_it(parts in proptest::collection::vec(
        prop_oneof![Just("\n"), Just("\r"), Just("\u{85}"), Just("\u{2028}"), Just("\u{2029}"), Just("\u{84}é\u{202a}"),
            Just("\0\u{1f}\"\\")], 0..20))
    {
        let mut out = Vec::new();
        escape_json(&parts.concat(), &mut out);
        let text = std::str::from_utf8(&out).unwrap();
        let breaks_lines = text.contains(['\n', '\r', '\u{85}', '\u{2028}', '\u{2029}']);
        prop_assert!(!breaks_lines);
        prop_assert_eq!(serde_json::from_str::<String>(&format!("\"{text}\"")).unwrap(), parts.concat());
    }

    #[test]
    fn a_chunk_is_as_long_as_its_head_says(text in ".{0,600}") {
        let (mut scratch, mut plain, mut chunk) = (Vec::new(), Vec::new(), Vec::new());
        Template::new(b"data: {\"t\":", b"}\n\n", false).event(&text, &mut scratch, &mut plain);
        Template::new(b"data: {\"t\":", b"}\n\n", true).event(&text, &mut scratch, &mut chunk);
        prop_assert_eq!(chunk, [format!("{:x}\r\n", plain.len()).as_bytes(), &plain, b"\r\n"].concat());
    }
}

#[test]
fn open_streams_get_their_events_and_the_rest_is_a_batch() {
    let mut streams = TextStreams::default();
    for rid in [1, 2] {
        streams.open(rid, Template::new(b"<", b">", false), rid as u8, 0, 0);
    }
    let given = batch(&[(3, "c", 1, false), (1, "a\n", 4, false), (2, "b", 5, true)]);
    let (written, left) = render(&mut streams, &given).unwrap();
    assert_eq!(written, [(1, "<\"a\\n\">".to_owned())]);
    let left = ScannedBatch::parse(Kind::BatchStr, Arc::new(left.unwrap())).unwrap();
    assert_eq!(left.rids(), [3, 2]);
    assert!(left.finished(1));
    assert_eq!(streams.close(2), None, "a last row closes its stream");
    assert_eq!(streams.close(1), Some(4));
    assert_eq!(streams.live(), 0);
}

#[test]
fn a_row_without_text_counts_and_writes_nothing() {
    let mut streams = TextStreams::default();
    streams.open(1, Template::new(b"<", b">", true), 0, 0, 0);
    assert_eq!(render(&mut streams, &batch(&[(1, "", 7, false)])), Ok((vec![], None)));
    assert_eq!(streams.close(1), Some(7));
}

#[test]
fn a_batch_of_strangers_is_handed_on_whole() {
    let given = batch(&[(1, "a", 1, false), (2, "b", 1, true)]);
    let (written, left) = render(&mut TextStreams::default(), &given).unwrap();
    assert_eq!((written, left.as_deref()), (vec![], Some(given.body())));
}

#[test]
fn a_batch_without_texts_is_malformed() {
    let mut streams = TextStreams::default();
    streams.open(1, Template::new(b"<", b">", true), 0, 0, 0);
    let bare = scan(vec!["BatchStrOutput".into(), Value::Array(vec![1.into()])]);
    assert!(matches!(render(&mut streams, &bare), Err(WireError::Body { column: "output_strs", .. })));
}

#[test]
fn tokens_and_gaps_of_open_streams_are_tallied() {
    let mut streams = TextStreams::default();
    for (rid, now) in [(1, 100), (2, 100), (3, 40)] {
        streams.open(rid, Template::new(b"<", b">", false), 0, 1, now);
    }
    let (_, tally) =
        streams.render(&batch(&[(1, "a", 2, false), (9, "x", 50, false), (2, "", 4, false)]), 120, |_, _| {}).unwrap();
    assert_eq!(tally, Tally { generated: 1 + 3, rank: Some(3), gaps: vec![(20, 2)] });
    let rows = [(1, "b", 3, false), (2, "c", 9, true), (3, "d", 2, false)];
    let (_, tally) = streams.render(&batch(&rows), 150, |_, _| {}).unwrap();
    assert_eq!(tally, Tally { generated: 1 + 5 + 1, rank: Some(3), gaps: vec![(30, 2), (110, 1)] });
    assert_eq!(streams.live(), 2, "a last row is tallied and closes its stream");
}
