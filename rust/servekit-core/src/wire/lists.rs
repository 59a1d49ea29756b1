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
    /// From `first` on in the batch's ranges.
    Mixed { first: usize },
}

impl Lists {
    /// Pass `len` items, which the bytes that are left can hold. Where each starts and ends goes to `ranges`, unless they
    /// are of one size.
    pub(super) fn scan(cursor: &mut Cursor<'_>, len: usize, ranges: &mut Vec<(u32, u32)>) -> Result<Self, Broken> {
        if let Some((places, size)) = even(*cursor, len) {
            cursor.at += size * len;
            return Ok(Self { len, places });
        }
        let first = ranges.len();
        ranges.resize(first + len, (0, 0));
        for (start, end) in &mut ranges[first..] {
            *start = cursor.at as u32;
            cursor.skip()?;
            *end = cursor.at as u32;
        }
        Ok(Self { len, places: Places::Mixed { first } })
    }
}

/// Where the next `len` items lie and the size of each, if their heads show that it is the same for all.
fn even(cursor: Cursor<'_>, len: usize) -> Option<(Places, usize)> {
    let start = cursor.at;
    if len == 0 {
        return Some((Places::Even { start, size: 0 }, 0));
    }
    let mut after = cursor;
    after.skip().ok()?;
    let size = after.at - start;
    let items = cursor.bytes.get(start..)?.get(..size.checked_mul(len)?)?;
    if size == 1 && items[1..] == items[..len - 1] {
        return Some((Places::Same { start }, 1));
    }
    let even = match head_size(items) {
        1 if size == 1 => items.iter().fold(0, |wrong, head| wrong | u8::from(!is_single(*head))) == 0,
        1 => alike::<1>(items, size),
        2 => alike::<2>(items, size),
        3 => alike::<3>(items, size),
        4 => alike::<4>(items, size),
        _ => false,
    };
    even.then_some((Places::Even { start, size }, size))
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

/// Whether an item with this head is a single byte.
fn is_single(head: u8) -> bool {
    !matches!(head, 0x80..=0xbf | 0xc1 | 0xc4..=0xdf)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scan(bytes: &[u8], len: usize) -> (Result<Lists, Broken>, Vec<(u32, u32)>) {
        let mut ranges = Vec::new();
        (Lists::scan(&mut Cursor::new(bytes), len, &mut ranges), ranges)
    }

    #[test]
    fn items_of_one_size_need_no_ranges() {
        let even = |items: &[&[u8]]| match scan(&items.concat(), items.len()) {
            (Ok(Lists { places: Places::Even { start: 0, size }, .. }), ranges) if ranges.is_empty() => Some(size),
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
            let (list, ranges) = scan(&items.concat(), 2);
            assert_eq!(list, Ok(Lists { len: 2, places: Places::Mixed { first: 0 } }), "{items:?}");
            let (first, all) = (items[0].len() as u32, items.concat().len() as u32);
            assert_eq!(ranges, [(0, first), (first, all)]);
        }
    }
}
