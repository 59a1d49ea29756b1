//! Which data-parallel rank takes a request.

mod budget;
mod loads;
mod method;
mod prefix_hash;
mod prefixes;

pub use budget::{Dispatched, DpBudget, Prompt, RankBudget, Report};
pub use method::{DispatchError, LoadBalanceMethod};
pub use prefix_hash::{CHUNK, MAX_HASHES, prefix_hashes};

#[cfg(test)]
mod tests;
