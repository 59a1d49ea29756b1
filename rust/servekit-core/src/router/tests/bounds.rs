//! What waits, and what is kept, stays within bounds.

use super::*;

#[test]
fn a_full_server_refuses_before_any_work() {
    let mut world = World::ready(config(1, 1));
    let taken: Vec<Rid> = (0..4 + 8).map(|_| world.request()).collect();
    let refused = world.request();
    assert_eq!(world.status(refused), Some(503));
    assert!(!world.sent.contains_key(&refused));
    world.step(0, &[(taken[0], true)]);
    let next = world.request();
    assert!(world.sent.contains_key(&next));
    assert_eq!(world.core.counters().refused, 1);
}

#[test]
fn one_worker_can_not_take_all_the_room() {
    let mut world = World::ready(CoreConfig { max_per_worker: 2, ..config(1, 2) });
    let (first, second, refused) = (world.request_of(0), world.request_of(0), world.request_of(0));
    assert_eq!([first, second, refused].map(|rid| world.status(rid)), [None, None, Some(503)]);
    let other = world.request_of(1);
    assert!(world.sent.contains_key(&other));
    world.abort(first);
    world.step(0, &[(first, true)]);
    let next = world.request_of(0);
    assert!(world.sent.contains_key(&next));
}

#[test]
fn a_queue_full_of_tokens_refuses_too() {
    let mut world = World::ready(CoreConfig { max_queued_tokens: 100, ..config(1, 1) });
    let sized = |tokens| move |request: &mut Request<u64>| request.tokens = tokens;
    let long = world.request_with(sized(500));
    assert!(world.sent.contains_key(&long), "nothing else waits");
    let refused = world.request_with(sized(1));
    assert_eq!((world.status(refused), world.core.queued_tokens()), (Some(503), 500));
    // The rank has seen it, and computed most of it.
    let from = world.peer(Side::Rank, 0);
    let load = Load { running: 1, held_tokens: 410, pending_tokens: 90, ..Load::default() };
    let last_dispatch = world.sent[&long].1;
    world.handle(Event::Batch { from, last_dispatch, load: Some(load), rows: Ok(&TestRows(vec![])) });
    assert_eq!(world.core.queued_tokens(), 90);
    let (fits, refused) = (world.request_with(sized(10)), world.request_with(sized(1)));
    assert_eq!((world.status(fits), world.status(refused)), (None, Some(503)));
    world.step(0, &[(long, true), (fits, true)]);
    world.assert_empty();
    assert_eq!(world.core.queued_tokens(), 0);
}

#[test]
fn tokens_that_wait_for_a_rank_count_until_they_end() {
    let mut world = World::new(CoreConfig { max_queued_tokens: 100, ..config(1, 1) });
    let (first, second) = (world.request(), world.request());
    assert_eq!(world.core.queued_tokens(), 20);
    world.abort(first);
    assert_eq!(world.core.queued_tokens(), 10);
    world.hello(Side::Rank, 0, 1);
    world.rank_state(0, true);
    assert_eq!((world.core.queued_tokens(), world.core.waiting()), (10, 0));
    world.rank_state(0, false);
    assert_eq!((world.status(second), world.core.queued_tokens()), (Some(503), 0));
}

#[test]
fn frames_are_kept_within_a_bound_and_the_oldest_large_ones_go_first() {
    let mut world = World::ready(CoreConfig { resume_memory: 100_000, ..config(1, 1) });
    let of = |bytes| move |request: &mut Request<u64>| request.bytes = bytes;
    let small = world.request_with(of(1000));
    let (first, second) = (world.request_with(of(40_000)), world.request_with(of(50_000)));
    assert_eq!((world.core.kept_bytes(), world.core.kept_frame(first)), (91_000, Some(first.0)));
    let third = world.request_with(of(45_000));
    assert_eq!((world.core.kept_bytes(), world.core.kept_frame(first)), (96_000, None));
    assert_eq!([small, second, third].map(|rid| world.core.kept_frame(rid)), [small, second, third].map(|r| Some(r.0)));
    let giant = world.request_with(of(100_001));
    assert!(world.sent.contains_key(&giant) && world.core.kept_frame(giant).is_none());
    assert_eq!((world.core.kept_bytes(), world.core.counters().unresumable), (96_000, 2));
    world.step(0, &[(second, true)]);
    assert_eq!(world.core.kept_bytes(), 46_000);
    world.step(0, &[small, first, third, giant].map(|rid| (rid, true)));
    world.assert_empty();
    assert_eq!((world.core.kept_bytes(), world.failed.len()), (0, 0), "whoever lost its frames went on");
}

#[test]
fn the_wait_is_bounded() {
    let mut world = World::new(config(1, 1));
    let waiting: Vec<Rid> = (0..8).map(|_| world.request()).collect();
    let refused = world.request();
    assert_eq!((world.status(refused), world.core.waiting()), (Some(503), waiting.len()));
}
