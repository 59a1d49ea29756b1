//! Control messages: who gets them, who answers.

use super::*;

#[test]
fn control_messages_go_to_active_ranks_and_unknown_ones_nowhere() {
    let mut world = World::ready(config(3, 1));
    world.rank_state(1, false);
    let (id, from) = (world.mint(0), world.peer(Side::Worker, 0));
    let actions = world.handle(Event::Control { from, id, ask: Ask::State, frame: 5 });
    assert_eq!(
        actions,
        [
            Action::Answer { id, refusal: None, asked: vec![0, 2], state: true },
            Action::Control { ranks: vec![(0, 1), (2, 1)], workers: vec![], frame: 5 }
        ]
    );
    let from = world.peer(Side::Rank, 2);
    let reply = Event::Reply { side: Side::Rank, from, id, frame: 6 };
    assert_eq!(world.handle(reply), [Action::Forward { id, frame: 6 }]);
    let from = world.peer(Side::Worker, 0);
    let actions = world.handle(Event::Control { from, id, ask: Ask::Unknown(80), frame: 7 });
    let [Action::Log(..), Action::Answer { refusal: Some(why), asked, .. }] = &actions[..] else {
        panic!("{actions:?}")
    };
    assert!(why.contains("kind 80") && asked.is_empty(), "refused, not broadcast");
    let first = world.handle(Event::Unknown { side: Side::Worker, number: 0, kind: 80 });
    let second = world.handle(Event::Unknown { side: Side::Worker, number: 0, kind: 80 });
    assert!(first.is_empty() && second.is_empty(), "logged once per peer");
    assert_eq!(world.core.counters().unknown, 3);
}

#[test]
fn a_flush_forgets_what_ranks_have_cached() {
    let mut world = World::ready(CoreConfig { method: LoadBalanceMethod::CacheAware, ..config(2, 1) });
    let mut ask = || {
        let rid = world.request_with(|request| (request.tokens, request.prefixes) = (640, (1..10).collect()));
        let (rank, tokens) = (world.sent[&rid].0, world.core.queued_tokens());
        world.step(rank as u16, &[(rid, true)]);
        (rank, tokens)
    };
    let home = ask();
    assert_eq!((home.1, ask()), (640, (home.0, 64)));
    let (id, from) = (world.mint(0), world.peer(Side::Worker, 0));
    world.handle(Event::Control { from, id, ask: Ask::FlushCache, frame: 5 });
    let rid = world.request_with(|request| (request.tokens, request.prefixes) = (640, (1..10).collect()));
    assert_eq!(world.core.queued_tokens(), 640);
    let rank = world.sent[&rid].0;
    world.step(rank as u16, &[(rid, true)]);
    world.assert_empty();
}

#[test]
fn a_log_level_reaches_the_workers_too() {
    let mut world = World::ready(config(1, 3));
    world.handle(Event::WorkerDown { worker: 1, epoch: None });
    let (id, from) = (world.mint(0), world.peer(Side::Worker, 0));
    let actions = world.handle(Event::Control { from, id, ask: Ask::LogLevel(Level::Debug), frame: 5 });
    let workers = [0, 2].map(|worker| Route { worker, epoch: 1 }).to_vec();
    assert_eq!(
        actions,
        [
            Action::SetLogLevel(Level::Debug),
            Action::Answer { id, refusal: None, asked: vec![0, -2, -4], state: false },
            Action::Control { ranks: vec![(0, 1)], workers, frame: 5 }
        ]
    );
    let from = world.peer(Side::Worker, 2);
    let reply = Event::Reply { side: Side::Worker, from, id, frame: 6 };
    assert_eq!(world.handle(reply), [Action::Forward { id, frame: 6 }]);
}

#[test]
fn what_can_not_be_obeyed_is_refused() {
    let mut world = World::ready(config(1, 1));
    let (id, from) = (world.mint(0), world.peer(Side::Worker, 0));
    let actions = world.handle(Event::Control { from, id, ask: Ask::Refused("no level".to_owned()), frame: 5 });
    assert_eq!(actions, [Action::Answer { id, refusal: Some("no level".to_owned()), asked: vec![], state: false }]);
}
