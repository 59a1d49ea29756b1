//! Text to token ids, as `tokenizers` would cut it and for less: what was cut before is remembered.
//!
//! A text is split at its special tokens into segments that do not see each other, so a conversation that comes back
//! pays for its new turn only. Inside a segment, byte-level vocabularies are cut into words by the tokenizer's own
//! patterns, and words are remembered too. Everything else is left to the library.

mod ascii;
mod encoder;
mod memory;
mod segments;
mod words;

pub use encoder::{Counts, Encoder};

#[cfg(test)]
mod tests;
