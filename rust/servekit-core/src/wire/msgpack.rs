//! As much msgpack as finding and writing the columns of a batch needs.

/// Deepest nesting of arrays and maps that is walked.
const MAX_DEPTH: u32 = 64;

/// The item that is nothing.
pub(crate) const NIL: u8 = 0xc0;

/// Where in the bytes something is wrong, and what.
pub(crate) type Broken = (usize, &'static str);

/// Whole size of an item by its first byte, 0 where more must be read to know it.
const FIXED: [u8; 256] = {
    let mut table = [0; 256];
    let mut i = 0;
    while i < 256 {
        table[i] = match i {
            0x00..=0x7f | 0xe0..=0xff | 0xc0 | 0xc2 | 0xc3 => 1,
            0xa0..=0xbf => 1 + (i - 0xa0) as u8,
            0xcc | 0xd0 => 2,
            0xcd | 0xd1 | 0xd4 => 3,
            0xd5 => 4,
            0xca | 0xce | 0xd2 => 5,
            0xd6 => 6,
            0xcb | 0xcf | 0xd3 => 9,
            0xd7 => 10,
            0xd8 => 18,
            _ => 0,
        };
        i += 1;
    }
    table
};

/// Whole size of an item that begins with this byte; 0 where more must be read to know it.
pub(crate) fn fixed_size(head: u8) -> usize {
    usize::from(FIXED[usize::from(head)])
}

/// A place in msgpack bytes that moves forward item by item. Never reads beyond the end.
#[derive(Clone, Copy)]
pub(crate) struct Cursor<'a> {
    pub(crate) bytes: &'a [u8],
    pub(crate) at: usize,
}

impl<'a> Cursor<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, at: 0 }
    }

    /// First byte of the next item.
    pub(crate) fn peek(&self) -> Result<u8, Broken> {
        self.bytes.get(self.at).copied().ok_or((self.at, "ends too early"))
    }

    pub(crate) fn at_end(&self) -> bool {
        self.at == self.bytes.len()
    }

    /// Whether the next item is nil, which is then passed.
    pub(crate) fn nil(&mut self) -> Result<bool, Broken> {
        let nil = self.peek()? == NIL;
        self.at += usize::from(nil);
        Ok(nil)
    }

    fn take(&mut self, n: usize) -> Result<&'a [u8], Broken> {
        if n > self.bytes.len() - self.at {
            return Err((self.at, "ends too early"));
        }
        let start = self.at;
        self.at += n;
        Ok(&self.bytes[start..self.at])
    }

    /// A big-endian number of `n` bytes.
    fn number(&mut self, n: usize) -> Result<u64, Broken> {
        Ok(self.take(n)?.iter().fold(0, |number, &byte| (number << 8) | u64::from(byte)))
    }

    /// Pass one item, whatever it is.
    #[inline]
    pub(crate) fn skip(&mut self) -> Result<(), Broken> {
        if self.skip_flat()? { Ok(()) } else { self.skip_nested(0) }
    }

    /// Pass one item if it is of the short and frequent kinds, which have nothing nested in them.
    #[inline]
    fn skip_flat(&mut self) -> Result<bool, Broken> {
        let head = self.peek()?;
        let size = match fixed_size(head) {
            // A short text, whose size need not be looked up.
            _ if matches!(head, 0xa0..=0xbf) => usize::from(head) - 0x9f,
            0 if matches!(head, 0xc4 | 0xd9) => self.bytes.get(self.at + 1).map_or(0, |len| 2 + usize::from(*len)),
            size => size,
        };
        let end = self.at + size;
        let flat = size != 0 && end <= self.bytes.len();
        if flat {
            self.at = end;
        }
        Ok(flat)
    }

    fn skip_nested(&mut self, depth: u32) -> Result<(), Broken> {
        let start = self.at;
        let marker = self.take(1)?[0];
        let (children, size) = match marker {
            0x80..=0x8f => (2 * u64::from(marker & 15), 0),
            0x90..=0x9f => (u64::from(marker & 15), 0),
            0xdc => (self.number(2)?, 0),
            0xdd => (self.number(4)?, 0),
            0xde => (2 * self.number(2)?, 0),
            0xdf => (2 * self.number(4)?, 0),
            0xc4 | 0xd9 => (0, self.number(1)?),
            0xc5 | 0xda => (0, self.number(2)?),
            0xc6 | 0xdb => (0, self.number(4)?),
            0xc7 => (0, self.number(1)? + 1),
            0xc8 => (0, self.number(2)? + 1),
            0xc9 => (0, self.number(4)? + 1),
            0xc1 => return Err((start, "0xc1 is no item")),
            marker => (0, u64::from(FIXED[usize::from(marker)]) - 1),
        };
        // A 64-bit `usize` holds any of these sizes.
        self.take(size as usize)?;
        if children > 0 && depth == MAX_DEPTH {
            return Err((start, "nested too deep"));
        }
        for _ in 0..children {
            if !self.skip_flat()? {
                self.skip_nested(depth + 1)?;
            }
        }
        Ok(())
    }

    /// Head of an array: its length, which the bytes that are left can hold.
    pub(crate) fn array(&mut self) -> Result<usize, Broken> {
        let start = self.at;
        let len = match self.take(1)?[0] {
            marker @ 0x90..=0x9f => u64::from(marker & 15),
            0xdc => self.number(2)?,
            0xdd => self.number(4)?,
            _ => return Err((start, "not an array")),
        };
        self.check_len(start, len)
    }

    /// Head of a map: its number of entries, which the bytes that are left can hold.
    pub(crate) fn map(&mut self) -> Result<usize, Broken> {
        let start = self.at;
        let len = match self.take(1)?[0] {
            marker @ 0x80..=0x8f => u64::from(marker & 15),
            0xde => self.number(2)?,
            0xdf => self.number(4)?,
            _ => return Err((start, "not a map")),
        };
        self.check_len(start, len)
    }

    fn check_len(&self, start: usize, len: u64) -> Result<usize, Broken> {
        if len > (self.bytes.len() - self.at) as u64 {
            return Err((start, "length goes beyond the body"));
        }
        Ok(len as usize)
    }

    pub(crate) fn uint(&mut self) -> Result<u64, Broken> {
        let start = self.at;
        match self.take(1)?[0] {
            small @ 0..=0x7f => Ok(u64::from(small)),
            0xcc => self.number(1),
            0xcd => self.number(2),
            0xce => self.number(4),
            0xcf => self.number(8),
            _ => Err((start, "not an unsigned number")),
        }
    }

    /// A number that fits i64.
    #[inline]
    pub(crate) fn int(&mut self) -> Result<i64, Broken> {
        match self.bytes.get(self.at..) {
            Some(&[small @ 0..=0x7f, ..]) => {
                self.at += 1;
                Ok(i64::from(small))
            }
            Some(&[0xcc, number, ..]) => {
                self.at += 2;
                Ok(i64::from(number))
            }
            Some(&[0xcd, high, low, ..]) => {
                self.at += 3;
                Ok(i64::from(u16::from_be_bytes([high, low])))
            }
            _ => self.any_int(),
        }
    }

    fn any_int(&mut self) -> Result<i64, Broken> {
        let start = self.at;
        match self.peek()? {
            small @ 0xe0..=0xff => {
                self.at += 1;
                Ok(i64::from(small.cast_signed()))
            }
            marker @ 0xd0..=0xd3 => {
                self.at += 1;
                let bytes = 1_usize << (marker - 0xd0);
                let number = self.number(bytes)?;
                let unused = 64 - 8 * bytes as u32;
                Ok((number << unused).cast_signed() >> unused)
            }
            _ => i64::try_from(self.uint()?).map_err(|_| (start, "number is too large")),
        }
    }

    /// Bytes of a text; whether they are UTF-8 is not checked.
    pub(crate) fn str(&mut self) -> Result<&'a [u8], Broken> {
        let start = self.at;
        let len = match self.take(1)?[0] {
            marker @ 0xa0..=0xbf => u64::from(marker & 31),
            0xd9 => self.number(1)?,
            0xda => self.number(2)?,
            0xdb => self.number(4)?,
            _ => return Err((start, "not a text")),
        };
        self.take(len as usize)
    }

    pub(crate) fn bin(&mut self) -> Result<&'a [u8], Broken> {
        let start = self.at;
        let len = match self.take(1)?[0] {
            0xc4 => self.number(1)?,
            0xc5 => self.number(2)?,
            0xc6 => self.number(4)?,
            _ => return Err((start, "not bytes")),
        };
        self.take(len as usize)
    }
}

/// What msgpack is written to.
pub(crate) trait Sink {
    fn push(&mut self, byte: u8);
    fn append(&mut self, bytes: &[u8]);
}

impl Sink for Vec<u8> {
    #[inline]
    fn push(&mut self, byte: u8) {
        self.push(byte);
    }

    #[inline]
    fn append(&mut self, bytes: &[u8]) {
        self.extend_from_slice(bytes);
    }
}

/// Head of an array; lengths beyond u32 can't come up, for bodies are read with 32-bit offsets.
#[inline]
pub(crate) fn write_array(out: &mut impl Sink, len: usize) {
    match len {
        0..=15 => out.push(0x90 | len as u8),
        16..=0xffff => out.append(&marked::<3>(0xdc, len as u64)),
        _ => out.append(&marked::<5>(0xdd, len as u64)),
    }
}

pub(crate) fn write_map(out: &mut impl Sink, len: usize) {
    match len {
        0..=15 => out.push(0x80 | len as u8),
        16..=0xffff => out.append(&marked::<3>(0xde, len as u64)),
        _ => out.append(&marked::<5>(0xdf, len as u64)),
    }
}

pub(crate) fn write_str(out: &mut impl Sink, text: &[u8]) {
    write_str_head(out, text.len());
    out.append(text);
}

#[inline]
pub(crate) fn write_str_head(out: &mut impl Sink, len: usize) {
    match len {
        0..=31 => out.push(0xa0 | len as u8),
        32..=0xff => out.append(&marked::<2>(0xd9, len as u64)),
        0x100..=0xffff => out.append(&marked::<3>(0xda, len as u64)),
        _ => out.append(&marked::<5>(0xdb, len as u64)),
    }
}

pub(crate) fn write_bin(out: &mut impl Sink, data: &[u8]) {
    write_bin_head(out, data.len());
    out.append(data);
}

pub(crate) fn write_bin_head(out: &mut impl Sink, len: usize) {
    match len {
        0..=0xff => out.append(&marked::<2>(0xc4, len as u64)),
        0x100..=0xffff => out.append(&marked::<3>(0xc5, len as u64)),
        _ => out.append(&marked::<5>(0xc6, len as u64)),
    }
}

#[inline]
pub(crate) fn write_uint(out: &mut impl Sink, number: u64) {
    match number {
        0..=0x7f => out.push(number as u8),
        0x80..=0xff => out.append(&marked::<2>(0xcc, number)),
        0x100..=0xffff => out.append(&marked::<3>(0xcd, number)),
        0x1_0000..=0xffff_ffff => out.append(&marked::<5>(0xce, number)),
        _ => out.append(&marked::<9>(0xcf, number)),
    }
}

pub(crate) fn write_int(out: &mut impl Sink, number: i64) {
    match u64::try_from(number) {
        Ok(number) => write_uint(out, number),
        Err(_) if number >= -32 => out.push(number as u8),
        Err(_) => out.append(&marked::<9>(0xd3, number.cast_unsigned())),
    }
}

/// A marker and the last `N - 1` bytes of a number.
#[inline]
fn marked<const N: usize>(marker: u8, number: u64) -> [u8; N] {
    let mut item = [marker; N];
    item[1..].copy_from_slice(&number.to_be_bytes()[9 - N..]);
    item
}
