//! What each rank has to do, as far as the router can know.

use std::collections::VecDeque;

use super::{DispatchError, LoadBalanceMethod};

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

/// The load of each rank: what it last reported, plus what was dispatched and not yet seen by it.
///
/// Dispatches are numbered and reports echo the highest number seen, so a report that was on its way while a request
/// was dispatched can't erase that request.
#[derive(Clone, Debug)]
pub struct DpBudget {
    ranks: Vec<RankBudget>,
    /// Where the next search starts: one past the rank chosen last, so that equal ranks take turns.
    next: usize,
    dispatches: u64,
}

impl DpBudget {
    /// A budget for `ranks` ranks, all idle and active.
    pub fn new(ranks: usize) -> Self {
        let idle = RankBudget { active: true, ..RankBudget::default() };
        Self { ranks: vec![idle; ranks], next: 0, dispatches: 0 }
    }

    /// All ranks, by number.
    pub fn ranks(&self) -> &[RankBudget] {
        &self.ranks
    }

    /// Chooses a rank for a request of `tokens` prompt tokens and books it there.
    ///
    /// # Errors
    /// No rank is active, or the method's rank is not, or it needs a room and there is none.
    pub fn dispatch(
        &mut self,
        method: LoadBalanceMethod,
        tokens: u64,
        room: Option<u64>,
    ) -> Result<Dispatched, DispatchError> {
        let rank = match method {
            LoadBalanceMethod::Auto | LoadBalanceMethod::RoundRobin => self.least(|_| 0)?,
            LoadBalanceMethod::TotalRequests => self.least(RankBudget::requests)?,
            LoadBalanceMethod::TotalTokens => self.least(RankBudget::tokens)?,
            LoadBalanceMethod::FollowBootstrapRoom => {
                if self.ranks.is_empty() {
                    return Err(DispatchError::NoActiveRank);
                }
                let rank = (room.ok_or(DispatchError::NoRoom)? % self.ranks.len() as u64) as usize;
                return self.credit(rank as i64, tokens);
            }
        };
        self.next = rank + 1;
        Ok(self.book(rank, tokens))
    }

    /// Books a request at a rank that somebody named, as if it had been chosen.
    ///
    /// # Errors
    /// There is no such rank, or it is not active.
    pub fn credit(&mut self, rank: i64, tokens: u64) -> Result<Dispatched, DispatchError> {
        let index = usize::try_from(rank).unwrap_or(usize::MAX);
        match self.ranks.get(index) {
            None => Err(DispatchError::NoSuchRank { rank, ranks: self.ranks.len() }),
            Some(known) if !known.active => Err(DispatchError::RankInactive(index)),
            Some(_) => Ok(self.book(index, tokens)),
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
        while let Some(&(dispatch, tokens)) = known.unseen.front() {
            if dispatch > report.last_dispatch {
                break;
            }
            known.unseen.pop_front();
            known.unseen_tokens = known.unseen_tokens.saturating_sub(tokens);
        }
        true
    }

    /// Takes back a dispatch that no report will show: it never reached its rank, or ended before a report came.
    ///
    /// Returns whether it was still booked as unseen.
    pub fn release(&mut self, rank: usize, dispatch: u64) -> bool {
        let Some(known) = self.ranks.get_mut(rank) else { return false };
        let Ok(at) = known.unseen.binary_search_by_key(&dispatch, |&(number, _)| number) else { return false };
        let tokens = known.unseen.remove(at).map_or(0, |(_, tokens)| tokens);
        known.unseen_tokens = known.unseen_tokens.saturating_sub(tokens);
        true
    }

    /// Forgets all that a rank was charged with: its process is another one now.
    pub fn reset(&mut self, rank: usize) {
        if let Some(known) = self.ranks.get_mut(rank) {
            *known = RankBudget { active: known.active, ..RankBudget::default() };
        }
    }

    /// Lets a rank take requests, or not.
    pub fn set_active(&mut self, rank: usize, active: bool) {
        if let Some(known) = self.ranks.get_mut(rank) {
            known.active = active;
        }
    }

    fn book(&mut self, rank: usize, tokens: u64) -> Dispatched {
        self.dispatches += 1;
        let known = &mut self.ranks[rank];
        known.unseen.push_back((self.dispatches, tokens));
        known.unseen_tokens = known.unseen_tokens.saturating_add(tokens);
        Dispatched { rank, dispatch: self.dispatches }
    }

    /// The active rank with the smallest load; of equal ones the first from `next` on.
    fn least(&self, load: impl Fn(&RankBudget) -> u64) -> Result<usize, DispatchError> {
        let start = self.next % self.ranks.len().max(1);
        let (before, after) = self.ranks.split_at(start);
        let turns = after.iter().zip(start..).chain(before.iter().zip(0..));
        turns
            .filter(|(rank, _)| rank.active)
            .min_by_key(|(rank, _)| load(rank))
            .map(|(_, index)| index)
            .ok_or(DispatchError::NoActiveRank)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use LoadBalanceMethod::*;

    fn chosen(budget: &mut DpBudget, method: LoadBalanceMethod, tokens: u64) -> usize {
        budget.dispatch(method, tokens, None).unwrap().rank
    }

    #[test]
    fn a_burst_spreads_while_reports_lag() {
        for method in [RoundRobin, Auto, TotalRequests, TotalTokens] {
            let mut budget = DpBudget::new(4);
            let mut counts = [0; 4];
            for _ in 0..1000 {
                counts[chosen(&mut budget, method, 10)] += 1;
            }
            assert_eq!(counts, [250; 4], "{method:?}");
        }
    }

    #[test]
    fn a_stale_report_erases_no_dispatch() {
        let mut budget = DpBudget::new(2);
        let first = budget.dispatch(TotalTokens, 100, None).unwrap();
        budget.dispatch(TotalTokens, 40, None).unwrap();
        // Written before `first` arrived at its rank: the rank says idle, the budget knows better.
        assert!(budget.update(first.rank, Report::default()));
        assert_eq!(budget.ranks()[first.rank].tokens(), 100);
        assert!(budget.update(first.rank, Report { last_dispatch: first.dispatch, requests: 1, tokens: 90 }));
        assert_eq!((budget.ranks()[first.rank].requests(), budget.ranks()[first.rank].tokens()), (1, 90));
        // Older than the one before.
        assert!(!budget.update(first.rank, Report::default()));
        assert_eq!(budget.ranks()[first.rank].tokens(), 90);
    }

    #[test]
    fn an_idle_rank_is_idle_again_after_its_report() {
        let mut budget = DpBudget::new(2);
        let first = budget.dispatch(TotalRequests, 1, None).unwrap();
        assert!(budget.update(first.rank, Report { last_dispatch: first.dispatch, requests: 1, tokens: 5 }));
        assert!(budget.update(first.rank, Report { last_dispatch: first.dispatch, requests: 0, tokens: 0 }));
        assert_eq!(budget.ranks()[first.rank].requests(), 0);
    }

    #[test]
    fn tokens_weigh_not_requests() {
        let mut budget = DpBudget::new(2);
        assert_eq!(chosen(&mut budget, TotalTokens, 10_000), 0);
        let next: Vec<_> = (0..5).map(|_| chosen(&mut budget, TotalTokens, 10)).collect();
        assert_eq!(next, [1; 5]);
    }

    #[test]
    fn ties_rotate() {
        let mut budget = DpBudget::new(3);
        for expected in [0, 1, 2, 0, 1, 2] {
            let choice = budget.dispatch(TotalRequests, 1, None).unwrap();
            assert_eq!(choice.rank, expected);
            assert!(budget.release(choice.rank, choice.dispatch));
        }
    }

    #[test]
    fn inactive_ranks_get_nothing_and_a_returned_one_its_share() {
        for method in [RoundRobin, TotalRequests, TotalTokens] {
            let mut budget = DpBudget::new(3);
            budget.set_active(1, false);
            for _ in 0..10 {
                assert_ne!(chosen(&mut budget, method, 1), 1);
            }
            budget.set_active(1, true);
            assert!((0..3).any(|_| chosen(&mut budget, method, 1) == 1), "{method:?}");
        }
        let mut budget = DpBudget::new(1);
        budget.set_active(0, false);
        assert_eq!(budget.dispatch(RoundRobin, 1, None), Err(DispatchError::NoActiveRank));
    }

    #[test]
    fn rooms_lead_to_one_rank_or_an_error() {
        let mut budget = DpBudget::new(3);
        assert_eq!(budget.dispatch(FollowBootstrapRoom, 1, Some(u64::MAX)).unwrap().rank, (u64::MAX % 3) as usize);
        assert_eq!(budget.dispatch(FollowBootstrapRoom, 1, Some(7)).unwrap().rank, 1);
        assert_eq!(budget.dispatch(FollowBootstrapRoom, 1, None), Err(DispatchError::NoRoom));
        budget.set_active(1, false);
        assert_eq!(budget.dispatch(FollowBootstrapRoom, 1, Some(7)), Err(DispatchError::RankInactive(1)));
    }

    #[test]
    fn a_named_rank_is_credited_like_a_chosen_one() {
        let mut budget = DpBudget::new(2);
        budget.credit(0, 50).unwrap();
        assert_eq!(chosen(&mut budget, TotalTokens, 1), 1);
        assert_eq!(budget.credit(2, 1), Err(DispatchError::NoSuchRank { rank: 2, ranks: 2 }));
        assert_eq!(budget.credit(-5, 1), Err(DispatchError::NoSuchRank { rank: -5, ranks: 2 }));
        budget.set_active(0, false);
        assert_eq!(budget.credit(0, 1), Err(DispatchError::RankInactive(0)));
    }

    #[test]
    fn a_release_in_the_middle_keeps_the_rest() {
        let mut budget = DpBudget::new(1);
        let dispatches: Vec<_> =
            [5, 7, 11].map(|tokens| budget.dispatch(RoundRobin, tokens, None).unwrap().dispatch).to_vec();
        assert!(budget.release(0, dispatches[1]));
        assert!(!budget.release(0, dispatches[1]));
        assert_eq!((budget.ranks()[0].requests(), budget.ranks()[0].tokens()), (2, 16));
        budget.reset(0);
        assert_eq!((budget.ranks()[0].requests(), budget.ranks()[0].tokens()), (0, 0));
    }
}
