//! The control process's decisions in virtual time, with the real router core, budget and detokenizer shards, between
//! simulated workers and ranks. Each seed is one life; `SERVEKIT_SIMULATION_SEED=N` plays one again, and
//! `SERVEKIT_SIMULATION_SEEDS=N` plays the first N.

#![expect(clippy::expect_used, reason = "a test fails by panicking")]

mod behaviour;
mod bodies;
mod ledger;
mod peers;
mod policies;
mod random;
mod serving;
mod world;

use std::panic::{AssertUnwindSafe, catch_unwind};

use servekit_core::dispatch::LoadBalanceMethod;
use servekit_core::router::Side;
use servekit_core::stats::Counters;

use random::Random;
use world::{Chaos, MS, What, World};

/// Seeds that are played unless somebody asks for more.
const SEEDS: u64 = 10_000;

/// What all lives together went through, so that a simulation that simulates nothing is noticed.
#[derive(Default)]
struct Total {
    events: u64,
    tokens: u64,
    counters: Vec<(&'static str, u64)>,
}

impl Total {
    fn add(&mut self, world: &World) {
        self.events += world.events;
        self.tokens += world.ledger.tokens();
        self.counters.resize(Counters::default().named().count(), ("", 0));
        for (sum, (name, count)) in self.counters.iter_mut().zip(world.counters().named()) {
            *sum = (name, sum.1 + count);
        }
    }
}

/// One life. One in eight is calm: nothing goes wrong, so nothing may fail.
fn live(seed: u64) -> World {
    let mut random = Random::new(seed ^ 0x5EED);
    let methods = LoadBalanceMethod::ALL;
    let method = methods[random.below(methods.len() as u64) as usize];
    let (ranks, workers) = (random.between(1, 4) as usize, random.between(1, 3) as usize);
    let mut world = World::new(seed, ranks, workers, random.between(1, 3) as usize, method);
    let calm = random.once_in(8);
    let span = 400 * MS;
    for _ in 0..random.between(5, 40) {
        let worker = random.below(workers as u64) as usize;
        world.after(10 * MS + random.below(span), What::Ask { worker });
    }
    if !calm {
        let often = |random: &mut Random, n| if random.once_in(2) { 0 } else { n };
        world.chaos = Chaos {
            lost: often(&mut random, 150),
            twice: often(&mut random, 30),
            late: often(&mut random, 60),
            strays: often(&mut random, 20),
            stale: often(&mut random, 5),
            unsent: often(&mut random, 40),
        };
        for _ in 0..random.below(6) {
            let side = if random.once_in(2) { Side::Worker } else { Side::Rank };
            let number = random.below(if side == Side::Worker { workers } else { ranks } as u64) as usize;
            let what = match random.below(12) {
                0..5 => What::Kill { side, number },
                5..8 => What::Freeze { side, number },
                8..10 => What::Mask,
                10 => What::Cut { worker: random.below(workers as u64) as usize },
                _ => What::RestartControl,
            };
            world.after(10 * MS + random.below(span), what);
        }
    }
    // Longer than anything can be frozen, late or waited for by supervision; and once more for what that brought up.
    world.after(5000 * MS, What::Settle);
    world.after(10_000 * MS, What::Settle);
    world.run();
    world.assert_over();
    if calm {
        let counters = world.counters();
        let wrong = [counters.failed, counters.stray, counters.gaps, counters.fenced, counters.replayed];
        assert_eq!(wrong, [0; 5], "something went wrong in a calm life: {counters:?}");
        assert_eq!(world.core.open_groups(), 0);
    }
    world
}

fn number(variable: &str) -> Option<u64> {
    let text = std::env::var(variable).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{variable} is {text:?}, must be a number")))
}

#[test]
fn whatever_happens_each_request_ends_once_and_nothing_is_left() {
    if let Some(seed) = number("SERVEKIT_SIMULATION_SEED") {
        println!("{:?}", live(seed).counters());
        return;
    }
    let mut total = Total::default();
    let seeds = number("SERVEKIT_SIMULATION_SEEDS").unwrap_or(SEEDS);
    for seed in 1..=seeds {
        match catch_unwind(AssertUnwindSafe(|| live(seed))) {
            Ok(world) => total.add(&world),
            Err(_) => panic!("seed {seed} fails: SERVEKIT_SIMULATION_SEED={seed} plays it again"),
        }
    }
    println!("{seeds} lives, {} events, {} tokens, {:?}", total.events, total.tokens, total.counters);
    if seeds >= SEEDS {
        // Each thing that can be counted in such lives was, often. Nobody lies in them: the router's own tests do.
        let never = ["malformed", "unknown", "forged", "duplicates"];
        for (name, count) in total.counters.into_iter().filter(|(name, _)| !never.contains(name)) {
            assert!(count > 100, "{name} was counted {count} times in all lives");
        }
    }
}
