//! What is remembered of texts, within a bound of bytes.

use std::collections::HashMap;

/// What an entry costs beside its text and its ids: places in the map and the allocator's share.
const ENTRY: usize = 96;

/// Ids by text. When the young generation fills half of the bound it becomes the old one, and what was not asked for
/// since goes.
pub(super) struct Memory {
    young: Generation,
    old: Generation,
    half: usize,
}

#[derive(Default)]
struct Generation {
    ids: HashMap<Box<str>, Box<[u32]>>,
    bytes: usize,
}

impl Generation {
    fn insert(&mut self, text: Box<str>, ids: Box<[u32]>) {
        self.bytes += cost(&text, &ids);
        self.ids.insert(text, ids);
    }
}

fn cost(text: &str, ids: &[u32]) -> usize {
    text.len() + 4 * ids.len() + ENTRY
}

impl Memory {
    /// One of at most so many bytes.
    pub(super) fn new(bytes: usize) -> Self {
        Self { young: Generation::default(), old: Generation::default(), half: bytes / 2 }
    }

    /// Bytes in it, about.
    pub(super) fn bytes(&self) -> usize {
        self.young.bytes + self.old.bytes
    }

    /// Append the ids of a text; false if it is not known.
    pub(super) fn recall(&mut self, text: &str, out: &mut Vec<u32>) -> bool {
        if let Some(ids) = self.young.ids.get(text) {
            out.extend_from_slice(ids);
            return true;
        }
        let Some((text, ids)) = self.old.ids.remove_entry(text) else { return false };
        self.old.bytes -= cost(&text, &ids);
        out.extend_from_slice(&ids);
        self.keep(text, ids);
        true
    }

    /// Remember a text. One of more than a quarter of the bound would push out too much and is not kept.
    pub(super) fn remember(&mut self, text: &str, ids: &[u32]) {
        if cost(text, ids) <= self.half / 2 && !self.young.ids.contains_key(text) {
            self.keep(text.into(), ids.into());
        }
    }

    fn keep(&mut self, text: Box<str>, ids: Box<[u32]>) {
        if self.young.bytes + cost(&text, &ids) > self.half {
            self.old = std::mem::take(&mut self.young);
        }
        self.young.insert(text, ids);
    }
}
