//! Members of one request that have the same prompt go to one rank, where its prefix is cached.

use std::collections::{HashMap, VecDeque};

use crate::wire::{Group, Rid};

/// Most groups that are remembered; beyond them the oldest lose only their common rank.
const CAPACITY: usize = 16_384;

/// A group's key: the worker's life that minted it (upper bits of its request ids) and its number.
type Key = (u64, u64);

/// Ranks of the prompts of groups whose members are not all placed yet.
#[derive(Debug, Default)]
pub(super) struct Groups {
    open: HashMap<Key, Open>,
    oldest: VecDeque<Key>,
}

#[derive(Debug)]
struct Open {
    members_left: u32,
    ranks: Vec<(u64, usize)>,
}

impl Groups {
    /// Rank that a member's prompt went to.
    pub(super) fn rank(&self, rid: Rid, group: &Group) -> Option<usize> {
        let open = self.open.get(&key(rid, group))?;
        open.ranks.iter().find(|(prompt, _)| *prompt == group.prompt).map(|&(_, rank)| rank)
    }

    /// Notes that a member was placed at a rank, or refused; after its last member a group is forgotten.
    pub(super) fn settle(&mut self, rid: Rid, group: &Group, rank: Option<usize>) {
        if group.size < 2 {
            return;
        }
        let key = key(rid, group);
        if !self.open.contains_key(&key) {
            self.make_room();
            self.oldest.push_back(key);
        }
        let open = self.open.entry(key).or_insert(Open { members_left: group.size, ranks: Vec::new() });
        open.members_left = open.members_left.saturating_sub(1);
        if let Some(rank) = rank {
            match open.ranks.iter_mut().find(|(prompt, _)| *prompt == group.prompt) {
                Some(known) => known.1 = rank,
                None => open.ranks.push((group.prompt, rank)),
            }
        }
        if open.members_left == 0 {
            self.open.remove(&key);
        }
    }

    /// How many groups are open.
    pub(super) fn len(&self) -> usize {
        self.open.len()
    }

    /// Forgets the groups of a worker's life.
    pub(super) fn forget_worker(&mut self, life: u64) {
        self.open.retain(|key, _| key.0 != life);
    }

    fn make_room(&mut self) {
        // Keys of closed groups leave the queue here, so that it is never longer than twice the table.
        if self.oldest.len() >= 2 * CAPACITY {
            self.oldest.retain(|key| self.open.contains_key(key));
        }
        while self.open.len() >= CAPACITY {
            match self.oldest.pop_front() {
                Some(key) => drop(self.open.remove(&key)),
                None => self.open.clear(),
            }
        }
    }
}

fn key(rid: Rid, group: &Group) -> Key {
    (life(rid), group.id)
}

/// The worker's life that minted a request id, as a number.
pub(super) fn life(rid: Rid) -> u64 {
    rid.0 >> 40
}
