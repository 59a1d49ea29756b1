//! Which rank probably has which prompt prefixes in its cache, learned from what was dispatched where.
//!
//! A table of fixed size: each prefix hash belongs to one bucket of eight places, a cache line that also says which rank
//! was sent the prefix and when. A full bucket forgets what was used longest ago. Nobody tells it what a rank has
//! dropped; a rank drops what it used longest ago, too. A prefix that fills a bucket, such as that of a system prompt,
//! counts as everybody's: it makes no rank better than another.

/// Places of a bucket.
const PLACES: usize = 8;
/// One bit a place.
const ALL: u32 = (1 << PLACES) - 1;
/// Prefixes that are remembered for each rank, on average: half a million tokens.
const PER_RANK: usize = 8192;
/// Most buckets: four megabytes.
const MOST_BUCKETS: usize = 1 << 16;
/// Dispatches between two ticks of the clock that ages are told in. Ages of more than 65535 ticks look young again:
/// such a prefix stays a while longer than it should.
const TICK: u64 = 64;
/// Rank of an empty place; there are fewer ranks.
const NOBODY: u16 = u16::MAX;

#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
struct Bucket {
    tags: [u32; PLACES],
    ranks: [u16; PLACES],
    used: [u16; PLACES],
}

const EMPTY: Bucket = Bucket { tags: [0; PLACES], ranks: [NOBODY; PLACES], used: [0; PLACES] };

/// The table.
#[derive(Clone, Debug)]
pub(super) struct Prefixes {
    buckets: Vec<Bucket>,
    /// Chunks of the prompt at hand that each rank has; 0 but during a search.
    depths: Vec<u32>,
    /// Ranks that have any.
    holders: Vec<(usize, u32)>,
    searches: u64,
}

/// Who has how much of a prompt.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Found<'a> {
    /// Chunks that count as everybody's.
    pub(super) common: u32,
    /// Ranks that have prefixes of it, in no order, and chunks of the longest of each.
    pub(super) holders: &'a [(usize, u32)],
}

impl Prefixes {
    /// An empty table for that many ranks.
    pub(super) fn new(ranks: usize) -> Self {
        let buckets = (ranks * PER_RANK / PLACES).next_power_of_two().min(MOST_BUCKETS);
        Self { buckets: vec![EMPTY; buckets], depths: vec![0; ranks], holders: Vec::new(), searches: 0 }
    }

    /// Who has prefixes of a prompt.
    pub(super) fn search(&mut self, hashes: &[u64]) -> Found<'_> {
        self.searches += 1;
        self.holders.clear();
        let mut common = 0;
        for (depth, &hash) in (1..).zip(hashes) {
            let bucket = &self.buckets[index(&self.buckets, hash)];
            let mut found = matches(bucket, tag(hash));
            if found == 0 {
                // Whoever has a longer prefix has been sent this one, too, and used it no earlier.
                break;
            }
            if found == ALL {
                common = depth;
            }
            while found != 0 {
                let rank = bucket.ranks[found.trailing_zeros() as usize];
                found &= found - 1;
                if let Some(known) = self.depths.get_mut(usize::from(rank)) {
                    if *known == 0 {
                        self.holders.push((usize::from(rank), 0));
                    }
                    *known = depth;
                }
            }
        }
        for (rank, depth) in &mut self.holders {
            *depth = std::mem::take(&mut self.depths[*rank]);
        }
        Found { common, holders: &self.holders }
    }

    /// A rank gets a prompt, and will have its prefixes.
    pub(super) fn learn(&mut self, rank: usize, hashes: &[u64]) {
        let Some(rank) = u16::try_from(rank).ok().filter(|&rank| usize::from(rank) < self.depths.len()) else { return };
        let now = (self.searches / TICK) as u16;
        for &hash in hashes {
            let at = index(&self.buckets, hash);
            let bucket = &mut self.buckets[at];
            let place = place_of(bucket, tag(hash), rank).unwrap_or_else(|| oldest(bucket, now));
            (bucket.tags[place], bucket.ranks[place], bucket.used[place]) = (tag(hash), rank, now);
        }
    }

    /// A rank has nothing any more.
    pub(super) fn forget(&mut self, rank: usize) {
        for bucket in &mut self.buckets {
            for place in 0..PLACES {
                if usize::from(bucket.ranks[place]) == rank {
                    (bucket.tags[place], bucket.ranks[place]) = (0, NOBODY);
                }
            }
        }
    }

    /// No rank has anything any more.
    pub(super) fn clear(&mut self) {
        self.buckets.fill(EMPTY);
    }
}

fn index(buckets: &[Bucket], hash: u64) -> usize {
    hash as usize & (buckets.len() - 1)
}

/// The part of a hash that tells prefixes of one bucket apart; never 0, the tag of an empty place.
fn tag(hash: u64) -> u32 {
    (hash >> 32) as u32 | 1
}

/// One bit for each place that holds the tag, for whomever.
fn matches(bucket: &Bucket, tag: u32) -> u32 {
    (0..PLACES).fold(0, |found, place| found | u32::from(bucket.tags[place] == tag) << place)
}

fn place_of(bucket: &Bucket, tag: u32, rank: u16) -> Option<usize> {
    let found =
        (0..PLACES).fold(0, |found, i| found | u32::from(bucket.tags[i] == tag && bucket.ranks[i] == rank) << i);
    (found != 0).then(|| found.trailing_zeros() as usize)
}

/// An empty place, or the one that was used longest ago.
fn oldest(bucket: &Bucket, now: u16) -> usize {
    let age = |place: usize| {
        let age = u32::from(now.wrapping_sub(bucket.used[place]));
        if bucket.ranks[place] == NOBODY { u32::MAX } else { age }
    };
    (1..PLACES).fold(0, |oldest, place| if age(place) > age(oldest) { place } else { oldest })
}

#[cfg(test)]
mod tests {
    use super::super::prefix_hashes;
    use super::*;

    fn prompt(seed: u32, tokens: u32) -> Vec<u64> {
        let ids: Vec<u8> = (0..tokens).flat_map(|i| (seed.wrapping_mul(977) ^ i).to_le_bytes()).collect();
        prefix_hashes(&ids, b"")
    }

    #[test]
    fn what_was_sent_somewhere_is_there() {
        let mut prefixes = Prefixes::new(4);
        let (short, long) = (prompt(1, 128), prompt(1, 640));
        assert_eq!(prefixes.search(&long).holders, []);
        prefixes.learn(2, &short);
        prefixes.learn(1, &long);
        let mut found = prefixes.search(&long).holders.to_vec();
        found.sort_unstable();
        assert_eq!(found, [(1, 10), (2, 2)]);
        assert_eq!(prefixes.search(&prompt(2, 640)).holders, []);
        prefixes.forget(1);
        assert_eq!(prefixes.search(&long), Found { common: 0, holders: &[(2, 2)] });
        prefixes.clear();
        assert_eq!(prefixes.search(&long).holders, []);
    }

    #[test]
    fn what_many_have_is_everybodys() {
        let mut prefixes = Prefixes::new(40);
        let (short, long) = (prompt(1, 128), prompt(1, 256));
        (0..7).for_each(|rank| prefixes.learn(rank, &short));
        prefixes.learn(30, &long);
        let found = prefixes.search(&long);
        assert_eq!((found.common, found.holders.len()), (2, 8));
        assert!(found.holders.contains(&(30, 4)));
    }

    #[test]
    fn it_is_bounded_and_forgets_what_was_used_longest_ago() {
        let mut prefixes = Prefixes::new(2);
        let places = prefixes.buckets.len() * PLACES;
        let kept = prompt(0, 64);
        let prompts = 2 * places as u32;
        for seed in 1..prompts {
            prefixes.learn(0, &prompt(seed, 64));
            if seed % 64 == 0 {
                assert_eq!(prefixes.search(&kept).holders.len(), usize::from(seed > 64), "what is used stays");
                prefixes.learn(1, &kept);
            }
            prefixes.searches += 1;
        }
        assert_eq!(prefixes.buckets.len() * PLACES, places);
        let count = |prefixes: &mut Prefixes, seeds: std::ops::Range<u32>| {
            seeds.filter(|&seed| !prefixes.search(&prompt(seed, 64)).holders.is_empty()).count()
        };
        let (old, new) = (count(&mut prefixes, 1..1001), count(&mut prefixes, prompts - 1000..prompts));
        assert!(old < 20 && new > 950, "{old} of the oldest thousand are there, {new} of the newest");
    }
}
