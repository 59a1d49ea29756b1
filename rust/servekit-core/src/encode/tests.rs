use tokenizers::Tokenizer;

use super::memory::Memory;
use super::*;

/// A byte-level tokenizer with two merges, digits apart, and special tokens that begin alike.
const BYTE_LEVEL: &str = r##"{
    "version": "1.0", "truncation": null, "padding": null, "normalizer": null, "post_processor": {
        "type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}}], "pair": [{"Sequence": {"id": "A", "type_id": 0}},
        {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [300], "tokens": ["<s>"]}}},
    "added_tokens": [
        {"id": 300, "content": "<s>", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
            "special": true},
        {"id": 301, "content": "<s>x", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
            "special": true},
        {"id": 302, "content": "b<", "single_word": false, "lstrip": false, "rstrip": STRIP, "normalized": false,
            "special": true}],
    "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": true},
        {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true}]},
    "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
    "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
        "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
        "vocab": VOCAB, "merges": [["a", "b"], ["Ġ", "ab"]]}
}"##;

fn json(strip: bool) -> String {
    let characters = (0..0x200).filter_map(char::from_u32).filter(|c| crate::detok::byte_of(*c).is_some());
    let mut vocabulary: serde_json::Map<_, _> =
        characters.enumerate().map(|(id, c)| (c.to_string(), serde_json::json!(id))).collect();
    vocabulary.insert("ab".to_owned(), 256.into());
    vocabulary.insert("Ġab".to_owned(), 257.into());
    let vocabulary = serde_json::Value::Object(vocabulary).to_string();
    BYTE_LEVEL.replace("VOCAB", &vocabulary).replace("STRIP", if strip { "true" } else { "false" })
}

const TEXTS: [&str; 12] = [
    "",
    "ab ab",
    "<s>",
    "a<s>xb<s> ab12 ab",
    "ab<s>ab<s>",
    "b<s>x",
    "<s>b< \n ab<s>",
    " \n\n  ab\t'll 3 ½ é漢😀",
    "ab  1  ab",
    "<s><s><s>xx",
    "aab<s>aab<s>aab",
    "b<b<s>",
];

#[test]
fn ids_are_those_of_the_library_however_often_a_text_comes() {
    for strip in [false, true] {
        let json = json(strip);
        let library = Tokenizer::from_bytes(&json).unwrap();
        let encoder = Encoder::from_json(json.as_bytes(), 1 << 20).unwrap();
        assert_eq!(encoder.knows_words(), !strip);
        for text in TEXTS.iter().chain(&TEXTS) {
            for special in [false, true] {
                let wanted = library.encode(*text, special).unwrap();
                assert_eq!(encoder.encode(text, special).unwrap(), wanted.get_ids(), "{text:?} {special}");
            }
        }
    }
}

#[test]
fn a_longer_conversation_pays_for_its_new_turn() {
    let encoder = Encoder::from_json(json(false).as_bytes(), 1 << 20).unwrap();
    encoder.encode("<s>one<s>two", false).unwrap();
    let first = encoder.counts();
    assert_eq!((first.lookups, first.hits, first.hit_tokens), (1, 0, 0));
    assert_eq!(first.tokens, 8);
    encoder.encode("<s>one<s>two<s>xthree", false).unwrap();
    let second = encoder.counts();
    assert_eq!((second.lookups, second.hits, second.tokens, second.hit_tokens), (2, 1, 8 + 14, 8));
    assert!(second.bytes > first.bytes);
}

#[test]
fn what_is_remembered_stays_within_its_bound() {
    let mut memory = Memory::new(4000);
    let mut out = Vec::new();
    for i in 0..1000 {
        memory.remember(&format!("text {i}"), &[i, i]);
        assert!(memory.recall("text 0", &mut out), "what is asked for stays");
        assert!(memory.bytes() <= 4000, "{} bytes", memory.bytes());
    }
    assert!(out.iter().all(|id| *id == 0));
    assert!(!memory.recall("text 500", &mut out));
    assert!(memory.recall("text 999", &mut out));
    memory.remember(&"x".repeat(2000), &[1]);
    assert!(!memory.recall(&"x".repeat(2000), &mut out), "one text must not push out all others");
}
