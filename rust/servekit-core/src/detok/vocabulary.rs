//! What all requests of a model share: how ids become text.

use std::path::Path;

use tokenizers::Tokenizer;

use super::table::{Table, token_of};

/// A tokenizer file that can't be read.
#[derive(Debug, thiserror::Error)]
#[error("can't read the tokenizer {path}: {reason}")]
pub struct VocabularyError {
    path: String,
    reason: String,
}

impl VocabularyError {
    pub(crate) fn new(path: &Path, reason: &impl ToString) -> Self {
        Self { path: path.display().to_string(), reason: reason.to_string() }
    }
}

/// How ids become text.
pub(super) enum Way {
    /// By a table of byte strings: byte-level, byte-fallback, WordPiece, Metaspace and plain vocabularies, whose decoding
    /// is the sum of what each token adds.
    Table(Table),
    /// By the tokenizer's own decoder over a window of ids, for all others.
    General(Box<Tokenizer>),
}

/// How a model's ids become text. Made once, shared by all shards.
pub struct Vocabulary {
    pub(super) way: Way,
}

impl Vocabulary {
    /// Read a `tokenizer.json`.
    ///
    /// # Errors
    /// There is no such file, or it is no tokenizer.
    pub fn from_file(path: impl AsRef<Path>) -> Result<Self, VocabularyError> {
        let path = path.as_ref();
        let json = std::fs::read(path).map_err(|error| VocabularyError::new(path, &error))?;
        Self::from_json(&json).map_err(|error| VocabularyError::new(path, &error))
    }

    /// As [`Vocabulary::from_file`], from the file's bytes.
    ///
    /// # Errors
    /// The bytes are no tokenizer.
    pub fn from_json(json: &[u8]) -> tokenizers::Result<Self> {
        let tokenizer = Tokenizer::from_bytes(json)?;
        let way = match Table::of(&tokenizer)? {
            Some(table) => Way::Table(table),
            None => Way::General(Box::new(tokenizer)),
        };
        Ok(Self { way })
    }

    /// Whether text comes from a table rather than from the tokenizer's decoder.
    pub fn is_table(&self) -> bool {
        matches!(self.way, Way::Table(_))
    }
}

/// Whether decoding takes the id: its token exists and is not skipped.
pub(super) fn has_text(tokenizer: &Tokenizer, id: u32, skip_special: bool) -> bool {
    token_of(tokenizer, id)
        .is_some_and(|token| !skip_special || !tokenizer.get_added_vocabulary().is_special_token(&token))
}
