//! Consecutive items of a body, and where each of them lies.

use super::msgpack::{Broken, Cursor, fixed_size};

/// Consecutive items of a scanned body.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Lists {
    /// Items there; up to the batch's rows.
    pub(crate) len: usize,
    pub(crate) places: Places,
}

/// Where the items of a list lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Places {
    /// One after another from `start` on, of `size` bytes each.
    Even { start: usize, size: usize },
    /// All are the same single byte, the first of them at `start`.
    Same { start: usize },
    /// Item i is `offsets[first + i]..offsets[first + i + 1]`, in the batch's offsets.
    Mixed { first: usize },
}

impl Lists {
    /// Pass `len` items, which the bytes that are left can hold. Where each starts goes to `offsets`, unless they are of
    /// one size.
    pub(super) fn scan(cursor: &mut Cursor<'_>, len: usize, offsets: &mut Vec<u32>) -> Result<Self, Broken> {
        if let Some(size) = even_size(*cursor, len) {
            let start = cursor.at;
            cursor.at += size * len;
            let places = match cursor.bytes[start..cursor.at] {
                [first, ref others @ ..]
                    if size == 1 && others.iter().fold(true, |all, byte| all & (*byte == first)) =>
                {
                    Places::Same { start }
                }
                _ => Places::Even { start, size },
            };
            return Ok(Self { len, places });
        }
        let first = offsets.len();
        offsets.resize(first + len + 1, 0);
        let (end, starts) = offsets[first..].split_last_mut().ok_or((cursor.at, "no room"))?;
        for start in starts {
            *start = cursor.at as u32;
            cursor.skip()?;
        }
        *end = cursor.at as u32;
        Ok(Self { len, places: Places::Mixed { first } })
    }
}

/// Size of each of the next `len` items, if their heads show that it is the same for all.
fn even_size(cursor: Cursor<'_>, len: usize) -> Option<usize> {
    if len == 0 {
        return Some(0);
    }
    let mut after = cursor;
    after.skip().ok()?;
    let size = after.at - cursor.at;
    let items = cursor.bytes.get(cursor.at..)?.get(..size.checked_mul(len)?)?;
    let even = match head_size(items) {
        1 if size == 1 => items.iter().fold(true, |all, head| all & is_single(*head)),
        1 => alike::<1>(items, size),
        2 => alike::<2>(items, size),
        3 => alike::<3>(items, size),
        4 => alike::<4>(items, size),
        _ => false,
    };
    even.then_some(size)
}

/// Bytes at the start of an item that tell its size, whatever follows; 0 for items that say it elsewhere, too.
fn head_size(item: &[u8]) -> usize {
    match *item {
        // An array of one, such as the logprobs of a single token.
        [0x91, ref inner @ ..] => match head_size(inner) {
            size @ 1..=3 => 1 + size,
            _ => 0,
        },
        [0xc4 | 0xd9, ..] => 2,
        [0xc5 | 0xda, ..] => 3,
        [head, ..] if fixed_size(head) > 0 => 1,
        _ => 0,
    }
}

/// Whether all items begin with the same `N` bytes.
fn alike<const N: usize>(items: &[u8], size: usize) -> bool {
    let head = items.first_chunk::<N>();
    items.chunks_exact(size).all(|item| item.first_chunk::<N>() == head)
}

/// Whether an item with this head is a single byte. Written without branches, so that many are looked at at once.
fn is_single(head: u8) -> bool {
    (head < 0x80) | (head >= 0xe0) | (head == 0xc0) | (head == 0xc2) | (head == 0xc3)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scan(bytes: &[u8], len: usize) -> (Result<Lists, Broken>, Vec<u32>) {
        let mut offsets = Vec::new();
        (Lists::scan(&mut Cursor::new(bytes), len, &mut offsets), offsets)
    }

    #[test]
    fn items_of_one_size_need_no_offsets() {
        let even = |items: &[&[u8]]| match scan(&items.concat(), items.len()) {
            (Ok(Lists { places: Places::Even { start: 0, size }, .. }), offsets) if offsets.is_empty() => Some(size),
            _ => None,
        };
        assert_eq!(even(&[b"\x00", b"\xc0", b"\xff", b"\xc2"]), Some(1));
        assert_eq!(even(&[b"\xcd\x01\x02", b"\xcd\xc4\xff"]), Some(3));
        assert_eq!(even(&[b"\xc4\x02ab", b"\xc4\x02\xc4\x09"]), Some(4));
        assert_eq!(even(&[b"\x91\xc4\x01a", b"\x91\xc4\x01b"]), Some(4));
        assert_eq!(even(&[b"\x91\xc5\x00\x01a", b"\x91\xc5\x00\x01b"]), Some(5));
        assert_eq!(even(&[b"\x92\x01\x02", b"\x92\x01\x02"]), None);
        assert_eq!(even(&[]), Some(0));
        assert_eq!(scan(b"\xc0\xc0\xc0", 3).0, Ok(Lists { len: 3, places: Places::Same { start: 0 } }));
    }

    #[test]
    fn items_that_only_begin_alike_are_told_apart() {
        for items in [[&b"\xc4\x01a"[..], b"\xc4\x02ab"], [b"\x91\xa1a", b"\x91\xa2ab"], [b"\x91\xcc\x01", b"\x91\x01"]]
        {
            let (list, offsets) = scan(&items.concat(), 2);
            assert_eq!(list, Ok(Lists { len: 2, places: Places::Mixed { first: 0 } }), "{items:?}");
            assert_eq!(offsets, [0, items[0].len() as u32, (items[0].len() + items[1].len()) as u32]);
        }
    }
}
