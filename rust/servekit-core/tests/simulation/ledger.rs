//! What may be said of each request, and what was.

use std::collections::HashMap;

use servekit_core::wire::{Rid, Route};

use super::bodies::{TextRow, token};

/// One request.
#[derive(Debug)]
struct Entry {
    limit: u32,
    prompt: u64,
    /// Life of the control process that took it.
    control: Option<u32>,
    /// Rank and life of it that it was sent to.
    sent: Option<(usize, u32)>,
    /// Tokens that came out.
    position: u32,
    /// Terminal rows that came out.
    ends: u32,
}

/// All requests of a life.
#[derive(Default)]
pub(crate) struct Ledger {
    entries: HashMap<Rid, Entry>,
}

impl Ledger {
    /// A worker asks for so many tokens.
    pub(crate) fn ask(&mut self, rid: Rid, limit: u32, prompt: u64) {
        let entry = Entry { limit, prompt, control: None, sent: None, position: 0, ends: 0 };
        assert!(self.entries.insert(rid, entry).is_none(), "{rid:?} was minted twice");
    }

    /// Most tokens, and length of the prompt.
    pub(crate) fn size(&self, rid: Rid) -> (u32, u64) {
        let entry = &self.entries[&rid];
        (entry.limit, entry.prompt)
    }

    pub(crate) fn opened(&mut self, rid: Rid, control: u32) {
        let entry = self.entry(rid);
        assert_eq!(entry.control.replace(control), None, "{rid:?} was opened twice");
    }

    pub(crate) fn sent(&mut self, rid: Rid, control: u32, rank: usize, epoch: u32) {
        let entry = self.entry(rid);
        assert_eq!(entry.control, Some(control), "{rid:?} was sent before it was opened");
        assert_eq!(entry.ends, 0, "{rid:?} was sent after its end");
        assert_eq!(entry.sent.replace((rank, epoch)), None, "{rid:?} was sent twice");
    }

    /// A row comes out of a shard for a worker.
    pub(crate) fn row(&mut self, row: &TextRow, control: u32, route: Route) {
        let entry = self.entry(row.rid);
        assert_eq!(row.rid.route(), route, "{:?} goes to another worker", row.rid);
        assert_eq!(entry.control, Some(control), "{:?} belongs to another life of control", row.rid);
        assert_eq!(entry.ends, 0, "{:?} goes on after its end", row.rid);
        for &said in &row.tokens {
            let (rank, epoch) = entry.sent.expect("a token of a request that went nowhere");
            let expected = token(rank, epoch, row.rid, entry.position);
            assert_eq!(said, expected, "{:?}: token {} is of another attempt or place", row.rid, entry.position);
            entry.position += 1;
        }
        entry.ends += u32::from(row.ended);
    }

    /// Every request that this life of the control process took has had its end.
    pub(crate) fn assert_ended(&self, control: u32) {
        let open: Vec<_> = self.entries.iter().filter(|(_, e)| e.control == Some(control) && e.ends != 1).collect();
        assert!(open.is_empty(), "without an end: {open:?}");
    }

    /// Rank that it was sent to.
    pub(crate) fn rank(&self, rid: Rid) -> Option<usize> {
        self.entries[&rid].sent.map(|(rank, _)| rank)
    }

    pub(crate) fn was_taken(&self, rid: Rid) -> bool {
        self.entries[&rid].control.is_some()
    }

    /// Tokens that came out, of all requests.
    pub(crate) fn tokens(&self) -> u64 {
        self.entries.values().map(|entry| u64::from(entry.position)).sum()
    }

    fn entry(&mut self, rid: Rid) -> &mut Entry {
        self.entries.get_mut(&rid).unwrap_or_else(|| panic!("{rid:?} was never asked for"))
    }
}
