//! What the choices promise.

use super::LoadBalanceMethod::*;
use super::*;

fn chosen(budget: &mut DpBudget, method: LoadBalanceMethod, tokens: u64) -> usize {
    budget.dispatch(method, Prompt::of(tokens)).unwrap().rank
}

#[test]
fn a_burst_spreads_while_reports_lag() {
    for method in [RoundRobin, Auto, TotalRequests, TotalTokens, CacheAware] {
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
    let first = budget.dispatch(TotalTokens, Prompt::of(100)).unwrap();
    budget.dispatch(TotalTokens, Prompt::of(40)).unwrap();
    // Written before `first` arrived at its rank: the rank says idle, the budget knows better.
    assert!(budget.update(first.rank, Report::default()));
    assert_eq!(budget.ranks()[first.rank].tokens(), 100);
    assert!(budget.update(first.rank, Report::new(first.dispatch, 1, 90)));
    assert_eq!((budget.ranks()[first.rank].requests(), budget.ranks()[first.rank].tokens()), (1, 90));
    // Older than the one before.
    assert!(!budget.update(first.rank, Report::default()));
    assert_eq!(budget.ranks()[first.rank].tokens(), 90);
}

#[test]
fn an_idle_rank_is_idle_again_after_its_report() {
    let mut budget = DpBudget::new(2);
    let first = budget.dispatch(TotalRequests, Prompt::of(1)).unwrap();
    assert!(budget.update(first.rank, Report::new(first.dispatch, 1, 5)));
    assert!(budget.update(first.rank, Report::new(first.dispatch, 0, 0)));
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
    for method in [RoundRobin, TotalRequests, TotalTokens, CacheAware] {
        let mut budget = DpBudget::new(3);
        for expected in [0, 1, 2, 0, 1, 2] {
            let choice = budget.dispatch(method, Prompt::of(1)).unwrap();
            assert_eq!(choice.rank, expected, "{method:?}");
            assert!(budget.release(choice.rank, choice.dispatch));
        }
        budget.set_active(0, false);
        assert_eq!([(); 4].map(|()| chosen(&mut budget, method, 1)), [1, 2, 1, 2], "{method:?}");
    }
}

#[test]
fn inactive_ranks_get_nothing_and_a_returned_one_its_share() {
    for method in [RoundRobin, TotalRequests, TotalTokens, CacheAware] {
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
    assert_eq!(budget.dispatch(RoundRobin, Prompt::of(1)), Err(DispatchError::NoActiveRank));
}

#[test]
fn rooms_lead_to_one_rank_or_an_error() {
    let mut budget = DpBudget::new(3);
    let in_room = |room| Prompt { tokens: 1, room, prefixes: &[] };
    assert_eq!(budget.dispatch(FollowBootstrapRoom, in_room(Some(u64::MAX))).unwrap().rank, (u64::MAX % 3) as usize);
    assert_eq!(budget.dispatch(FollowBootstrapRoom, in_room(Some(7))).unwrap().rank, 1);
    assert_eq!(budget.dispatch(FollowBootstrapRoom, in_room(None)), Err(DispatchError::NoRoom));
    budget.set_active(1, false);
    assert_eq!(budget.dispatch(FollowBootstrapRoom, in_room(Some(7))), Err(DispatchError::RankInactive(1)));
}

#[test]
fn a_named_rank_is_credited_like_a_chosen_one() {
    let mut budget = DpBudget::new(2);
    budget.credit(0, Prompt::of(50)).unwrap();
    assert_eq!(chosen(&mut budget, TotalTokens, 1), 1);
    assert_eq!(budget.credit(2, Prompt::of(1)), Err(DispatchError::NoSuchRank { rank: 2, ranks: 2 }));
    assert_eq!(budget.credit(-5, Prompt::of(1)), Err(DispatchError::NoSuchRank { rank: -5, ranks: 2 }));
    budget.set_active(0, false);
    assert_eq!(budget.credit(0, Prompt::of(1)), Err(DispatchError::RankInactive(0)));
}

#[test]
fn a_release_in_the_middle_keeps_the_rest() {
    let mut budget = DpBudget::new(1);
    let dispatches: Vec<_> =
        [5, 7, 11].map(|tokens| budget.dispatch(RoundRobin, Prompt::of(tokens)).unwrap().dispatch).to_vec();
    assert!(budget.release(0, dispatches[1]));
    assert!(!budget.release(0, dispatches[1]));
    assert_eq!((budget.ranks()[0].requests(), budget.ranks()[0].tokens()), (2, 16));
    budget.reset(0);
    assert_eq!((budget.ranks()[0].requests(), budget.ranks()[0].tokens()), (0, 0));
}

/// Names of the prefixes of a prompt of one family, and how long it is: a beginning that all of a family share, then
/// something of its own.
fn member(family: u32, own: u32, shared: u32) -> (Vec<u64>, u64) {
    let ids = (0..shared).map(|i| family * 10_000 + i).chain((0..100).map(|i| u32::MAX - own * 100 - i));
    let ids: Vec<u8> = ids.flat_map(u32::to_le_bytes).collect();
    (prefix_hashes(&ids, b""), ids.len() as u64 / 4)
}

#[test]
fn shared_prefixes_land_together() {
    let mut budget = DpBudget::new(4);
    let mut homes = [None; 8];
    for own in 0..40 {
        for family in 0..8 {
            let (prefixes, tokens) = member(family, own, 1024);
            let choice = budget.dispatch(CacheAware, Prompt { tokens, room: None, prefixes: &prefixes }).unwrap();
            assert_eq!(*homes[family as usize].get_or_insert(choice.rank), choice.rank, "family {family}");
            let report = Report::new(choice.dispatch, 0, 0);
            assert!(budget.update(choice.rank, report));
        }
    }
    let used: std::collections::HashSet<_> = homes.into_iter().collect();
    assert_eq!(used.len(), 4, "families spread");
}

#[test]
fn what_a_rank_has_cached_is_not_charged_again() {
    let mut budget = DpBudget::new(2);
    let (prefixes, tokens) = member(1, 1, 1024);
    let prompt = Prompt { tokens, room: None, prefixes: &prefixes };
    let first = budget.dispatch(CacheAware, prompt).unwrap();
    assert_eq!(budget.ranks()[first.rank].tokens(), tokens);
    let second = budget.dispatch(CacheAware, prompt).unwrap();
    assert_eq!(second.rank, 1 - first.rank, "as busy as computing it anew");
    assert!(budget.update(first.rank, Report::new(first.dispatch, 0, 0)));
    let third = budget.dispatch(CacheAware, prompt).unwrap();
    assert_eq!((third.rank, budget.ranks()[first.rank].tokens()), (first.rank, tokens % 64));
}

#[test]
fn one_prompt_asked_by_everyone_spreads_too() {
    for ranks in [2, 4, 8, 16, 64] {
        let mut budget = DpBudget::new(ranks);
        let (prefixes, tokens) = member(1, 1, 2048);
        let mut counts = vec![0; ranks];
        for _ in 0..1000 {
            let prompt = Prompt { tokens, room: None, prefixes: &prefixes };
            counts[budget.dispatch(CacheAware, prompt).unwrap().rank] += 1;
        }
        let most = counts.iter().max().unwrap() * ranks * 100 / 1000;
        assert!(most <= 125, "the busiest of {ranks} has {most} % of the mean: {counts:?}");
    }
}

#[test]
fn a_crowded_rank_is_not_chosen_for_its_cache() {
    let mut budget = DpBudget::new(4);
    let (prefixes, tokens) = member(1, 1, 4096);
    let prompt = Prompt { tokens, room: None, prefixes: &prefixes };
    let home = budget.dispatch(CacheAware, prompt).unwrap();
    let report = |requests| Report::new(home.dispatch, requests, 1);
    assert!(budget.update(home.rank, report(1)));
    assert_eq!(budget.dispatch(CacheAware, prompt).unwrap().rank, home.rank);
    // A hundred requests whose prompts are done: few tokens, and no room in the batch.
    let mut budget = DpBudget::new(4);
    let home = budget.dispatch(CacheAware, prompt).unwrap();
    assert!(budget.update(home.rank, report(100)));
    assert_ne!(budget.dispatch(CacheAware, prompt).unwrap().rank, home.rank);
}

#[test]
fn a_rank_that_is_gone_has_nothing_cached() {
    let mut budget = DpBudget::new(4);
    let (prefixes, tokens) = member(1, 1, 1024);
    let prompt = Prompt { tokens, room: None, prefixes: &prefixes };
    let home = budget.dispatch(CacheAware, prompt).unwrap();
    budget.set_active(home.rank, false);
    let other = budget.dispatch(CacheAware, prompt).unwrap();
    assert_ne!(other.rank, home.rank);
    budget.reset(home.rank);
    budget.reset(other.rank);
    budget.set_active(home.rank, true);
    let next = budget.dispatch(CacheAware, prompt).unwrap();
    assert_eq!(budget.ranks()[next.rank].tokens(), tokens, "all of it is to compute");
    budget.forget_prefixes();
    assert!(budget.release(next.rank, next.dispatch));
    let again = budget.dispatch(CacheAware, prompt).unwrap();
    assert_eq!(budget.ranks()[again.rank].tokens(), tokens);
}

#[test]
fn a_named_rank_has_the_prompt_cached_as_well() {
    let mut budget = DpBudget::new(3);
    let (prefixes, tokens) = member(1, 1, 1024);
    let prompt = Prompt { tokens, room: None, prefixes: &prefixes };
    let named = budget.credit(2, prompt).unwrap();
    assert!(budget.release(2, named.dispatch));
    assert_eq!(budget.dispatch(CacheAware, prompt).unwrap().rank, 2);
}

#[test]
fn all_that_is_unseen_is_what_the_ranks_have_not_seen() {
    let mut budget = DpBudget::new(3);
    let sum = |budget: &DpBudget| budget.ranks().iter().map(RankBudget::unseen_tokens).sum::<u64>();
    let dispatched: Vec<_> = (1..20).map(|n| budget.dispatch(TotalTokens, Prompt::of(n * 7)).unwrap()).collect();
    assert_eq!((budget.unseen_tokens(), sum(&budget)), (190 * 7, 190 * 7));
    assert!(budget.release(dispatched[4].rank, dispatched[4].dispatch));
    assert!(budget.update(dispatched[9].rank, Report::new(dispatched[9].dispatch, 1, 1)));
    budget.reset(2);
    assert_eq!(budget.unseen_tokens(), sum(&budget));
    (0..2).for_each(|rank| budget.reset(rank));
    assert_eq!(budget.unseen_tokens(), 0);
}
