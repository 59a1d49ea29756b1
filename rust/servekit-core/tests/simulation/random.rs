//! Numbers that a seed repeats.

/// A generator (SplitMix64).
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }

    /// Below `n`, which is not 0.
    pub(crate) fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }

    /// From `low` to `high`, both included.
    pub(crate) fn between(&mut self, low: u64, high: u64) -> u64 {
        low + self.below(high - low + 1)
    }

    /// True once in `n` times; never for 0.
    pub(crate) fn once_in(&mut self, n: u64) -> bool {
        n > 0 && self.below(n) == 0
    }
}
