//! One event around a text.

use super::escape_json;

/// What stands around the text in every event of one stream.
#[derive(Debug, Clone)]
pub struct Template {
    before: Box<[u8]>,
    after: Box<[u8]>,
    chunked: bool,
}

impl Template {
    /// A template.
    ///
    /// `before` ends before the opening quote of the text's JSON string and `after` begins behind the closing one;
    /// with `chunked` each event is an HTTP chunk of its own.
    pub fn new(before: &[u8], after: &[u8], chunked: bool) -> Self {
        Self { before: [before, b"\""].concat().into(), after: [b"\"", after].concat().into(), chunked }
    }

    /// The event with this text, instead of what `out` held. `scratch` is only kept for its memory.
    pub fn event(&self, text: &str, scratch: &mut Vec<u8>, out: &mut Vec<u8>) {
        out.clear();
        if !self.chunked {
            out.extend_from_slice(&self.before);
            escape_json(text, out);
            out.extend_from_slice(&self.after);
            return;
        }
        scratch.clear();
        escape_json(text, scratch);
        write_hex(self.before.len() + scratch.len() + self.after.len(), out);
        out.extend_from_slice(b"\r\n");
        out.extend_from_slice(&self.before);
        out.extend_from_slice(scratch);
        out.extend_from_slice(&self.after);
        out.extend_from_slice(b"\r\n");
    }
}

/// A number in lower-case hexadecimal, without leading zeros.
fn write_hex(number: usize, out: &mut Vec<u8>) {
    let digits = (usize::BITS - number.leading_zeros()).div_ceil(4).max(1);
    out.extend((0..digits).rev().map(|digit| b"0123456789abcdef"[number >> (4 * digit) & 15]));
}
