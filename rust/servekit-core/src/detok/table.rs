//! A vocabulary as a table of byte strings.

use tokenizers::{Decoder, DecoderWrapper, Tokenizer};

/// The id has a token.
const PRESENT: u32 = 1;
/// The token is special.
const SPECIAL: u32 = 2;
/// The token stands for one byte of a run.
const BYTE: u32 = 4;
/// The token's bytes are UTF-8.
const TEXT: u32 = 8;

/// Highest token id that a table is made for; above it, something is wrong with the file.
const MAX_ID: u32 = 1 << 24;

/// What an id adds, in one word: where its bytes start, how many they are, and the flags.
#[derive(Clone, Copy)]
struct Entry {
    start: u32,
    len_and_flags: u32,
}

/// Bits of [`Entry::len_and_flags`] that are flags.
const FLAG_BITS: u32 = 4;

/// Byte strings with flags, by id.
#[derive(Default)]
struct Strings {
    bytes: Vec<u8>,
    entries: Vec<Entry>,
}

impl Strings {
    fn push(&mut self, flags: u32, string: &[u8]) {
        let start = self.bytes.len() as u32;
        self.entries.push(Entry { start, len_and_flags: (string.len() as u32) << FLAG_BITS | flags });
        self.bytes.extend_from_slice(string);
    }

    /// Flags and bytes of an id; None if the table ends before it.
    #[inline]
    fn get(&self, id: u32) -> Option<(u32, &[u8])> {
        let entry = self.entries.get(id as usize)?;
        let bytes = self.bytes.get(entry.start as usize..)?.get(..(entry.len_and_flags >> FLAG_BITS) as usize)?;
        Some((entry.len_and_flags & ((1 << FLAG_BITS) - 1), bytes))
    }
}

/// What a token adds to the text.
pub(super) enum Piece<'a> {
    /// UTF-8.
    Text(&'a [u8]),
    /// Bytes that need their neighbours to be UTF-8.
    Bytes(&'a [u8]),
    /// One byte of a run of such tokens, which becomes text as a whole.
    RunByte(u8),
}

/// What each token adds to the text, for the decoders whose result is the sum of such pieces.
pub(super) struct Table {
    pieces: Strings,
    /// Pieces of a text's first token, where they differ.
    first: Option<Strings>,
    /// A character of which up to so many are cut at the text's start.
    pub(super) strip: Option<(char, usize)>,
    /// There are tokens that stand for a byte of a run.
    runs: bool,
}

/// How a decoder is read as a table.
enum Reading {
    /// Characters stand for bytes; what is no UTF-8 in the end becomes U+FFFD.
    ByteLevel,
    /// Each token becomes a text that depends only on the token and on whether it is the first.
    Each(Vec<DecoderWrapper>),
    /// As `Each` and position does not matter; `<0xNN>` tokens are bytes, and a run of them that is no UTF-8 becomes one
    /// U+FFFD a byte.
    ByteFallback { before: Vec<DecoderWrapper>, strip: Option<(char, usize)> },
    /// No decoder: tokens are joined by spaces.
    Spaces,
}

impl Reading {
    /// None for decoders that must see more than a token: those need the general way.
    fn of(decoder: Option<&DecoderWrapper>) -> Option<Self> {
        let Some(decoder) = decoder else { return Some(Self::Spaces) };
        let parts = match decoder {
            DecoderWrapper::Sequence(sequence) => sequence.get_decoders(),
            one => std::slice::from_ref(one),
        };
        match parts {
            [DecoderWrapper::ByteLevel(_)] => return Some(Self::ByteLevel),
            [each @ .., DecoderWrapper::Fuse(_)] | each if each.iter().all(is_each) => {
                return Some(Self::Each(each.to_vec()));
            }
            _ => {}
        }
        let split = parts.iter().position(|part| matches!(part, DecoderWrapper::ByteFallback(_)))?;
        let (before, after) = (&parts[..split], &parts[split + 1..]);
        let strip = match after {
            [] | [DecoderWrapper::Fuse(_)] => None,
            [DecoderWrapper::Fuse(_), DecoderWrapper::Strip(strip)] if strip.stop == 0 => {
                Some((strip.content, strip.start))
            }
            _ => return None,
        };
        let replaces = before.iter().all(|part| matches!(part, DecoderWrapper::Replace(_)));
        replaces.then(|| Self::ByteFallback { before: before.to_vec(), strip })
    }
}

fn is_each(decoder: &DecoderWrapper) -> bool {
    matches!(decoder, DecoderWrapper::WordPiece(_) | DecoderWrapper::Metaspace(_) | DecoderWrapper::Replace(_))
}

/// A token's text, as the first of a text or after another token.
fn decode_each(decoders: &[DecoderWrapper], token: &str, first: bool) -> tokenizers::Result<String> {
    let mut chain = if first { vec![token.to_owned()] } else { vec!["a".to_owned(), token.to_owned()] };
    for decoder in decoders {
        chain = decoder.decode_chain(chain)?;
    }
    Ok(chain.pop().unwrap_or_default())
}

/// What the byte-level decoder makes of a token: the bytes that its characters stand for, or its own if one does not.
fn byte_level(token: &str) -> Vec<u8> {
    token.chars().map(byte_of).collect::<Option<_>>().unwrap_or_else(|| token.as_bytes().to_vec())
}

/// The byte that a character stands for in byte-level vocabularies: printable ones for themselves, the other 68 bytes
/// are U+0100 and following.
pub(crate) fn byte_of(c: char) -> Option<u8> {
    let printable = |byte: u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    match u32::from(c) {
        code @ 0..=0xff => Some(code as u8).filter(|byte| printable(*byte)),
        code @ 0x100..=0x143 => (0..=0xff).filter(|byte| !printable(*byte)).nth(code as usize - 0x100),
        _ => None,
    }
}

/// The byte of a `<0xNN>` token.
fn fallback_byte(token: &str) -> Option<u8> {
    let digits = token.strip_prefix("<0x")?.strip_suffix('>')?;
    if digits.len() == 2 { u8::from_str_radix(digits, 16).ok() } else { None }
}

impl Table {
    /// None if the tokenizer's decoder can't be read as a table.
    pub(super) fn of(tokenizer: &Tokenizer) -> tokenizers::Result<Option<Self>> {
        let Some(reading) = Reading::of(tokenizer.get_decoder()) else { return Ok(None) };
        let Some(last) = tokenizer.get_vocab(true).values().copied().max() else { return Ok(None) };
        if last > MAX_ID {
            return Err(format!("token id {last} is too large").into());
        }
        let positional = matches!(reading, Reading::Each(_) | Reading::Spaces);
        let mut table = Self {
            pieces: Strings::default(),
            first: positional.then(Strings::default),
            strip: None,
            runs: matches!(reading, Reading::ByteFallback { .. }),
        };
        if let Reading::ByteFallback { strip, .. } = reading {
            table.strip = strip;
        }
        for id in 0..=last {
            match token_of(tokenizer, id) {
                Some(token) => table.push(tokenizer, &reading, &token)?,
                None => table.push_piece(0, b"", b""),
            }
        }
        Ok(Some(table))
    }

    fn push(&mut self, tokenizer: &Tokenizer, reading: &Reading, token: &str) -> tokenizers::Result<()> {
        let mut flags = PRESENT;
        if tokenizer.get_added_vocabulary().is_special_token(token) {
            flags |= SPECIAL;
        }
        match reading {
            Reading::ByteLevel => self.push_piece(flags, &byte_level(token), b""),
            Reading::Spaces => self.push_piece(flags, format!(" {token}").as_bytes(), token.as_bytes()),
            Reading::Each(decoders) => {
                let (rest, first) = (decode_each(decoders, token, false)?, decode_each(decoders, token, true)?);
                self.push_piece(flags, rest.as_bytes(), first.as_bytes());
            }
            Reading::ByteFallback { before, .. } => {
                let text = decode_each(before, token, true)?;
                match fallback_byte(&text) {
                    Some(byte) => self.push_piece(flags | BYTE, &[byte], b""),
                    None => self.push_piece(flags, text.as_bytes(), b""),
                }
            }
        }
        Ok(())
    }

    fn push_piece(&mut self, flags: u32, rest: &[u8], first: &[u8]) {
        let text = if std::str::from_utf8(rest).is_ok() { TEXT } else { 0 };
        self.pieces.push(flags | text, rest);
        if let Some(strings) = &mut self.first {
            strings.push(flags | text, first);
        }
    }

    /// Whether incomplete text is a run of byte tokens rather than an incomplete character.
    pub(super) fn has_runs(&self) -> bool {
        self.runs
    }

    /// What a token adds; None if there is no such token or it is skipped.
    #[inline]
    pub(super) fn piece(&self, id: u32, first: bool, skip_special: bool) -> Option<Piece<'_>> {
        let strings = self.first.as_ref().filter(|_| first).unwrap_or(&self.pieces);
        let (flags, bytes) = strings.get(id)?;
        let skipped = if skip_special { SPECIAL } else { 0 };
        match flags & (PRESENT | BYTE | TEXT | skipped) {
            flags if flags == PRESENT | TEXT => Some(Piece::Text(bytes)),
            flags if flags & PRESENT == 0 || flags & skipped != 0 => None,
            flags if flags & BYTE != 0 => bytes.first().map(|byte| Piece::RunByte(*byte)),
            _ => Some(Piece::Bytes(bytes)),
        }
    }
}

/// The token that decoding takes for an id.
pub(super) fn token_of(tokenizer: &Tokenizer, id: u32) -> Option<String> {
    use tokenizers::Model;
    tokenizer.get_added_vocabulary().simple_id_to_token(id).or_else(|| tokenizer.get_model().id_to_token(id))
}
