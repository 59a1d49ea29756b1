//! Bodies of batches, and tokens that tell who made them.

use std::sync::{Arc, LazyLock};

use servekit_core::detok::Vocabulary;
use servekit_core::wire::columns::batch_str;
use servekit_core::wire::{Kind, Rid, ScannedBatch};

/// Most tokens of one request.
pub(crate) const MAX_TOKENS: u32 = 64;
const IDS: u32 = 4 * 8 * 4 * MAX_TOKENS;

/// A token that tells which rank in which life made it, of which request it is, and where in it it stands.
pub(crate) fn token(rank: usize, epoch: u32, rid: Rid, position: u32) -> u32 {
    (((rank as u32 % 4) * 8 + epoch % 8) * 4 + (rid.0 % 4) as u32) * MAX_TOKENS + position
}

/// Each token is seven letters of four, so that stop strings of a few letters come up by chance.
pub(crate) static VOCABULARY: LazyLock<Arc<Vocabulary>> = LazyLock::new(|| {
    let letters = |id: u32| {
        let scrambled = id.wrapping_mul(5741) % (1 << 14);
        (0..7).map(|place| char::from(b'a' + (scrambled >> (2 * place) & 3) as u8)).collect::<String>()
    };
    let tokens = (0..IDS).map(|id| format!("\"{}\": {id}", letters(id))).collect::<Vec<_>>().join(",");
    let json = format!(
        r#"{{"version": "1.0", "added_tokens": [], "decoder": {{"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false}},
            "model": {{"type": "WordLevel", "vocab": {{{tokens}}}, "unk_token": "{}"}}}}"#,
        letters(0)
    );
    Arc::new(Vocabulary::from_json(json.as_bytes()).expect("a tokenizer"))
});

/// One request in a step of a rank.
pub(crate) struct Row {
    pub(crate) rid: Rid,
    pub(crate) tokens: Vec<u32>,
    /// Type of the finished reason.
    pub(crate) end: Option<&'static str>,
}

/// The body of a step.
pub(crate) fn step(rows: &[Row]) -> Arc<ScannedBatch> {
    let mut body = b"\x9a\xb2BatchTokenIDOutput".to_vec();
    let head = |body: &mut Vec<u8>| {
        body.push(0xdc);
        body.extend_from_slice(&(rows.len() as u16).to_be_bytes());
    };
    head(&mut body);
    for row in rows {
        body.push(0xcf);
        body.extend_from_slice(&row.rid.0.to_be_bytes());
    }
    body.push(0xc0);
    head(&mut body);
    for row in rows {
        match row.end {
            None => body.push(0xc0),
            Some(end) => {
                body.extend_from_slice(&[0x91, 0xa0 | end.len() as u8]);
                body.extend_from_slice(end.as_bytes());
            }
        }
    }
    body.extend_from_slice(&[0xc0; 5]);
    head(&mut body);
    for row in rows {
        body.extend_from_slice(&[0xc4, 4 * row.tokens.len() as u8]);
        row.tokens.iter().for_each(|token| body.extend_from_slice(&token.to_le_bytes()));
    }
    Arc::new(ScannedBatch::parse(Kind::BatchTokenId, Arc::new(body)).expect("a step"))
}

/// What a worker reads of a row of text.
pub(crate) struct TextRow {
    pub(crate) rid: Rid,
    pub(crate) tokens: Vec<u32>,
    pub(crate) ended: bool,
}

/// Rows of a body of text.
pub(crate) fn text_rows(body: &[u8]) -> Vec<TextRow> {
    let batch = ScannedBatch::parse(Kind::BatchStr, Arc::new(body.to_vec())).expect("rows of text");
    let tokens = |row| match batch.element(batch_str::OUTPUT_IDS, row) {
        Some([0xc4, _, ids @ ..]) => ids.as_chunks::<4>().0.iter().map(|id| u32::from_le_bytes(*id)).collect(),
        Some([0xc0]) | None => Vec::new(),
        Some(other) => panic!("ids are {other:x?}"),
    };
    let row = |row| TextRow { rid: Rid(batch.rid(row)), tokens: tokens(row), ended: batch.finished(row) };
    (0..batch.rows()).map(row).collect()
}
