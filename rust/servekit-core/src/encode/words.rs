//! Byte-level vocabularies: text is cut into words by patterns, and each word is merged by itself.

use onig::Regex;
use parking_lot::Mutex;
use serde_json::Value;
use tokenizers::{Model, ModelWrapper, Tokenizer};

use super::ascii::{DIGIT, GPT2, gpt2_end};
use super::memory::Memory;
use crate::detok::byte_of;

const REMEMBERED: usize = 8 << 20;
/// Longer words are rare, and not worth their place.
const LONGEST: usize = 64;

/// One pass over a text.
enum Cut {
    /// Every match and every gap between matches is a piece.
    Matches(Regex),
    /// As `Matches`, of the pattern of which is known what it finds in ASCII.
    Gpt2(Regex),
    /// As `Matches`, of a pattern that finds digits in ASCII.
    Numbers(Regex),
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
            cuts.push(matches(GPT2)?);
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
            matches(json["pattern"]["Regex"].as_str()?)
        }
        "Digits" if json["individual_digits"] == true => Some(Cut::Digits),
        _ => None,
    }
}

fn matches(pattern: &str) -> Option<Cut> {
    let regex = Regex::new(pattern).ok()?;
    Some(match pattern {
        GPT2 => Cut::Gpt2(regex),
        DIGIT => Cut::Numbers(regex),
        _ => Cut::Matches(regex),
    })
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
        Cut::Gpt2(_) if text.is_ascii() => {
            let mut at = 0;
            while at < text.len() {
                let end = gpt2_end(text.as_bytes(), at);
                piece(at, end);
                at = end;
            }
        }
        Cut::Numbers(_) if text.is_ascii() => {
            let digits = text.bytes().enumerate().filter(|(_, byte)| byte.is_ascii_digit());
            digits.for_each(|(at, _)| piece(at, at + 1));
        }
        Cut::Matches(pattern) | Cut::Gpt2(pattern) | Cut::Numbers(pattern) => {
            pattern.find_iter(text).for_each(|(start, end)| piece(start, end));
        }
        Cut::Digits => text
            .char_indices()
            .filter(|(_, c)| c.is_numeric())
            .for_each(|(start, c)| piece(start, start + c.len_utf8())),
    }
    each_word(rest, &text[from..], word);
}
