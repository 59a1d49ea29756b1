//! Request ids and the routes in them.

use std::collections::HashMap;
use std::fmt;
use std::hash::{BuildHasherDefault, Hasher};

const EPOCH_BITS: u32 = 12;
const COUNTER_BITS: u32 = 40;
/// 2^64 by the golden ratio: Fibonacci hashing sends ids that follow each other far apart.
pub(crate) const SPREAD: u64 = 0x9e37_79b9_7f4a_7c15;

/// A map by request id.
pub(crate) type RidMap<K, V> = HashMap<K, V, BuildHasherDefault<RidHasher>>;

/// A request id: 12 bits worker, 12 bits worker epoch, 40 bits counter. The id is the return address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Rid(pub u64);

impl Rid {
    /// The id that a worker mints; parts beyond their bits are cut.
    pub fn mint(worker: u16, epoch: u32, counter: u64) -> Self {
        let route = (u64::from(worker & 0xfff) << EPOCH_BITS) | u64::from(epoch & 0xfff);
        Self((route << COUNTER_BITS) | (counter & ((1 << COUNTER_BITS) - 1)))
    }

    /// Number of the worker that minted it.
    pub fn worker(self) -> u16 {
        self.route().worker
    }

    /// Low 12 bits of that worker's epoch.
    pub fn epoch(self) -> u16 {
        self.route().epoch
    }

    /// Where answers go.
    #[inline]
    pub fn route(self) -> Route {
        Route::from((self.0 >> COUNTER_BITS) as u32)
    }
}

impl From<u64> for Rid {
    fn from(id: u64) -> Self {
        Self(id)
    }
}

impl From<Rid> for u64 {
    fn from(rid: Rid) -> Self {
        rid.0
    }
}

/// Spreads request ids, which count upwards. A keyed hash would cost more than the rest of a look-up, and guards against
/// nothing here: ids are minted by the server's own workers.
#[derive(Default)]
pub(crate) struct RidHasher(u64);

impl Hasher for RidHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u64(self.0.rotate_left(8) ^ u64::from(*byte)));
    }

    #[inline]
    fn write_u64(&mut self, rid: u64) {
        let spread = rid.wrapping_mul(SPREAD);
        // The map reads the bits at both ends; those at the upper one are spread best.
        self.0 = spread ^ (spread >> 32);
    }
}

/// One life of a worker: it names the socket on which that worker receives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Route {
    /// Number of the worker, below 4096.
    pub worker: u16,
    /// Low 12 bits of its epoch.
    pub epoch: u16,
}

impl From<u32> for Route {
    /// From its number: worker, then epoch, 12 bits each.
    #[inline]
    fn from(number: u32) -> Self {
        Self { worker: (number >> EPOCH_BITS) as u16, epoch: (number & 0xfff) as u16 }
    }
}

impl From<Route> for u32 {
    #[inline]
    fn from(route: Route) -> Self {
        Self::from(route.worker) << EPOCH_BITS | Self::from(route.epoch)
    }
}

impl fmt::Display for Route {
    /// File name of the socket, in the run directory.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "w{}-{}.ipc", self.worker, self.epoch)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_leads_back_to_its_worker() {
        let rid = Rid::mint(4095, 7, 1 << 39);
        assert_eq!((rid.worker(), rid.epoch()), (4095, 7));
        assert_eq!(rid.route().to_string(), "w4095-7.ipc");
        assert_eq!(Rid::mint(1, 4096 + 3, 5).epoch(), 3);
    }
}
