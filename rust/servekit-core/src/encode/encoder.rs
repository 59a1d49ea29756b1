//! A model's tokenizer for prompts.

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use tokenizers::Tokenizer;

use super::memory::Memory;
use super::segments::{Piece, Segments};
use super::words::Words;
use crate::detok::VocabularyError;

/// What the memory of segments was good for, since the start.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Counts {
    /// Texts that were looked up.
    pub lookups: u64,
    /// Those of them of which it knew a part.
    pub hits: u64,
    /// Tokens of all these texts.
    pub tokens: u64,
    /// Those of them that it knew.
    pub hit_tokens: u64,
    /// Bytes in it now, about.
    pub bytes: u64,
}

#[derive(Default)]
struct Counters {
    lookups: AtomicU64,
    hits: AtomicU64,
    tokens: AtomicU64,
    hit_tokens: AtomicU64,
}

/// Text to ids. Any number of threads may encode at once; none waits for another's text.
pub struct Encoder {
    tokenizer: Tokenizer,
    /// Ids that the tokenizer puts before and after a text if special tokens are wanted; None if it is not that simple.
    around: Option<(Vec<u32>, Vec<u32>)>,
    segments: Option<Segments>,
    words: Option<Words>,
    known: Mutex<Memory>,
    counters: Counters,
}

impl Encoder {
    /// Read a `tokenizer.json`; segments of up to `remembered` bytes are remembered.
    ///
    /// # Errors
    /// There is no such file, or it is no tokenizer.
    pub fn from_file(path: impl AsRef<Path>, remembered: usize) -> Result<Self, VocabularyError> {
        let path = path.as_ref();
        let json = std::fs::read(path).map_err(|error| VocabularyError::new(path, &error))?;
        Self::from_json(&json, remembered).map_err(|error| VocabularyError::new(path, &error))
    }

    /// As [`Encoder::from_file`], from the file's bytes.
    ///
    /// # Errors
    /// The bytes are no tokenizer.
    pub fn from_json(json: &[u8], remembered: usize) -> tokenizers::Result<Self> {
        let mut tokenizer = Tokenizer::from_bytes(json)?;
        tokenizer.with_truncation(None)?;
        tokenizer.with_padding(None);
        let segments = Segments::of(&tokenizer);
        let words = segments.as_ref().filter(|segments| segments.is_plain()).and_then(|_| Words::of(&tokenizer));
        Ok(Self {
            around: around(&tokenizer)?,
            tokenizer,
            segments,
            words,
            known: Mutex::new(Memory::new(remembered)),
            counters: Counters::default(),
        })
    }

    /// Ids of a text; with `special`, those of the tokens that the model wants around it too.
    ///
    /// # Errors
    /// The model has no token for a part of the text, and none for what it does not know.
    pub fn encode(&self, text: &str, special: bool) -> tokenizers::Result<Vec<u32>> {
        let mut ids = Vec::with_capacity(text.len() / 3 + 8);
        let (before, after) = match (&self.around, special) {
            (Some(around), true) => (&around.0[..], &around.1[..]),
            (None, true) => {
                ids.extend_from_slice(self.tokenizer.encode_fast(text, true)?.get_ids());
                return Ok(ids);
            }
            (_, false) => (&[][..], &[][..]),
        };
        ids.extend_from_slice(before);
        self.append(text, &mut ids)?;
        ids.extend_from_slice(after);
        Ok(ids)
    }

    /// What the memory was good for.
    pub fn counts(&self) -> Counts {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Counts {
            lookups: load(&self.counters.lookups),
            hits: load(&self.counters.hits),
            tokens: load(&self.counters.tokens),
            hit_tokens: load(&self.counters.hit_tokens),
            bytes: self.known.lock().bytes() as u64,
        }
    }

    /// Whether texts are cut into words here rather than by the library.
    pub fn knows_words(&self) -> bool {
        self.words.is_some()
    }

    /// Characters of the longest token.
    pub fn longest_token(&self) -> usize {
        self.tokenizer.get_vocab(true).keys().map(|token| token.chars().count()).max().unwrap_or(0)
    }

    fn append(&self, text: &str, ids: &mut Vec<u32>) -> tokenizers::Result<()> {
        let Some(segments) = &self.segments else { return self.append_new(text, ids) };
        let start = ids.len();
        let mut recalled = 0;
        let mut outcome = Ok(());
        segments.split(text, |segment| {
            let at = ids.len();
            if outcome.is_err() {
                return;
            }
            if self.known.lock().recall(segment, ids) {
                recalled += ids.len() - at;
                return;
            }
            outcome = self.append_new(segment, ids);
            if outcome.is_ok() {
                self.known.lock().remember(segment, &ids[at..]);
            }
        });
        let add = |counter: &AtomicU64, n: usize| counter.fetch_add(n as u64, Ordering::Relaxed);
        add(&self.counters.lookups, 1);
        add(&self.counters.hits, usize::from(recalled > 0));
        add(&self.counters.tokens, ids.len() - start);
        add(&self.counters.hit_tokens, recalled);
        outcome
    }

    fn append_new(&self, text: &str, ids: &mut Vec<u32>) -> tokenizers::Result<()> {
        let (Some(segments), Some(words)) = (&self.segments, &self.words) else {
            ids.extend_from_slice(self.tokenizer.encode_fast(text, false)?.get_ids());
            return Ok(());
        };
        let mut outcome = Ok(());
        segments.pieces(text, |piece| match piece {
            Piece::Token(id) => ids.push(id),
            Piece::Text(text) if outcome.is_ok() => {
                outcome = if words.take(text) {
                    words.encode(self.tokenizer.get_model(), text, ids)
                } else {
                    self.tokenizer.encode_fast(text, false).map(|found| ids.extend_from_slice(found.get_ids()))
                };
            }
            Piece::Text(_) => {}
        });
        outcome
    }
}

/// What the tokenizer puts around any text, found by trying two; None if it does more than that.
fn around(tokenizer: &Tokenizer) -> tokenizers::Result<Option<(Vec<u32>, Vec<u32>)>> {
    let mut found = None;
    for text in ["a", "b c d"] {
        let (with, bare) = (tokenizer.encode_fast(text, true)?, tokenizer.encode_fast(text, false)?);
        let (with, bare) = (with.get_ids(), bare.get_ids());
        let place = with.windows(bare.len().max(1)).position(|window| window == bare);
        let Some(place) = place else { return Ok(None) };
        let this = (with[..place].to_vec(), with[place + bare.len()..].to_vec());
        if found.as_ref().is_some_and(|found| *found != this) {
            return Ok(None);
        }
        found = Some(this);
    }
    Ok(found)
}
