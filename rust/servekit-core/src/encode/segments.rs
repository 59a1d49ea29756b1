//! Where a text may be cut without changing its tokens.

use aho_corasick::{AhoCorasick, MatchKind};
use tokenizers::Tokenizer;

/// How many tokens are tried on short texts.
const TRIED: usize = 8;

/// Cuts before special tokens.
///
/// The library looks for the tokens that are matched in raw text first, and what lies between is normalized, cut and
/// merged piece by piece. So a text is the sum of its parts if it is cut where such a match begins. A part begins with
/// the token, not after it, because some pre-tokenizers treat the very start of a text differently.
pub(super) struct Segments {
    tokens: AhoCorasick,
    /// By pattern: whether a part may begin with it, and its id.
    cuts: Vec<bool>,
    ids: Vec<u32>,
    plain: bool,
}

impl Segments {
    /// None if the tokenizer has tokens that look at what is around them, or fails the test on short texts.
    pub(super) fn of(tokenizer: &Tokenizer) -> Option<Self> {
        let added = tokenizer.get_added_vocabulary().get_added_tokens_decoder();
        let mut raw: Vec<_> =
            added.iter().filter(|(_, token)| !token.normalized && !token.content.is_empty()).collect();
        raw.sort_by_key(|(id, _)| **id);
        if raw.iter().any(|(_, token)| token.single_word) {
            return None;
        }
        let tokens = AhoCorasick::builder()
            .match_kind(MatchKind::LeftmostLongest)
            .build(raw.iter().map(|(_, token)| token.content.as_str()))
            .ok()?;
        let starts_well = |text: &str| !text.starts_with(char::is_whitespace);
        let segments = Self {
            tokens,
            cuts: raw.iter().map(|(_, t)| t.special && !t.lstrip && starts_well(&t.content)).collect(),
            ids: raw.iter().map(|(id, _)| **id).collect(),
            plain: raw.iter().all(|(_, token)| !token.lstrip && !token.rstrip) && raw.len() == added.len(),
        };
        let mut cuts = raw.iter().zip(&segments.cuts).filter(|(_, cut)| **cut).map(|((_, token), _)| &token.content);
        cuts.by_ref().take(TRIED).all(|token| adds_up(tokenizer, token)).then_some(segments)
    }

    /// The parts of a text, in order; none is empty.
    pub(super) fn split<'t>(&self, text: &'t str, mut part: impl FnMut(&'t str)) {
        let mut from = 0;
        for found in self.tokens.find_iter(text) {
            if self.cuts[found.pattern().as_usize()] && found.start() > from {
                part(&text[from..found.start()]);
                from = found.start();
            }
        }
        if from < text.len() {
            part(&text[from..]);
        }
    }

    /// Whether every added token stands for exactly its own text, so that what is between can be treated alone.
    pub(super) fn is_plain(&self) -> bool {
        self.plain
    }

    /// Added tokens of a text, and what is between them, in order. Only for plain ones.
    pub(super) fn pieces<'t>(&self, text: &'t str, mut piece: impl FnMut(Piece<'t>)) {
        let mut from = 0;
        for found in self.tokens.find_iter(text) {
            if found.start() > from {
                piece(Piece::Text(&text[from..found.start()]));
            }
            piece(Piece::Token(self.ids[found.pattern().as_usize()]));
            from = found.end();
        }
        if from < text.len() {
            piece(Piece::Text(&text[from..]));
        }
    }
}

/// A part of a text.
pub(super) enum Piece<'t> {
    /// An added token.
    Token(u32),
    /// What is between.
    Text(&'t str),
}

/// Whether texts with the token are the sum of what is before it and what begins with it.
fn adds_up(tokenizer: &Tokenizer, token: &str) -> bool {
    let ids = |text: &str| tokenizer.encode_fast(text, false).ok().map(|encoding| encoding.get_ids().to_vec());
    ["", "a", "a b ", "a\n"].iter().all(|before| {
        ["", "b", " b c", "\nb"].iter().all(|after| {
            let (Some(whole), Some(mut head), Some(tail)) =
                (ids(&format!("{before}{token}{after}")), ids(before), ids(&format!("{token}{after}")))
            else {
                return false;
            };
            head.extend(tail);
            whole == head
        })
    })
}
