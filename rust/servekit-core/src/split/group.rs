//! Rows of a batch by what they have in common.

use std::collections::HashMap;

/// Groups of rows, in the order of their first rows; the rows of each in the order of the batch.
pub(super) struct Groups {
    keys: Vec<u32>,
    /// Where each group's rows end in `rows`.
    ends: Vec<u32>,
    /// One flat list, group after group.
    rows: Vec<u32>,
}

impl Groups {
    /// Group rows by their keys; `most` is how many there are at most.
    pub(super) fn of(keyed: impl Iterator<Item = (u32, u32)>, most: usize) -> Self {
        let (mut places, mut counts) = (Places::new(), Vec::<u32>::with_capacity(16));
        let mut placed = Vec::with_capacity(most);
        for (key, row) in keyed {
            let place = places.of(key);
            match counts.get_mut(place as usize) {
                Some(count) => *count += 1,
                None => counts.push(1),
            }
            placed.push((place, row));
        }
        // Counting sort: where each group starts, which moves to where it ends as its rows come in.
        let mut ends = counts;
        let mut start = 0;
        for end in &mut ends {
            start += std::mem::replace(end, start);
        }
        let mut rows = vec![0; placed.len()];
        for (place, row) in placed {
            let end = &mut ends[place as usize];
            rows[*end as usize] = row;
            *end += 1;
        }
        Self { keys: places.keys, ends, rows }
    }

    /// Key and rows of each group.
    pub(super) fn iter(&self) -> impl ExactSizeIterator<Item = (u32, &[u32])> {
        let mut start = 0;
        self.keys.iter().zip(&self.ends).map(move |(key, end)| {
            let rows = &self.rows[start..*end as usize];
            start = *end as usize;
            (*key, rows)
        })
    }
}

/// Numbers keys, which are below `u32::MAX`, in the order in which they first come.
pub(crate) struct Places {
    keys: Vec<u32>,
    /// A hash table of the first [`FEW`] keys and their numbers. It is never more than half full.
    few: [(u32, u32); 2 * FEW],
    /// All keys, once there are more.
    many: HashMap<u32, u32>,
}

const FEW: usize = 64;

/// Stands for no key; no key is that large.
const FREE: u32 = u32::MAX;

impl Places {
    pub(crate) fn new() -> Self {
        Self { keys: Vec::with_capacity(16), few: [(FREE, 0); 2 * FEW], many: HashMap::new() }
    }

    /// The keys, each at its number.
    pub(crate) fn keys(&self) -> &[u32] {
        &self.keys
    }

    /// A key's number.
    #[inline]
    pub(crate) fn of(&mut self, key: u32) -> u32 {
        if !self.many.is_empty() {
            return self.of_many(key);
        }
        // Fibonacci hashing: keys next to each other land apart. The top bits are the best ones.
        let mut slot = (key.wrapping_mul(0x9e37_79b9) >> (32 - FEW.ilog2() - 1)) as usize;
        loop {
            match self.few[slot] {
                (known, place) if known == key => return place,
                (FREE, _) => return self.add(key, slot),
                _ => slot = (slot + 1) % self.few.len(),
            }
        }
    }

    #[cold]
    fn add(&mut self, key: u32, slot: usize) -> u32 {
        let place = self.keys.len() as u32;
        self.keys.push(key);
        if self.keys.len() <= FEW {
            self.few[slot] = (key, place);
        } else {
            self.many.extend(self.keys.iter().copied().zip(0..));
        }
        place
    }

    fn of_many(&mut self, key: u32) -> u32 {
        let next = self.keys.len() as u32;
        *self.many.entry(key).or_insert_with(|| {
            self.keys.push(key);
            next
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_come_in_the_order_of_their_first_rows_however_many_there_are() {
        for groups in [1, 2, 63, 64, 65, 66, 700] {
            let key = |row: u32| (row * row % groups) << 12;
            let grouped = Groups::of((0..2000).filter(|row| row % 7 > 0).map(|row| (key(row), row)), 2000);
            let mut expected: Vec<(u32, Vec<u32>)> = Vec::new();
            for row in (0..2000).filter(|row| row % 7 > 0) {
                match expected.iter_mut().find(|(known, _)| *known == key(row)) {
                    Some((_, rows)) => rows.push(row),
                    None => expected.push((key(row), vec![row])),
                }
            }
            let found: Vec<(u32, Vec<u32>)> = grouped.iter().map(|(key, rows)| (key, rows.to_vec())).collect();
            assert_eq!(found, expected, "{groups} groups");
        }
    }

    #[test]
    fn no_rows_make_no_groups() {
        assert_eq!(Groups::of(std::iter::empty(), 0).iter().len(), 0);
    }
}
