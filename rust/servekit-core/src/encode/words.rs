//! Byte-level vocabularies: text is cut into words by patterns, and each word is merged by itself.

use onig::Regex;
use parking_lot::Mutex;
use serde_json::Value;
use tokenizers::{Model, ModelWrapper, Tokenizer};

use super::memory::Memory;
use crate::detok::byte_of;

/// The pattern that `ByteLevel` cuts by, unless it is told not to.
const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
const REMEMBERED: usize = 8 << 20;
/// Longer words are rare, and not worth their place.
const LONGEST: usize = 64;

/// One pass over a text.
enum Cut {
    /// Every match and every gap between matches is a piece.
    Matches(Regex),
    /// Every digit is a piece.
    Digits,
}

/// A text's way to its tokens, from outside to inside.
pub(super) struct Words {
    cuts: Vec<Cut>,
    /// Normalizing changes nothing in ASCII; other text has to be normalized first.
    ascii_only: bool,
    characters: [char; 256],
    known: Mutex<Memory>,
}

impl Words {
    /// None unless the tokenizer is one whose words are what `cuts` find.
    pub(super) fn of(tokenizer: &Tokenizer) -> Option<Self> {
        let ModelWrapper::BPE(model) = tokenizer.get_model() else { return None };
        if model.dropout.is_some_and(|dropout| dropout > 0.0) {
            return None;
        }
        // The library shows what these are made of in their JSON only.
        let normalizer = serde_json::to_value(tokenizer.get_normalizer()).ok()?;
        let pre_tokenizer = serde_json::to_value(tokenizer.get_pre_tokenizer()).ok()?;
        let ascii_only = match &normalizer {
            Value::Null => false,
            normalizer => match normalizer["type"].as_str()? {
                "NFC" | "NFD" | "NFKC" | "NFKD" => true,
                _ => return None,
            },
        };
        let mut cuts = Vec::new();
        let last = match &pre_tokenizer {
            one if one["type"] == "Sequence" => {
                let (last, before) = one["pretokenizers"].as_array()?.split_last()?;
                for each in before {
                    cuts.push(cut(each)?);
                }
                last
            }
            one => one,
        };
        if last["type"] != "ByteLevel" || last["add_prefix_space"] != false {
            return None;
        }
        if last["use_regex"] != false {
            cuts.push(Cut::Matches(Regex::new(GPT2).ok()?));
        }
        let mut characters = ['\0'; 256];
        for c in (0..0x200).filter_map(char::from_u32) {
            if let Some(byte) = byte_of(c) {
                characters[usize::from(byte)] = c;
            }
        }
        Some(Self { cuts, ascii_only, characters, known: Mutex::new(Memory::new(REMEMBERED)) })
    }

    /// Whether a text can go this way.
    pub(super) fn take(&self, text: &str) -> bool {
        !self.ascii_only || text.is_ascii()
    }

    /// Append the ids of a text without added tokens.
    ///
    /// # Errors
    /// The model refuses a word.
    pub(super) fn encode(&self, model: &ModelWrapper, text: &str, out: &mut Vec<u32>) -> tokenizers::Result<()> {
        let mut outcome = Ok(());
        each_word(&self.cuts, text, &mut |word| {
            if outcome.is_ok() && !self.known.lock().recall(word, out) {
                outcome = self.merge(model, word, out);
            }
        });
        outcome
    }

    fn merge(&self, model: &ModelWrapper, word: &str, out: &mut Vec<u32>) -> tokenizers::Result<()> {
        let start = out.len();
        let characters: String = word.bytes().map(|byte| self.characters[usize::from(byte)]).collect();
        out.extend(model.tokenize(&characters)?.into_iter().map(|token| token.id));
        if word.len() <= LONGEST {
            self.known.lock().remember(word, &out[start..]);
        }
        Ok(())
    }
}

/// A pre-tokenizer before the last one.
fn cut(json: &Value) -> Option<Cut> {
    match json["type"].as_str()? {
        "Split" if json["behavior"] == "Isolated" && json["invert"] == false => {
            Some(Cut::Matches(Regex::new(json["pattern"]["Regex"].as_str()?).ok()?))
        }
        "Digits" if json["individual_digits"] == true => Some(Cut::Digits),
        _ => None,
    }
}

fn each_word<'t>(cuts: &[Cut], text: &'t str, word: &mut dyn FnMut(&'t str)) {
    if text.is_empty() {
        return;
    }
    let Some((first, rest)) = cuts.split_first() else {
        word(text);
        return;
    };
    let mut from = 0;
    let mut piece = |start: usize, end: usize| {
        each_word(rest, &text[from..start], word);
        each_word(rest, &text[start..end], word);
        from = end;
    };
    match first {
        Cut::Matches(pattern) => pattern.find_iter(text).for_each(|(start, end)| piece(start, end)),
        Cut::Digits => text
            .char_indices()
            .filter(|(_, c)| c.is_numeric())
            .for_each(|(start, c)| piece(start, start + c.len_utf8())),
    }
    each_word(rest, &text[from..], word);
}
