use std::sync::Arc;

use proptest::prelude::*;

use super::*;
use crate::wire::{Envelope, Group, TextOptions};

fn parse(columns: &[&[u8]]) -> Result<ScannedBatch, WireError> {
    let mut body = vec![0x90 | (columns.len() as u8 + 1), 0xae];
    body.extend_from_slice(b"BatchStrOutput");
    columns.iter().for_each(|column| body.extend_from_slice(column));
    ScannedBatch::parse(Kind::BatchStr, Arc::new(body))
}

#[test]
fn rows_are_found_without_decoding() {
    let reasons = b"\x93\xc0\x94\xa4stop\x05\xc0\x00\x91\xa4what";
    let batch = parse(&[b"\x93\x01\xcc\xff\xcd\x01\x00", b"\xc0", reasons]).unwrap();
    assert_eq!(batch.rids(), [1, 255, 256]);
    assert_eq!([0, 1, 2].map(|row| batch.finished(row)), [false, true, true]);
    let types = [0, 1, 2].map(|row| batch.finish_type(row));
    assert_eq!(types, [None, Some(FinishType::Stop), Some(FinishType::Other)]);
    assert_eq!(batch.element(2, 2), Some(b"\x91\xa4what".as_slice()));
    assert_eq!((batch.element(1, 0), batch.element(2, 3), batch.element(99, 0)), (None, None, None));
}

#[test]
fn errors_name_column_and_place() {
    let error = parse(&[b"\x91\x01", b"\xc0", b"\xc0", b"\x92\x01\x02"]).unwrap_err();
    let at = 2 + 14 + 2 + 1 + 1;
    assert_eq!(error, WireError::Body { column: "prompt_tokens", at, what: "length differs from the batch's" });
}

#[test]
fn depth_is_bounded() {
    let mut deep = b"\x91\x01\xc0\xc0".to_vec();
    deep.extend_from_slice(&[0x91; 60]);
    deep.push(1);
    let columns = |deep: &[u8]| {
        let mut body = b"\x95\xaeBatchStrOutput".to_vec();
        body.extend_from_slice(deep);
        ScannedBatch::parse(Kind::BatchStr, Arc::new(body))
    };
    assert!(columns(&deep).is_ok());
    deep.splice(4..4, [0x91; 10]);
    assert!(matches!(columns(&deep), Err(WireError::Body { what: "nested too deep", .. })));
}

#[test]
fn lengths_beyond_the_body_allocate_nothing() {
    for huge in [b"\xdd\xff\xff\xff\xff".as_slice(), b"\xdc\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff"]
    {
        assert!(parse(&[huge]).is_err());
        assert!(parse(&[b"\x91\x01", &[b"\x91", huge].concat()]).is_err());
    }
}

proptest! {
    /// Whatever the bytes, reading them is an error or a value.
    #[test]
    fn any_bytes_are_survived(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        let _ = Envelope::parse(&bytes);
        let _ = TextOptions::parse(&bytes);
        let _ = Group::parse(&bytes);
        for kind in [Kind::BatchTokenId, Kind::BatchStr, Kind::BatchEmbedding] {
            let mut body = vec![0x90 | (bytes.len() as u8 & 15), 0xa0 | tag_of(kind).len() as u8];
            body.extend_from_slice(tag_of(kind).as_bytes());
            body.extend_from_slice(&bytes);
            if let Ok(batch) = ScannedBatch::parse(kind, Arc::new(body)) {
                for row in 0..batch.rows() {
                    let _ = (batch.finish_type(row), crate::split::handle_output_by_index(&batch, row));
                }
            }
        }
    }
}
