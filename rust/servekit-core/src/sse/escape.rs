//! The inside of a JSON string.

/// 0 for bytes that stand for themselves, 1 for lead bytes of what may be a line end, otherwise what to do.
const KIND: [u8; 256] = {
    let mut table = [0; 256];
    let mut i = 0;
    while i < 0x20 {
        table[i] = b'u';
        i += 1;
    }
    table[0x08] = b'b';
    table[b'\t' as usize] = b't';
    table[b'\n' as usize] = b'n';
    table[0x0c] = b'f';
    table[b'\r' as usize] = b'r';
    table[b'"' as usize] = b'"';
    table[b'\\' as usize] = b'\\';
    table[0xc2] = MAYBE_LINE_END;
    table[0xe2] = MAYBE_LINE_END;
    table
};
const MAYBE_LINE_END: u8 = 1;
const HEX: &[u8; 16] = b"0123456789abcdef";

/// Append the text as it stands between the quotes of a JSON string.
///
/// U+0085, U+2028 and U+2029 are escaped too: some clients take them for line ends, which would cut an event in two.
pub fn escape_json(text: &str, out: &mut Vec<u8>) {
    let bytes = text.as_bytes();
    let (mut from, mut at) = (0, 0);
    while at < bytes.len() {
        let byte = bytes[at];
        let kind = KIND[usize::from(byte)];
        if kind == 0 {
            at += 1;
            continue;
        }
        let mut escaped = *b"\\u0000";
        let (taken, length) = match (kind, &bytes[at..]) {
            (MAYBE_LINE_END, [0xc2, 0x85, ..]) => {
                escaped[4..].copy_from_slice(b"85");
                (2, 6)
            }
            (MAYBE_LINE_END, [0xe2, 0x80, last @ (0xa8 | 0xa9), ..]) => {
                escaped[2..].copy_from_slice(if *last == 0xa8 { b"2028" } else { b"2029" });
                (3, 6)
            }
            (MAYBE_LINE_END, _) => {
                at += 1;
                continue;
            }
            (b'u', _) => {
                escaped[4..].copy_from_slice(&[HEX[usize::from(byte >> 4)], HEX[usize::from(byte & 15)]]);
                (1, 6)
            }
            (letter, _) => {
                escaped[1] = letter;
                (1, 2)
            }
        };
        out.extend_from_slice(&bytes[from..at]);
        out.extend_from_slice(&escaped[..length]);
        at += taken;
        from = at;
    }
    out.extend_from_slice(&bytes[from..]);
}
