//! What each rank has to do, as far as the router can know.

use std::collections::VecDeque;

use super::loads::{self, INACTIVE, kept};
use super::prefixes::Prefixes;
use super::{CHUNK, DispatchError, LoadBalanceMethod};
use crate::wire::Load;

/// Most tokens that one request is booked with.
const MOST_TOKENS: u64 = 1 << 40;
/// Requests above the mean that a rank may have and still be chosen for what it has cached, beside an eighth of the mean.
const CROWD: u64 = 3;

/// A rank's own word on its load. Every request with a dispatch number up to `last_dispatch` that it has not released
/// counts, whatever its phase.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Highest dispatch number that the rank has seen.
    pub last_dispatch: u64,
    /// Requests it has, running or waiting.
    pub requests: u64,
    /// Tokens: held by running requests or still to compute.
    pub tokens: u64,
    /// Those still to compute.
    pub pending: u64,
}

impl Report {
    /// A report of tokens that are all still to compute.
    pub fn new(last_dispatch: u64, requests: u64, tokens: u64) -> Self {
        Self { last_dispatch, requests, tokens, pending: tokens }
    }

    /// What a batch's envelope says.
    pub fn of(last_dispatch: u64, load: Load) -> Self {
        Self {
            last_dispatch,
            requests: u64::from(load.running).saturating_add(u64::from(load.waiting)),
            tokens: load.held_tokens.saturating_add(load.pending_tokens),
            pending: load.pending_tokens,
        }
    }
}

/// A choice: the rank, and the number under which the dispatch is booked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dispatched {
    /// Rank that takes the request.
    pub rank: usize,
    /// Number of the dispatch, from 1 and never given twice.
    pub dispatch: u64,
}

/// What one rank is charged with.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RankBudget {
    active: bool,
    report: Report,
    /// Dispatch numbers and tokens that the rank has not seen yet, in rising order of number.
    unseen: VecDeque<(u64, u64)>,
    unseen_tokens: u64,
}

impl RankBudget {
    /// Requests of the last report and those dispatched since.
    pub fn requests(&self) -> u64 {
        self.report.requests.saturating_add(self.unseen.len() as u64)
    }

    /// Tokens of the last report and those dispatched since.
    pub fn tokens(&self) -> u64 {
        self.report.tokens.saturating_add(self.unseen_tokens)
    }

    /// What it has to compute, in tokens, as far as a prompt that is cached there would wait for it: what is pending or
    /// unseen, and one chunk for each request, about as much as the tokens that it will still generate cost.
    fn work(&self) -> u64 {
        let pending = self.report.pending.saturating_add(self.unseen_tokens);
        pending.saturating_add(self.requests().saturating_mul(CHUNK as u64))
    }

    /// Prompt tokens that were dispatched and not yet seen.
    pub fn unseen_tokens(&self) -> u64 {
        self.unseen_tokens
    }

    /// Whether the rank takes requests.
    pub fn active(&self) -> bool {
        self.active
    }

    /// The last report.
    pub fn report(&self) -> Report {
        self.report
    }
}

/// What a choice depends on.
#[derive(Clone, Copy, Debug, Default)]
pub struct Prompt<'a> {
    /// Its length.
    pub tokens: u64,
    /// Bootstrap room.
    pub room: Option<u64>,
    /// Names of its prefixes, as [`prefix_hashes`](super::prefix_hashes) makes them, for `cache_aware`; empty for none.
    pub prefixes: &'a [u64],
}

impl Prompt<'_> {
    /// A prompt of which nothing is known but its length.
    pub fn of(tokens: u64) -> Self {
        Self { tokens, ..Self::default() }
    }
}

/// The load of each rank: what it last reported, plus what was dispatched and not yet seen by it.
///
/// Dispatches are numbered and reports echo the highest number seen, so a report that was on its way while a request
/// was dispatched can't erase that request.
#[derive(Clone, Debug)]
pub struct DpBudget {
    ranks: Vec<RankBudget>,
    /// Requests of each rank, as [`kept`] keeps them.
    requests: Vec<u64>,
    /// Tokens of each rank, as [`kept`] keeps them.
    tokens: Vec<u64>,
    /// What each rank has to compute, as [`kept`] keeps it.
    work: Vec<u64>,
    /// Where the next search starts: one past the rank chosen last, so that equal ranks take turns.
    next: usize,
    dispatches: u64,
    unseen_tokens: u64,
    /// What each rank has cached, once anybody asked.
    prefixes: Option<Prefixes>,
}

impl DpBudget {
    /// A budget for `ranks` ranks, all idle and active.
    pub fn new(ranks: usize) -> Self {
        let idle = RankBudget { active: true, ..RankBudget::default() };
        Self {
            ranks: vec![idle; ranks],
            requests: vec![0; ranks],
            tokens: vec![0; ranks],
            work: vec![0; ranks],
            next: 0,
            dispatches: 0,
            unseen_tokens: 0,
            prefixes: None,
        }
    }

    /// All ranks, by number.
    pub fn ranks(&self) -> &[RankBudget] {
        &self.ranks
    }

    /// Prompt tokens that were dispatched and not yet seen, of all ranks.
    pub fn unseen_tokens(&self) -> u64 {
        self.unseen_tokens
    }

    /// Chooses a rank for a request and books it there.
    ///
    /// # Errors
    /// No rank is active, or the method's rank is not, or it needs a room and there is none.
    pub fn dispatch(&mut self, method: LoadBalanceMethod, prompt: Prompt<'_>) -> Result<Dispatched, DispatchError> {
        let rank = match method {
            LoadBalanceMethod::Auto | LoadBalanceMethod::RoundRobin => loads::first_active(&self.tokens, self.next),
            LoadBalanceMethod::TotalRequests => loads::least(&self.requests, self.next),
            LoadBalanceMethod::TotalTokens => loads::least(&self.tokens, self.next),
            LoadBalanceMethod::CacheAware => return self.dispatch_cached(prompt),
            LoadBalanceMethod::FollowBootstrapRoom => {
                if self.ranks.is_empty() {
                    return Err(DispatchError::NoActiveRank);
                }
                let rank = (prompt.room.ok_or(DispatchError::NoRoom)? % self.ranks.len() as u64) as usize;
                return self.credit(rank as i64, prompt);
            }
        };
        let rank = rank.ok_or(DispatchError::NoActiveRank)?;
        self.turn(rank);
        Ok(self.book(rank, prompt.tokens))
    }

    /// The rank that has the least to compute once what is not cached there of the prompt is added; none that is crowded.
    fn dispatch_cached(&mut self, prompt: Prompt<'_>) -> Result<Dispatched, DispatchError> {
        let mut rank = loads::least(&self.work, self.next).ok_or(DispatchError::NoActiveRank)?;
        let mut charge = prompt.tokens;
        if !prompt.prefixes.is_empty() {
            let prefixes = self.prefixes.get_or_insert_with(|| Prefixes::new(self.ranks.len()));
            let found = prefixes.search(prompt.prefixes);
            if !found.holders.is_empty() {
                let (requests, active) = loads::sum(&self.requests);
                let crowded = |rank: usize| crowded(self.requests[rank], requests, active);
                if crowded(rank) {
                    rank = loads::least(&self.requests, self.next).ok_or(DispatchError::NoActiveRank)?;
                }
                // The last token is computed in any case: its result is the first of the answer.
                let left = |chunks| prompt.tokens.saturating_sub(u64::from(chunks) * CHUNK as u64).max(1);
                let own = found.holders.iter().find(|(holder, _)| *holder == rank);
                charge = left(own.map_or(found.common, |&(_, chunks)| chunks));
                let mut best = self.work[rank].saturating_add(charge);
                for &(holder, chunks) in found.holders {
                    let (left, work) = (left(chunks), self.work[holder]);
                    let load = work.saturating_add(left);
                    // Of equal loads, the one with less of the prompt to compute.
                    if (load, left) < (best, charge) && work != INACTIVE && !crowded(holder) {
                        (rank, charge, best) = (holder, left, load);
                    }
                }
            }
            prefixes.learn(rank, prompt.prefixes);
        }
        self.turn(rank);
        Ok(self.book(rank, charge))
    }

    /// Books a request at a rank that somebody named, as if it had been chosen.
    ///
    /// # Errors
    /// There is no such rank, or it is not active.
    pub fn credit(&mut self, rank: i64, prompt: Prompt<'_>) -> Result<Dispatched, DispatchError> {
        let index = usize::try_from(rank).unwrap_or(usize::MAX);
        match self.ranks.get(index) {
            None => Err(DispatchError::NoSuchRank { rank, ranks: self.ranks.len() }),
            Some(known) if !known.active => Err(DispatchError::RankInactive(index)),
            Some(_) => {
                if !prompt.prefixes.is_empty() {
                    let prefixes = self.prefixes.get_or_insert_with(|| Prefixes::new(self.ranks.len()));
                    prefixes.learn(index, prompt.prefixes);
                }
                Ok(self.book(index, prompt.tokens))
            }
        }
    }

    /// Takes a rank's report. One that has seen less than an earlier report is older and ignored, and so is one that
    /// claims to have seen what was never dispatched.
    ///
    /// Returns whether the report counted.
    pub fn update(&mut self, rank: usize, report: Report) -> bool {
        let Some(known) = self.ranks.get_mut(rank) else { return false };
        if report.last_dispatch < known.report.last_dispatch || report.last_dispatch > self.dispatches {
            return false;
        }
        known.report = report;
        let mut seen = 0;
        while let Some(&(dispatch, tokens)) = known.unseen.front() {
            if dispatch > report.last_dispatch {
                break;
            }
            known.unseen.pop_front();
            seen += tokens;
        }
        self.see(rank, seen);
        true
    }

    /// Takes back a dispatch that no report will show: it never reached its rank, or ended before a report came.
    ///
    /// Returns whether it was still booked as unseen.
    pub fn release(&mut self, rank: usize, dispatch: u64) -> bool {
        let Some(known) = self.ranks.get_mut(rank) else { return false };
        let Ok(at) = known.unseen.binary_search_by_key(&dispatch, |&(number, _)| number) else { return false };
        let tokens = known.unseen.remove(at).map_or(0, |(_, tokens)| tokens);
        self.see(rank, tokens);
        true
    }

    /// Forgets all that a rank was charged with, and what it had cached: its process is another one now.
    pub fn reset(&mut self, rank: usize) {
        let Some(known) = self.ranks.get_mut(rank) else { return };
        let unseen = known.unseen_tokens;
        *known = RankBudget { active: known.active, unseen_tokens: unseen, ..RankBudget::default() };
        self.see(rank, unseen);
        if let Some(prefixes) = &mut self.prefixes {
            prefixes.forget(rank);
        }
    }

    /// Forgets what every rank had cached.
    pub fn forget_prefixes(&mut self) {
        if let Some(prefixes) = &mut self.prefixes {
            prefixes.clear();
        }
    }

    /// Lets a rank take requests, or not.
    pub fn set_active(&mut self, rank: usize, active: bool) {
        if let Some(known) = self.ranks.get_mut(rank) {
            known.active = active;
            self.keep(rank);
        }
    }

    fn turn(&mut self, rank: usize) {
        self.next = if rank + 1 == self.ranks.len() { 0 } else { rank + 1 };
    }

    fn book(&mut self, rank: usize, tokens: u64) -> Dispatched {
        // What no prompt can have would only make the sums overflow.
        let tokens = tokens.min(MOST_TOKENS);
        self.dispatches += 1;
        let known = &mut self.ranks[rank];
        known.unseen.push_back((self.dispatches, tokens));
        known.unseen_tokens += tokens;
        self.unseen_tokens += tokens;
        self.keep(rank);
        Dispatched { rank, dispatch: self.dispatches }
    }

    /// So many tokens are not unseen any more.
    fn see(&mut self, rank: usize, tokens: u64) {
        self.ranks[rank].unseen_tokens -= tokens;
        self.unseen_tokens -= tokens;
        self.keep(rank);
    }

    fn keep(&mut self, rank: usize) {
        let known = &self.ranks[rank];
        self.requests[rank] = kept(known.requests(), known.active);
        self.tokens[rank] = kept(known.tokens(), known.active);
        self.work[rank] = kept(known.work(), known.active);
    }
}

/// Whether a rank with so many requests has far more than the active ones have on average.
fn crowded(own: u64, all: u64, active: u64) -> bool {
    let mean = all / active.max(1);
    own > mean + mean / 8 + CROWD - 1
}
