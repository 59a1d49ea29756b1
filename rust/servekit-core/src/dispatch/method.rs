//! The ways to choose, and why a choice can fail.

use std::str::FromStr;

/// How a rank is chosen among the active ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LoadBalanceMethod {
    /// What servekit holds best for this kind of server: round robin.
    Auto,
    /// One after the other.
    RoundRobin,
    /// Bootstrap room modulo the number of ranks; never another rank, since the peer computes the same number.
    FollowBootstrapRoom,
    /// The rank with the fewest requests; ties rotate.
    TotalRequests,
    /// The rank with the fewest tokens, held by running requests or still to compute; ties rotate.
    TotalTokens,
    /// The rank with the least to compute once those of the prompt's tokens are added that it probably has not cached.
    /// A rank with many more requests than the others is not chosen for its cache.
    CacheAware,
}

impl LoadBalanceMethod {
    /// All methods, in the order of their documentation.
    pub const ALL: [Self; 6] = [
        Self::Auto,
        Self::RoundRobin,
        Self::FollowBootstrapRoom,
        Self::TotalRequests,
        Self::TotalTokens,
        Self::CacheAware,
    ];

    /// The spelling of the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::RoundRobin => "round_robin",
            Self::FollowBootstrapRoom => "follow_bootstrap_room",
            Self::TotalRequests => "total_requests",
            Self::TotalTokens => "total_tokens",
            Self::CacheAware => "cache_aware",
        }
    }
}

impl FromStr for LoadBalanceMethod {
    type Err = DispatchError;

    fn from_str(name: &str) -> Result<Self, DispatchError> {
        Self::ALL
            .into_iter()
            .find(|method| method.name() == name)
            .ok_or_else(|| DispatchError::UnknownMethod(name.to_owned()))
    }
}

/// Why no rank was chosen.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DispatchError {
    /// No rank is active.
    #[error("no rank is active")]
    NoActiveRank,
    /// The rank that was named, or that the room leads to, is not active.
    #[error("rank {0} is not active")]
    RankInactive(usize),
    /// There is no such rank.
    #[error("rank {rank} does not exist, there are {ranks}")]
    NoSuchRank {
        /// Number that was named.
        rank: i64,
        /// How many ranks there are.
        ranks: usize,
    },
    /// `follow_bootstrap_room` needs a room.
    #[error("the request names no bootstrap room")]
    NoRoom,
    /// No method of that name.
    #[error("unknown load balance method {0:?}")]
    UnknownMethod(String),
}
