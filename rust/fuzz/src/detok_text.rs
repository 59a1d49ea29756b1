//! The pieces of a text add up to it, however its tokens are dealt to steps and whatever stop strings it has.

use std::cell::RefCell;
use std::sync::Arc;

use servekit_core::detok::{Shard, ShardOutput, Vocabulary};
use servekit_core::split::extract_field_by_index;
use servekit_core::wire::{Kind, ScannedBatch, TextOptions};

/// One token a byte for the first 16 that make characters of one to four bytes, or none.
const BYTES: [u8; 16] =
    [b'a', b'b', b' ', b'\n', 0xc3, 0xa9, 0xe6, 0x97, 0xa5, 0xf0, 0x9f, 0x98, 0x80, 0xff, 0xed, 0xa0];
/// Those bytes as byte-level tokens.
const TOKENIZER: &str = r#"{"version": "1.0", "added_tokens": [], "decoder": {"type": "ByteLevel", "add_prefix_space": false,
    "trim_offsets": true, "use_regex": true}, "model": {"type": "BPE", "merges": [], "vocab": {"a": 0, "b": 1, "Ġ": 2,
    "Ċ": 3, "Ã": 4, "©": 5, "æ": 6, "Ĺ": 7, "¥": 8, "ð": 9, "Ł": 10, "ĺ": 11, "Ģ": 12, "ÿ": 13, "í": 14, "ł": 15}}}"#;

thread_local! {
    static VOCABULARY: RefCell<Option<Arc<Vocabulary>>> = const { RefCell::new(None) };
}

/// Takes any bytes: how many stop strings and how long, these, then tokens, four bits each; the other four bits say
/// whether a step ends there.
///
/// # Panics
/// They show a fault.
pub fn run(data: &[u8]) {
    let Some((&first, rest)) = data.split_first() else { return };
    let (count, len) = (usize::from(first >> 6), usize::from(first & 7));
    if rest.len() < count * len {
        return;
    }
    let (stops, tokens) = rest.split_at(count * len);
    let letters = |bytes: &[u8]| bytes.iter().map(|byte| char::from(b"ab\n"[usize::from(byte % 3)])).collect();
    let stops: Vec<String> = if len == 0 { vec![] } else { stops.chunks(len).map(letters).collect() };
    let vocabulary = VOCABULARY.with_borrow_mut(|known| {
        known.get_or_insert_with(|| Arc::new(Vocabulary::from_json(TOKENIZER.as_bytes()).unwrap())).clone()
    });
    let mut shard = Shard::new(0, 1, Some(vocabulary));
    let options = TextOptions { stops: stops.clone(), include_stop: first & 8 != 0, ..TextOptions::default() };
    shard.open(7, options, true);
    let mut text = String::new();
    let mut ended = false;
    for step in tokens.chunk_by(|token, _| token & 0x10 == 0) {
        let ids: Vec<u8> = step.iter().flat_map(|token| u32::from(token & 15).to_le_bytes()).collect();
        ended |= take(&mut shard, &ids, false, &mut text);
    }
    if !ended {
        take(&mut shard, &[], true, &mut text);
    }
    let bytes: Vec<u8> = tokens.iter().map(|token| BYTES[usize::from(token & 15)]).collect();
    assert_eq!(text, expected(&String::from_utf8_lossy(&bytes), &stops, first & 8 != 0));
}

/// One step of the request; whether a stop string ended it.
fn take(shard: &mut Shard, ids: &[u8], last: bool, text: &mut String) -> bool {
    let mut body = b"\x9a\xb2BatchTokenIDOutput\x91\x07\xc0\x91".to_vec();
    body.extend_from_slice(if last { b"\x91\xa6length" } else { b"\xc0" });
    body.extend_from_slice(b"\xc0\xc0\xc0\xc0\xc0\x91\xc6");
    body.extend_from_slice(&(ids.len() as u32).to_be_bytes());
    body.extend_from_slice(ids);
    let mut output = ShardOutput::default();
    shard.batch(&ScannedBatch::parse(Kind::BatchTokenId, Arc::new(body)).unwrap(), &mut output);
    for frame in output.frames {
        let rows = ScannedBatch::parse(Kind::BatchStr, Arc::new(frame.body)).unwrap();
        // A column of one text of up to 2^32 bytes.
        let field = extract_field_by_index(&rows, "output_strs", 0).unwrap();
        let head = match field[1] {
            0xa0..=0xbf => 2,
            0xd9 => 3,
            0xda => 4,
            _ => 6,
        };
        text.push_str(std::str::from_utf8(&field[head..]).unwrap());
    }
    !output.aborts.is_empty()
}

/// The text up to the stop string that is complete first, the longest of those that end together.
fn expected(text: &str, stops: &[String], keep: bool) -> String {
    let ends = (1..=text.len()).filter(|end| text.is_char_boundary(*end));
    for end in ends {
        let found = stops.iter().filter(|stop| text[..end].ends_with(stop.as_str())).map(String::len).max();
        if let Some(len) = found {
            return text[..if keep { end } else { end - len }].to_owned();
        }
    }
    text.to_owned()
}
