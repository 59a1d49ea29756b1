//! One promise a test.

use super::*;

#[test]
fn a_request_goes_out_once_and_its_finished_row_frees_everything() {
    let mut world = World::ready(config(2, 1));
    let (first, second) = (world.request(), world.request());
    assert_eq!((world.sent[&first].0, world.sent[&second].0), (0, 1));
    assert_eq!(world.core.in_flight(), 2);
    assert!(world.step(0, &[(first, false)]).contains(&Action::Deliver));
    assert_eq!(world.core.in_flight(), 2);
    world.step(0, &[(first, true)]);
    world.step(1, &[(second, true)]);
    world.assert_empty();
    assert!(world.failed.is_empty());
}

#[test]
fn a_finish_without_a_report_frees_the_budget_too() {
    let mut world = World::ready(config(1, 1));
    let rid = world.request();
    let from = world.peer(Side::Rank, 0);
    let rows = TestRows(vec![(rid, true)]);
    world.handle(Event::Batch { from, last_dispatch: 0, load: None, rows: Ok(&rows) });
    world.assert_empty();
}

#[test]
fn a_finish_by_another_rank_or_twice_changes_nothing() {
    let mut world = World::ready(config(2, 1));
    let rid = world.request();
    world.step(1, &[(rid, true)]);
    assert_eq!(world.core.in_flight(), 1);
    world.step(0, &[(rid, true), (rid, true)]);
    world.step(0, &[(rid, true)]);
    world.assert_empty();
    assert_eq!((world.core.counters().finished, world.core.counters().stray), (1, 3));
}

#[test]
fn an_abort_reaches_the_rank_once_and_the_finished_row_closes_it() {
    let mut world = World::ready(config(1, 1));
    let rid = world.request();
    world.abort(rid);
    world.abort(rid);
    world.handle(Event::StopMatch { rid });
    assert_eq!(world.aborts, [rid]);
    assert_eq!(world.core.in_flight(), 1);
    world.step(0, &[(rid, true)]);
    world.assert_empty();
    world.abort(rid);
    assert_eq!(world.aborts, [rid], "an unknown id is nothing");
    assert!(world.failed.is_empty());
}

#[test]
fn an_abort_before_dispatch_ends_the_wait() {
    let mut world = World::new(config(1, 1));
    let (first, second) = (world.request(), world.request());
    world.abort(first);
    world.abort(first);
    assert_eq!(world.core.waiting(), 1);
    assert!(world.failed.contains_key(&first) && world.aborts.is_empty());
    world.hello(Side::Rank, 0, 1);
    world.rank_state(0, true);
    assert_eq!(world.sent.keys().copied().collect::<Vec<_>>(), [second]);
    world.step(0, &[(second, true)]);
    world.assert_empty();
}

#[test]
fn a_stop_match_and_a_finish_may_cross() {
    let mut world = World::ready(config(1, 1));
    let (first, second) = (world.request(), world.request());
    world.handle(Event::StopMatch { rid: first });
    world.step(0, &[(first, true), (second, true)]);
    world.handle(Event::StopMatch { rid: second });
    assert_eq!(world.aborts, [first]);
    assert!(world.failed.is_empty());
    world.assert_empty();
}

#[test]
fn nobody_aborts_a_request_of_another_worker() {
    let mut world = World::ready(config(1, 2));
    let rid = world.request();
    let from = world.peer(Side::Worker, 1);
    world.handle(Event::Abort { from, rid });
    assert!(world.aborts.is_empty());
    let forged = Rid::mint(0, 1, 77);
    let from = world.peer(Side::Worker, 1);
    let control = world.handle(Event::Control { from, id: forged, ask: Ask::Ranks, frame: 0 });
    assert!(!control.iter().any(|action| matches!(action, Action::Control { .. })));
    assert_eq!(world.core.counters().forged, 2);
}

#[test]
fn a_duplicate_of_a_live_request_harms_nobody() {
    let mut world = World::ready(config(1, 1));
    let rid = world.request();
    let again = world.request_with(|request| request.rid = rid);
    assert_ne!(again, rid);
    assert_eq!((world.core.counters().duplicates, world.opened[&rid], world.core.in_flight()), (1, 1, 1));
    world.step(0, &[(rid, true)]);
    world.assert_empty();
}

#[test]
fn named_ranks_and_broken_texts_are_answered() {
    let mut world = World::ready(config(2, 1));
    let named = world.request_with(|request| request.rank = 1);
    assert_eq!(world.sent[&named].0, 1);
    let nowhere = world.request_with(|request| request.rank = 2);
    assert_eq!(world.status(nowhere), Some(400));
    world.rank_state(1, false);
    let down = world.request_with(|request| request.rank = 1);
    assert_eq!(world.failed[&down], (503, "rank 1 is not active: killed by signal 9".to_owned()));
    let broken = world.request_with(|request| request.text = Err("truncated".to_owned()));
    assert_eq!(world.failed[&broken], (400, "truncated".to_owned()));
    world.assert_empty();
}

#[test]
fn rooms_decide_alone() {
    let method = LoadBalanceMethod::FollowBootstrapRoom;
    let mut world = World::ready(CoreConfig { method, ..config(3, 1) });
    let room = world.request_with(|request| request.room = Some(7));
    assert_eq!(world.sent[&room].0, 1);
    let none = world.request();
    assert_eq!(world.status(none), Some(400));
    world.rank_state(1, false);
    let down = world.request_with(|request| request.room = Some(4));
    assert_eq!(world.status(down), Some(503));
    world.assert_empty();
}

#[test]
fn requests_wait_for_a_rank_up_to_the_deadline() {
    let mut world = World::new(config(1, 1));
    let first = world.request();
    world.now += 20 * SECOND;
    let second = world.request();
    assert_eq!(world.core.deadline(), Some(31 * SECOND));
    world.now = 31 * SECOND - 1;
    world.handle(Event::Tick);
    assert!(world.failed.is_empty());
    world.now = 31 * SECOND;
    world.handle(Event::Tick);
    assert_eq!((world.status(first), world.status(second)), (Some(503), None));
    world.rank_state(0, true);
    assert!(world.sent.is_empty(), "ready, but it has not said hello");
    world.hello(Side::Rank, 0, 1);
    assert!(world.sent.contains_key(&second));
    assert_eq!(world.core.deadline(), None);
    world.step(0, &[(second, true)]);
    world.assert_empty();
}

#[test]
fn members_with_one_prompt_go_to_one_rank() {
    let mut world = World::ready(config(4, 1));
    let mut ranks: HashMap<u64, Vec<usize>> = HashMap::new();
    for index in 0..6 {
        let prompt = u64::from(index) / 3;
        let rid = world.request_with(|request| request.group = Some(Group { id: 5, index, size: 6, prompt }));
        ranks.entry(prompt).or_default().push(world.sent[&rid].0);
    }
    assert!(ranks.values().all(|ranks| ranks.iter().all(|rank| rank == &ranks[0])), "{ranks:?}");
    assert_ne!(ranks[&0][0], ranks[&1][0], "different prompts spread");
    assert_eq!(world.core.open_groups(), 0);
}

#[test]
fn a_group_finds_another_rank_when_its_own_is_gone() {
    let mut world = World::ready(config(2, 1));
    let member = |index| Group { id: 5, index, size: 3, prompt: 0 };
    let first = world.request_with(|request| request.group = Some(member(0)));
    world.rank_state(world.sent[&first].0, false);
    let second = world.request_with(|request| request.group = Some(member(1)));
    assert_ne!(world.sent[&first].0, world.sent[&second].0);
    let third = world.request_with(|request| {
        request.group = Some(member(2));
        request.rank = 9;
    });
    assert_eq!(world.status(third), Some(400));
    assert_eq!(world.core.open_groups(), 0, "a refused member counts as placed");
}

#[test]
fn frames_of_another_life_or_seen_before_do_nothing() {
    let mut world = World::ready(config(1, 1));
    let rid = world.request();
    let rows = TestRows(vec![(rid, true)]);
    let mut from = world.peer(Side::Rank, 0);
    for wrong in [
        Peer { epoch: 0, ..from },
        Peer { epoch: 2, ..from },
        Peer { receiver_epoch: 0, ..from },
        Peer { receiver_epoch: 2, ..from },
    ] {
        let actions = world.handle(Event::Batch { from: wrong, last_dispatch: 9, load: None, rows: Ok(&rows) });
        assert_eq!(actions, []);
    }
    assert_eq!((world.core.counters().fenced, world.core.in_flight()), (4, 1));
    from.seq -= 1;
    world.handle(Event::Batch { from, last_dispatch: 9, load: None, rows: Ok(&rows) });
    assert_eq!((world.core.counters().replayed, world.core.in_flight()), (1, 1));
    from.seq += 3;
    world.handle(Event::Batch { from, last_dispatch: 0, load: None, rows: Ok(&rows) });
    assert_eq!((world.core.counters().gaps, world.status(rid)), (2, Some(500)), "tokens are lost");
    assert_eq!(world.core.counters().stray, 1);
    let from = Peer { number: 40, epoch: 1, receiver_epoch: 1, seq: 1 };
    world.handle(Event::Abort { from, rid });
    assert_eq!(world.core.counters().malformed, 1);
}

#[test]
fn nothing_counts_before_hello_and_another_schema_is_fatal() {
    let mut world = World::new(config(1, 1));
    let from = Peer { number: 0, epoch: 1, receiver_epoch: 1, seq: 2 };
    let rows = TestRows(vec![]);
    world.handle(Event::Batch { from, last_dispatch: 0, load: None, rows: Ok(&rows) });
    assert_eq!(world.core.counters().fenced, 1);
    let from = Peer { receiver_epoch: 0, seq: 1, ..from };
    let actions = world.handle(Event::Hello { side: Side::Rank, from, schema: 98, name: "old".to_owned() });
    let [Action::Fatal(reason)] = &actions[..] else { panic!("{actions:?}") };
    assert!(reason.contains("rank 0 (old) speaks message schema 0x62"), "{reason}");
    world.rank_state(0, true);
    assert!(!world.core.budget().ranks()[0].active());
}

#[test]
fn a_stranger_that_claims_to_follow_a_working_rank_ends_nothing() {
    let mut world = World::ready(config(1, 1));
    let from = Peer { number: 0, epoch: 7, receiver_epoch: 0, seq: 1 };
    let actions = world.handle(Event::Hello { side: Side::Rank, from, schema: 98, name: "old".to_owned() });
    assert!(matches!(&actions[..], [Action::Log(crate::log::Level::Warning, _)]), "{actions:?}");
    assert_eq!(world.core.counters().malformed, 1);
    assert!(world.core.budget().ranks()[0].active());
}

#[test]
fn a_dead_rank_ends_what_it_had_and_gets_nothing() {
    let mut world = World::ready(config(2, 1));
    let (first, second) = (world.request(), world.request());
    let actions = world.rank_state(0, false);
    assert!(actions.contains(&Action::ForgetRank { rank: 0 }));
    assert_eq!((world.status(first), world.status(second)), (Some(503), None));
    for _ in 0..3 {
        let rid = world.request();
        assert_eq!(world.sent[&rid].0, 1);
    }
    world.step(0, &[(first, true)]);
    assert_eq!(world.core.counters().fenced, 1, "what it still had under way is nothing");
}

#[test]
fn the_last_word_of_a_dead_rank_is_no_load() {
    let mut world = World::ready(config(2, 1));
    let from = world.peer(Side::Rank, 0);
    let busy = Load { running: 3, held_tokens: 900, ..Load::default() };
    world.handle(Event::Batch { from, last_dispatch: 0, load: Some(busy), rows: Ok(&TestRows(vec![])) });
    assert_eq!(world.core.budget().ranks()[0].tokens(), 900);
    world.rank_state(0, false);
    world.assert_empty();
}

#[test]
fn a_later_life_of_a_rank_replaces_the_former() {
    let mut world = World::ready(config(1, 1));
    let rid = world.request();
    let actions = world.hello(Side::Rank, 0, 2);
    assert!(actions.contains(&Action::HelloRank { rank: 0, receiver_epoch: 2 }));
    assert_eq!(world.status(rid), Some(503));
    let waits = world.request();
    assert!(!world.sent.contains_key(&waits), "supervision has not said that it is ready");
    world.rank_state(0, true);
    assert!(world.sent.contains_key(&waits));
    let actions = world.hello(Side::Rank, 0, 1);
    assert_eq!(actions, [], "the former life is fenced");
}

#[test]
fn a_dead_worker_aborts_its_requests_and_a_new_life_joins() {
    let mut world = World::ready(config(1, 2));
    let gone = world.request_with(|request| request.group = Some(Group { id: 5, index: 0, size: 2, prompt: 0 }));
    let mine = world.mint(1);
    let from = world.peer(Side::Worker, 1);
    let request = Request {
        rid: mine,
        rank: -1,
        tokens: 1,
        stream: true,
        group: None,
        room: None,
        prefixes: Vec::new(),
        text: Ok(TextOptions::default()),
        bytes: 100,
        frame: 0,
    };
    world.handle(Event::Request { from, request });
    let late = world.peer(Side::Worker, 0);
    let actions = world.handle(Event::WorkerDown { worker: 0, epoch: None });
    assert!(actions.contains(&Action::ForgetWorker { worker: 0 }));
    assert_eq!(world.aborts, [gone]);
    assert_eq!(world.handle(Event::Abort { from: late, rid: mine }), []);
    world.step(0, &[(gone, true), (mine, true)]);
    world.assert_empty();
    assert_eq!(world.core.open_groups(), 0, "members that will never come are not waited for");
    let actions = world.hello(Side::Worker, 0, 2);
    assert!(actions.contains(&Action::HelloWorker { worker: 0, receiver_epoch: 2 }));
    let rid = world.request();
    assert!(world.sent.contains_key(&rid));
}

#[test]
fn a_cut_worker_loses_its_requests_with_an_error() {
    let mut world = World::ready(config(1, 2));
    let rid = world.request();
    world.handle(Event::WorkerCut { route: Route { worker: 1, epoch: 1 } });
    assert!(world.failed.is_empty());
    world.handle(Event::WorkerCut { route: Route { worker: 0, epoch: 1 } });
    assert_eq!((world.status(rid), &world.aborts[..]), (Some(503), &[rid][..]));
    world.step(0, &[]);
    world.assert_empty();
}

#[test]
fn what_the_pipe_does_not_take_is_refused() {
    let mut world = World::ready(config(1, 1));
    let rid = world.request();
    world.handle(Event::Unsent { rid });
    assert_eq!(world.status(rid), Some(503));
    world.assert_empty();
}

#[test]
fn a_broken_batch_ends_what_its_rank_had() {
    let mut world = World::ready(config(2, 1));
    let (first, second) = (world.request(), world.request());
    let from = world.peer(Side::Rank, 0);
    world.handle(Event::Batch { from, last_dispatch: 0, load: None, rows: Err("byte 7".to_owned()) });
    assert_eq!((world.status(first), world.status(second)), (Some(500), None));
    assert_eq!(world.aborts, [first]);
}

#[test]
fn what_is_for_workers_reaches_no_rank() {
    let mut world = World::ready(config(2, 2));
    let (id, from) = (world.mint(0), world.peer(Side::Worker, 0));
    let actions = world.handle(Event::Control { from, id, ask: Ask::Workers, frame: 5 });
    let workers = [0, 1].map(|worker| Route { worker, epoch: 1 }).to_vec();
    assert_eq!(
        actions,
        [
            Action::Answer { id, refusal: None, asked: vec![-2, -3], state: false },
            Action::Control { ranks: vec![], workers, frame: 5 }
        ]
    );
}

#[test]
fn ranks_may_tell_each_other_out() {
    let mut world = World::ready(config(2, 1));
    let from = world.peer(Side::Rank, 0);
    world.handle(Event::ActiveRanks { from, active: vec![true, false] });
    for _ in 0..3 {
        let rid = world.request();
        assert_eq!(world.sent[&rid].0, 0);
    }
    let from = world.peer(Side::Rank, 0);
    world.handle(Event::ActiveRanks { from, active: vec![true, true] });
    let rid = world.request();
    assert_eq!(world.sent[&rid].0, 1);
}

#[test]
fn supervision_can_end_everything() {
    let mut world = World::ready(config(2, 1));
    let live: Vec<Rid> = (0..5).map(|_| world.request()).collect();
    world.handle(Event::FailAll { message: "control goes".to_owned() });
    assert!(live.iter().all(|rid| world.failed[rid] == (503, "control goes".to_owned())));
    assert_eq!(world.aborts.len(), live.len());
    world.assert_empty();
    let late = world.request();
    assert_eq!(world.status(late), Some(503));
    world.handle(Event::FailAll { message: "again".to_owned() });
    world.assert_empty();
}

#[test]
fn a_draining_router_finishes_and_takes_nothing() {
    let mut world = World::ready(config(1, 1));
    let rid = world.request();
    world.handle(Event::Drain);
    let late = world.request();
    assert_eq!((world.status(rid), world.status(late)), (None, Some(503)));
    world.step(0, &[(rid, true)]);
    world.assert_empty();
}

#[test]
fn a_bootstrap_room_is_for_one_request_at_a_time() {
    let mut world = World::ready(config(2, 1));
    let first = world.request_with(|request| request.room = Some(5));
    let second = world.request_with(|request| request.room = Some(5));
    let other = world.request_with(|request| request.room = Some(6));
    assert_eq!(world.failed[&second].0, 400);
    assert!(world.failed[&second].1.contains("room 5"));
    let third = world.request_with(|request| request.room = Some(5));
    assert!(world.failed.contains_key(&third), "the refusal has not emptied the room");
    for rid in [first, other] {
        let rank = world.sent[&rid].0 as u16;
        world.step(rank, &[(rid, true)]);
    }
    let fourth = world.request_with(|request| request.room = Some(5));
    assert!(world.sent.contains_key(&fourth));
    world.abort(fourth);
    world.step(world.sent[&fourth].0 as u16, &[(fourth, true)]);
    world.assert_empty();
}
