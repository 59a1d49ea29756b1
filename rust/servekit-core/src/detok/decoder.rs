//! One request's way from ids to complete characters.

use tokenizers::Tokenizer;

use super::table::{Piece, Table};
use super::vocabulary::{Vocabulary, Way, has_text};

const REPLACEMENT: &[u8] = "\u{fffd}".as_bytes();

/// Most ids that the general way decodes at once. Text that is not clean by then is passed on as it is.
const WINDOW: usize = 64;

/// What a request must remember between two tokens.
#[derive(Default)]
pub(super) struct Decoder {
    /// A token has had text.
    started: bool,
    /// Characters that are still cut at the start; set at the first token.
    strip: usize,
    /// An incomplete character, or a run of byte tokens.
    tail: Vec<u8>,
    /// Ids that the general way decodes together.
    window: Vec<u32>,
    /// How many of these are context: their text is out.
    context: usize,
    /// Text of the context.
    context_text: String,
}

impl Decoder {
    /// Append what an id completes to `out`, which stays UTF-8. Unknown ids add nothing.
    ///
    /// # Errors
    /// The tokenizer's own decoder failed.
    pub(super) fn push(
        &mut self,
        vocabulary: &Vocabulary,
        id: u32,
        skip_special: bool,
        out: &mut Vec<u8>,
    ) -> Result<(), String> {
        match &vocabulary.way {
            Way::Table(table) => {
                if let Some(piece) = table.piece(id, !self.started, skip_special) {
                    self.push_piece(table, &piece, out);
                }
                Ok(())
            }
            Way::General(tokenizer) => {
                if has_text(tokenizer, id, skip_special) {
                    self.window.push(id);
                    self.decode_window(tokenizer, self.window.len() - self.context >= WINDOW, out)?;
                }
                Ok(())
            }
        }
    }

    /// Append what is left: an incomplete character becomes U+FFFD.
    ///
    /// # Errors
    /// As [`Decoder::push`].
    pub(super) fn finish(&mut self, vocabulary: &Vocabulary, out: &mut Vec<u8>) -> Result<(), String> {
        match &vocabulary.way {
            Way::Table(table) => {
                let start = out.len();
                if table.has_runs() {
                    self.end_run(out);
                } else if !self.tail.is_empty() {
                    self.tail.clear();
                    out.extend_from_slice(REPLACEMENT);
                }
                self.strip_start(table, start, out);
                Ok(())
            }
            Way::General(tokenizer) if self.window.len() > self.context => self.decode_window(tokenizer, true, out),
            Way::General(_) => Ok(()),
        }
    }

    /// Bytes that came and are not in the text yet: an upper bound of where they will end is that far behind it, for what
    /// becomes of them is never shorter.
    pub(super) fn held(&self) -> usize {
        self.tail.len() + usize::from(self.window.len() > self.context)
    }

    fn push_piece(&mut self, table: &Table, piece: &Piece<'_>, out: &mut Vec<u8>) {
        if !self.started {
            self.started = true;
            self.strip = table.strip.map_or(0, |(_, most)| most);
        }
        let start = out.len();
        match *piece {
            Piece::RunByte(byte) => {
                self.tail.push(byte);
                return;
            }
            Piece::Text(text) if self.tail.is_empty() => out.extend_from_slice(text),
            Piece::Text(bytes) | Piece::Bytes(bytes) => {
                if table.has_runs() {
                    self.end_run(out);
                    out.extend_from_slice(bytes);
                } else {
                    self.tail.extend_from_slice(bytes);
                    self.take_characters(out);
                }
            }
        }
        self.strip_start(table, start, out);
    }

    /// Move complete characters out of the tail, what can't become one as U+FFFD: one for each longest part that could
    /// have begun a character, as `String::from_utf8_lossy` does.
    fn take_characters(&mut self, out: &mut Vec<u8>) {
        let mut at = 0;
        loop {
            match std::str::from_utf8(&self.tail[at..]) {
                Ok(text) => {
                    out.extend_from_slice(text.as_bytes());
                    self.tail.clear();
                    return;
                }
                Err(error) => {
                    let valid = at + error.valid_up_to();
                    out.extend_from_slice(&self.tail[at..valid]);
                    match error.error_len() {
                        Some(broken) => {
                            out.extend_from_slice(REPLACEMENT);
                            at = valid + broken;
                        }
                        None => {
                            self.tail.drain(..valid);
                            return;
                        }
                    }
                }
            }
        }
    }

    /// A run of byte tokens ends: it is text as a whole, or one U+FFFD a byte.
    fn end_run(&mut self, out: &mut Vec<u8>) {
        if std::str::from_utf8(&self.tail).is_ok() {
            out.extend_from_slice(&self.tail);
        } else {
            self.tail.iter().for_each(|_| out.extend_from_slice(REPLACEMENT));
        }
        self.tail.clear();
    }

    fn strip_start(&mut self, table: &Table, start: usize, out: &mut Vec<u8>) {
        let Some((content, _)) = table.strip.filter(|_| self.strip > 0) else { return };
        let mut buffer = [0; 4];
        let content = content.encode_utf8(&mut buffer).as_bytes();
        while self.strip > 0 && out[start..].starts_with(content) {
            out.drain(start..start + content.len());
            self.strip -= 1;
        }
        if out.len() > start {
            self.strip = 0;
        }
    }

    /// Decode context and new ids together; what goes beyond the context's text is new, once it ends in no U+FFFD.
    fn decode_window(&mut self, tokenizer: &Tokenizer, whatever: bool, out: &mut Vec<u8>) -> Result<(), String> {
        let text = tokenizer.decode(&self.window, false).map_err(|error| error.to_string())?;
        if text.ends_with('\u{fffd}') && !whatever {
            return Ok(());
        }
        match text.strip_prefix(self.context_text.as_str()) {
            Some(new) => out.extend_from_slice(new.as_bytes()),
            // Text that is out can't be taken back.
            None if whatever => {}
            None => return Ok(()),
        }
        self.window.drain(..self.context);
        self.context = self.window.len();
        self.context_text = tokenizer.decode(&self.window, false).map_err(|error| error.to_string())?;
        Ok(())
    }
}
