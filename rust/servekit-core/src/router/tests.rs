//! What the router promises, told as events and the actions that follow.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use super::*;
use crate::dispatch::LoadBalanceMethod;
use crate::wire::{Group, Load, Rid, Route, TextOptions};

const SECOND: Nanos = 1_000_000_000;

/// Rows as (request, finished).
struct TestRows(Vec<(Rid, bool)>);

impl Rows for TestRows {
    fn rows(&self) -> usize {
        self.0.len()
    }
    fn rid(&self, row: usize) -> Rid {
        self.0[row].0
    }
    fn finished(&self, row: usize) -> bool {
        self.0[row].1
    }
}

/// A core, its links' counters, and what has become of each request.
struct World {
    core: Core<u64>,
    now: Nanos,
    seqs: HashMap<(bool, u16), u64>,
    opened: HashMap<Rid, u32>,
    failed: HashMap<Rid, (u16, String)>,
    sent: HashMap<Rid, (usize, u64)>,
    aborts: Vec<Rid>,
    minted: u64,
    finished: HashSet<Rid>,
}

fn config(ranks: usize, workers: usize) -> CoreConfig {
    CoreConfig {
        epoch: 1,
        schema: 99,
        method: LoadBalanceMethod::TotalRequests,
        rank_epochs: vec![1; ranks],
        worker_epochs: vec![1; workers],
        rank_wait: Duration::from_secs(30),
        max_queued: 8,
    }
}

impl World {
    fn new(config: CoreConfig) -> Self {
        let workers = config.worker_epochs.len();
        let core = Core::new(config);
        let mut world = Self {
            core,
            now: SECOND,
            seqs: HashMap::new(),
            opened: HashMap::new(),
            failed: HashMap::new(),
            sent: HashMap::new(),
            aborts: Vec::new(),
            minted: 0,
            finished: HashSet::new(),
        };
        (0..workers).for_each(|worker| drop(world.hello(Side::Worker, worker as u16, 1)));
        world
    }

    /// A world whose ranks are all active and run up to 4 requests each.
    fn ready(config: CoreConfig) -> Self {
        let ranks = config.rank_epochs.len();
        let mut world = Self::new(config);
        for rank in 0..ranks {
            world.hello(Side::Rank, rank as u16, 1);
            world.rank_state(rank, true);
        }
        world
    }

    fn peer(&mut self, side: Side, number: u16) -> Peer {
        let seq = self.seqs.entry((side == Side::Rank, number)).or_insert(1);
        *seq += 1;
        let epoch = match side {
            Side::Rank => self.core.ranks()[usize::from(number)].epoch,
            Side::Worker => self.core.workers().nth(usize::from(number)).unwrap().0,
        };
        Peer { number, epoch, receiver_epoch: 1, seq: *seq }
    }

    fn handle(&mut self, event: Event<'_, u64>) -> Vec<Action<u64>> {
        let mut actions = Vec::new();
        self.core.handle(event, self.now, &mut actions);
        for action in &actions {
            match action {
                Action::Open { rid, .. } => *self.opened.entry(*rid).or_default() += 1,
                Action::Fail { rid, status, message, .. } => {
                    assert!(self.opened.contains_key(rid), "failed before it was opened");
                    let before = self.failed.insert(*rid, (*status, message.clone()));
                    assert!(before.is_none() && !self.finished.contains(rid), "two terminal events");
                }
                Action::Send { rid, rank, dispatch, attempt, .. } => {
                    assert!(!self.failed.contains_key(rid), "sent after its end");
                    assert_eq!(*attempt, 1);
                    assert_eq!(self.sent.insert(*rid, (*rank, *dispatch)), None, "sent twice");
                }
                Action::Abort { rid, .. } => self.aborts.push(*rid),
                _ => {}
            }
        }
        actions
    }

    fn hello(&mut self, side: Side, number: u16, epoch: u32) -> Vec<Action<u64>> {
        self.seqs.insert((side == Side::Rank, number), 1);
        let from = Peer { number, epoch, receiver_epoch: 0, seq: 1 };
        self.handle(Event::Hello { side, from, schema: 99, name: "test".to_owned() })
    }

    fn rank_state(&mut self, rank: usize, active: bool) -> Vec<Action<u64>> {
        self.handle(Event::RankState { rank, active, reason: "killed by signal 9".to_owned(), max_running: 4 })
    }

    fn mint(&mut self, worker: u16) -> Rid {
        self.minted += 1;
        Rid::mint(worker, self.core.workers().nth(usize::from(worker)).unwrap().0, self.minted)
    }

    fn request_with(&mut self, change: impl Fn(&mut Request<u64>)) -> Rid {
        let rid = self.mint(0);
        let from = self.peer(Side::Worker, 0);
        let mut request = Request {
            rid,
            rank: -1,
            tokens: 10,
            stream: true,
            group: None,
            room: None,
            text: Ok(TextOptions::default()),
            frame: rid.0,
        };
        change(&mut request);
        self.handle(Event::Request { from, request });
        rid
    }

    fn request(&mut self) -> Rid {
        self.request_with(|_| {})
    }

    fn abort(&mut self, rid: Rid) {
        let from = self.peer(Side::Worker, rid.worker());
        self.handle(Event::Abort { from, rid });
    }

    /// A step of a rank that ends `finished` and reports an empty rank that has seen every dispatch to it.
    fn step(&mut self, rank: u16, rows: &[(Rid, bool)]) -> Vec<Action<u64>> {
        let last_dispatch =
            self.sent.values().filter(|(at, _)| *at == usize::from(rank)).map(|(_, number)| *number).max().unwrap_or(0);
        let from = self.peer(Side::Rank, rank);
        let rows = TestRows(rows.to_vec());
        let actions = self.handle(Event::Batch { from, last_dispatch, load: Some(Load::default()), rows: Ok(&rows) });
        for (rid, _) in rows.0.into_iter().filter(|(_, finished)| *finished) {
            // A row of a request that has ended already says nothing to anybody.
            if self.sent.get(&rid).is_some_and(|(at, _)| *at == usize::from(rank)) && !self.failed.contains_key(&rid) {
                self.finished.insert(rid);
            }
        }
        actions
    }

    /// Nothing is left: no entry, no wait, no group, no charge.
    fn assert_empty(&self) {
        assert_eq!((self.core.in_flight(), self.core.waiting(), self.core.open_groups()), (0, 0, 0));
        for (budget, view) in self.core.budget().ranks().iter().zip(self.core.ranks()) {
            assert_eq!((budget.requests(), budget.tokens(), view.in_flight), (0, 0, 0));
        }
    }

    fn status(&self, rid: Rid) -> Option<u16> {
        self.failed.get(&rid).map(|(status, _)| *status)
    }
}

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
    let control = world.handle(Event::Control { from, id: forged, state: false, frame: 0 });
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
fn the_wait_is_bounded() {
    let mut world = World::new(config(1, 1));
    let waiting: Vec<Rid> = (0..8).map(|_| world.request()).collect();
    let refused = world.request();
    assert_eq!((world.status(refused), world.core.waiting()), (Some(503), waiting.len()));
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
    assert_eq!(world.core.counters().stray, 1, "what it still had under way is nothing");
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
        text: Ok(TextOptions::default()),
        frame: 0,
    };
    world.handle(Event::Request { from, request });
    let late = world.peer(Side::Worker, 0);
    let actions = world.handle(Event::WorkerDown { worker: 0 });
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
fn control_messages_go_to_active_ranks_and_unknown_ones_nowhere() {
    let mut world = World::ready(config(3, 1));
    world.rank_state(1, false);
    let (id, from) = (world.mint(0), world.peer(Side::Worker, 0));
    let actions = world.handle(Event::Control { from, id, state: true, frame: 5 });
    assert_eq!(
        actions,
        [
            Action::Answer { id, asked: vec![0, 2], state: true },
            Action::Control { ranks: vec![(0, 1), (2, 1)], frame: 5 }
        ]
    );
    let from = world.peer(Side::Rank, 2);
    assert_eq!(world.handle(Event::Reply { from, id }), [Action::Forward { id }]);
    let first = world.handle(Event::Unknown { side: Side::Worker, number: 0, kind: 80 });
    let second = world.handle(Event::Unknown { side: Side::Worker, number: 0, kind: 80 });
    assert!(matches!(first[..], [Action::Log(..)]) && second.is_empty(), "logged once per peer");
    assert_eq!(world.core.counters().unknown, 2);
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

/// A sequence of numbers that a seed repeats.
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % n as u64) as usize
    }

    fn pick(&mut self, from: &[Rid]) -> Option<Rid> {
        (!from.is_empty()).then(|| from[self.below(from.len())])
    }
}

/// What happens in one step of a random life: requests, ends and deaths in any order.
fn random_event(world: &mut World, random: &mut Random, asked: &mut Vec<Rid>, ranks: usize) {
    let rank = random.below(ranks);
    let at_rank: Vec<Rid> =
        asked.iter().copied().filter(|rid| world.sent.get(rid).is_some_and(|s| s.0 == rank)).collect();
    let any = random.pick(asked);
    match random.below(12) {
        0..4 => {
            let named = if random.below(4) == 0 { rank as i32 } else { -1 };
            asked.push(world.request_with(|request| request.rank = named));
        }
        4..7 => {
            let rows: Vec<(Rid, bool)> = at_rank.iter().map(|rid| (*rid, random.below(3) == 0)).collect();
            world.step(rank as u16, &rows);
        }
        7 if any.is_some_and(|rid| rid.route() == world_route(world)) => {
            any.into_iter().for_each(|rid| world.abort(rid))
        }
        7 => {}
        8 => any.into_iter().for_each(|rid| drop(world.handle(Event::StopMatch { rid }))),
        9 => drop(world.rank_state(rank, random.below(3) > 0)),
        10 => {
            world.now += 9 * SECOND;
            world.handle(Event::Tick);
        }
        _ => match random.below(6) {
            0 => {
                let epoch = world.core.workers().next().unwrap().0 + random.below(2) as u32;
                world.handle(Event::WorkerDown { worker: 0 });
                world.hello(Side::Worker, 0, epoch + 1);
            }
            1 => {
                let epoch = world.core.ranks()[rank].epoch + 1;
                world.hello(Side::Rank, rank as u16, epoch);
            }
            2 => {
                let live = any.filter(|rid| !world.failed.contains_key(rid) && !world.finished.contains(rid));
                if let Some(rid) = live {
                    world.request_with(|request| request.rid = rid);
                }
            }
            3 => drop(world.handle(Event::WorkerCut { route: Route { worker: 0, epoch: 1 } })),
            4 => any.into_iter().for_each(|rid| drop(world.handle(Event::Unsent { rid }))),
            _ => {
                let from = world.peer(Side::Rank, rank as u16);
                let stale = Peer { epoch: from.epoch.wrapping_sub(1), ..from };
                let rows = TestRows(at_rank.iter().map(|rid| (*rid, true)).collect());
                world.handle(Event::Batch { from: stale, last_dispatch: 0, load: None, rows: Ok(&rows) });
            }
        },
    }
}

fn world_route(world: &World) -> Route {
    Route { worker: 0, epoch: world.core.workers().next().unwrap().0 as u16 }
}

#[test]
fn whatever_happens_each_request_ends_once_and_nothing_is_left() {
    for seed in 1..=3000 {
        let (mut random, ranks) = (Random(seed * 0x9E37_79B9), 3);
        let mut world = World::ready(config(ranks, 1));
        let mut asked = Vec::new();
        for _ in 0..60 {
            random_event(&mut world, &mut random, &mut asked, ranks);
            assert!(world.core.in_flight() <= ranks * 4 + 8, "seed {seed}: more than was admitted");
            assert!(world.core.waiting() <= world.core.in_flight(), "seed {seed}");
        }
        for rank in 0..ranks {
            world.rank_state(rank, true);
        }
        for rank in 0..ranks {
            let rows: Vec<(Rid, bool)> =
                world.sent.iter().filter(|(_, sent)| sent.0 == rank).map(|(rid, _)| (*rid, true)).collect();
            world.step(rank as u16, &rows);
        }
        let left: Vec<Rid> = asked
            .into_iter()
            .filter(|rid| world.opened.contains_key(rid))
            .filter(|rid| !world.failed.contains_key(rid) && !world.finished.contains(rid))
            .collect();
        assert_eq!(left, [], "seed {seed}: without an end");
        world.assert_empty();
    }
}
