//! Many short pieces of bytes, one after another.

use super::msgpack::Sink;

/// Bytes to which short pieces are copied at a fixed width, for a copy of a length known only when it runs is a call.
/// What such a copy writes too much, the next one overwrites.
#[derive(Debug, Default)]
pub(crate) struct Pack {
    /// What is written, then room; all of it initialized.
    bytes: Vec<u8>,
    at: usize,
}

/// Width of the copies of short pieces.
const SHORT: usize = 16;

impl Pack {
    /// Room for that many bytes to begin with; it grows when that is not enough.
    pub(crate) fn with_room(room: usize) -> Self {
        Self { bytes: vec![0; room + SHORT], at: 0 }
    }

    /// What is written.
    pub(crate) fn as_slice(&self) -> &[u8] {
        &self.bytes[..self.at]
    }

    /// Write from the start again, with the room that there is.
    pub(crate) fn clear(&mut self) {
        self.at = 0;
    }

    pub(crate) fn into_vec(mut self) -> Vec<u8> {
        self.bytes.truncate(self.at);
        self.bytes
    }

    /// Append `from[start..end]` for each row, where `(start, end)` is the row's range.
    ///
    /// # Panics
    /// There is no such row, or its range is none of `from`.
    pub(crate) fn copy_ranges(&mut self, from: &[u8], ranges: &[(u32, u32)], rows: &[u32]) {
        let mut rest = rows;
        loop {
            let (copied, bytes) = copy_short(&mut self.bytes[self.at..], from, ranges, rest);
            self.at += bytes;
            let Some((row, after)) = rest[copied..].split_first() else { return };
            let (start, end) = ranges[*row as usize];
            self.append(&from[start as usize..end as usize]);
            rest = after;
        }
    }

    /// Append a byte so many times.
    pub(crate) fn fill(&mut self, byte: u8, times: usize) {
        self.room(times).fill(byte);
    }

    /// Append `from[size * row..][..size]` for each row.
    ///
    /// # Panics
    /// There is no such row.
    pub(crate) fn copy_rows(&mut self, from: &[u8], size: usize, rows: &[u32]) {
        match size {
            0 => {}
            1 => self.room(rows.len()).iter_mut().zip(rows).for_each(|(byte, row)| *byte = from[*row as usize]),
            2..=SHORT => self.copy_wide::<SHORT>(from, size, rows),
            17..=32 => self.copy_wide::<32>(from, size, rows),
            _ => rows.iter().for_each(|row| self.append(&from[size * *row as usize..][..size])),
        }
    }

    /// As [`Pack::copy_rows`], of pieces of at most `WIDTH` bytes.
    fn copy_wide<const WIDTH: usize>(&mut self, from: &[u8], size: usize, rows: &[u32]) {
        let start = self.at;
        let target = self.room(size * rows.len() + WIDTH);
        let mut at = 0;
        for row in rows {
            let source = &from[size * *row as usize..];
            let place = &mut target[at..at + WIDTH];
            match source.first_chunk::<WIDTH>() {
                Some(source) => place.copy_from_slice(source),
                None => place[..size].copy_from_slice(&source[..size]),
            }
            at += size;
        }
        self.at = start + at;
    }

    /// The next `len` bytes, to be written by the caller.
    #[inline]
    fn room(&mut self, len: usize) -> &mut [u8] {
        let start = self.at;
        self.at += len;
        if self.at > self.bytes.len() {
            self.grow();
        }
        &mut self.bytes[start..self.at]
    }

    #[cold]
    fn grow(&mut self) {
        self.bytes.resize(self.at + self.at / 2 + SHORT, 0);
    }
}

/// Copy short pieces, up to the first that is long or lies too near to the end of either side. Returns how many there
/// were, and their bytes.
fn copy_short(to: &mut [u8], from: &[u8], ranges: &[(u32, u32)], rows: &[u32]) -> (usize, usize) {
    let mut at = 0;
    for (i, row) in rows.iter().enumerate() {
        let (start, end) = ranges[*row as usize];
        let len = end.wrapping_sub(start) as usize;
        let source = from.get(start as usize..).and_then(|rest| rest.first_chunk::<SHORT>());
        let place = to.get_mut(at..).and_then(|rest| rest.first_chunk_mut::<SHORT>());
        match (source, place) {
            (Some(source), Some(place)) if len <= SHORT => *place = *source,
            _ => return (i, at),
        }
        // Stays within the chunk that was just written.
        at = at.wrapping_add(len);
    }
    (rows.len(), at)
}

impl Sink for Pack {
    #[inline]
    fn push(&mut self, byte: u8) {
        self.room(1)[0] = byte;
    }

    #[inline]
    fn append(&mut self, bytes: &[u8]) {
        self.room(bytes.len()).copy_from_slice(bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_of_any_size_follow_each_other() {
        let from: Vec<u8> = (0..=255).collect();
        let bounds = [0, 0, 1, 17, 34, 234, 250, 251, 256, 256];
        let ranges: Vec<(u32, u32)> = bounds.windows(2).map(|pair| (pair[0], pair[1])).collect();
        let (mut pack, mut expected) = (Pack::default(), Vec::new());
        for rows in [&[0, 1, 2, 3, 4, 5, 6, 7, 8][..], &[8, 0, 7, 3, 3, 2], &[], &[5, 5, 4, 1]] {
            pack.copy_ranges(&from, &ranges, rows);
            pack.push(7);
            pack.append(b"four");
            pack.fill(3, rows.len());
            for row in rows {
                let (start, end) = ranges[*row as usize];
                expected.extend_from_slice(&from[start as usize..end as usize]);
            }
            expected.extend_from_slice(b"\x07four");
            expected.extend_from_slice(&vec![3; rows.len()]);
        }
        assert_eq!(pack.as_slice(), expected);
        pack.clear();
        pack.copy_ranges(&from, &[(9, 12)], &[0]);
        assert_eq!(pack.into_vec(), [9, 10, 11]);
    }

    #[test]
    fn rows_of_one_size_are_taken_in_order() {
        let from: Vec<u8> = (0..120).collect();
        for size in [1, 2, 3, 5, 8, 9, 16, 23, 40] {
            let mut pack = Pack::with_room(0);
            let last = from.len() / size - 1;
            pack.copy_rows(&from, size, &[last as u32, 0, 1, last as u32]);
            let expected: Vec<u8> =
                [last, 0, 1, last].iter().flat_map(|row| &from[row * size..][..size]).copied().collect();
            assert_eq!(pack.as_slice(), expected, "size {size}");
        }
    }
}
