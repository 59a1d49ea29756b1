//! Any batch is taken by a shard, and what the shard says is a batch.

use std::cell::RefCell;
use std::sync::Arc;

use servekit_core::detok::{Shard, ShardOutput, Vocabulary};
use servekit_core::wire::{Kind, ScannedBatch, TextOptions};

const TOKENIZER: &str = r#"{"version": "1.0", "added_tokens": [], "decoder": {"type": "ByteLevel", "add_prefix_space": false,
    "trim_offsets": true, "use_regex": true}, "model": {"type": "BPE", "vocab": {"a": 0, "Ã": 1, "©": 2, "Ġb": 3}, "merges": []}}"#;

thread_local! {
    static VOCABULARY: RefCell<Option<Arc<Vocabulary>>> = const { RefCell::new(None) };
}

/// Takes any bytes.
///
/// # Panics
/// They show a fault.
pub fn run(data: &[u8]) {
    let Some((&options, body)) = data.split_first() else { return };
    let Ok(batch) = ScannedBatch::parse(Kind::BatchTokenId, Arc::new(body.to_vec())) else { return };
    let vocabulary = VOCABULARY.with_borrow_mut(|known| {
        known.get_or_insert_with(|| Arc::new(Vocabulary::from_json(TOKENIZER.as_bytes()).unwrap())).clone()
    });
    let mut shard = Shard::new(0, 1, Some(vocabulary));
    for rid in batch.rids() {
        let options = TextOptions {
            stops: if options & 1 == 0 { vec![] } else { vec!["aé".to_owned(), "b".to_owned()] },
            include_stop: options & 2 != 0,
            skip_special_tokens: options & 4 != 0,
            text: options & 8 == 0,
            ids: options & 16 != 0,
            no_stop_trim: options & 32 != 0,
        };
        shard.open(*rid, options, body.len() % 2 == 0);
    }
    let mut output = ShardOutput::default();
    shard.batch(&batch, &mut output);
    shard.batch(&batch, &mut output);
    for frame in output.frames {
        let said = ScannedBatch::parse(frame.kind, Arc::new(frame.body)).unwrap();
        assert_eq!(said.rows(), frame.rows as usize);
    }
}
