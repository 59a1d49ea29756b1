//! Random lives of a router: whatever happens, in whatever order, its invariants hold.

use super::*;

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
