//! What each method costs the clients, and what every method promises.
//!
//! `cargo test --release -p servekit-core --test simulation policies -- --nocapture` prints the table of
//! `docs/dispatch.md`.

use servekit_core::dispatch::LoadBalanceMethod::{self, *};
use servekit_core::dispatch::{DpBudget, Prompt, Report};

use super::serving::{Lengths, Model, Outcome, Serving, jobs};
use super::world::MS;

const RANKS: usize = 8;
const SEEDS: u64 = 8;
const JOBS: usize = 2000;
const METHODS: [LoadBalanceMethod; 5] = [RoundRobin, FollowBootstrapRoom, TotalRequests, TotalTokens, CacheAware];

/// A load under which methods are compared.
struct Load {
    name: &'static str,
    lengths: Lengths,
    rate: f64,
    serving: Serving,
}

const fn load(name: &'static str, lengths: Lengths, rate: f64, stale: bool, caches: bool) -> Load {
    let (late, every) = if stale { (250 * MS, 500 * MS) } else { (MS, 0) };
    Load { name, lengths, rate, serving: Serving { ranks: RANKS, late, every, caches } }
}

const LOADS: [Load; 6] = [
    load("uniform lengths", Lengths::Uniform, 250.0, false, true),
    load("skewed lengths", Lengths::Skewed, 200.0, false, true),
    load("skewed, stale reports", Lengths::Skewed, 200.0, true, true),
    load("shared prefixes", Lengths::Shared, 120.0, false, true),
    load("shared, stale reports", Lengths::Shared, 120.0, true, true),
    load("shared, ranks without a cache", Lengths::Shared, 100.0, false, false),
];

/// Figures of all seeds together.
#[derive(Clone, Copy, Debug)]
struct Figures {
    first: f64,
    first_p99: f64,
    last: f64,
    busiest: f64,
    computed: f64,
}

fn figures(load: &Load, method: LoadBalanceMethod) -> Figures {
    let (mut first, mut last) = (Vec::new(), Vec::new());
    let (mut busiest, mut computed, mut prompts) = (0.0, 0, 0);
    for seed in 1..=SEEDS {
        let jobs = jobs(seed, load.lengths, load.rate, JOBS);
        let Outcome { first: f, last: l, counts, computed: c, prompts: p, .. } =
            Model::serve(load.serving, method, &jobs);
        assert_eq!((f.len(), l.len()), (JOBS, JOBS), "a job was lost");
        busiest += share(&counts) / SEEDS as f64;
        (computed, prompts) = (computed + c, prompts + p);
        first.extend(f);
        last.extend(l);
    }
    first.sort_by(f64::total_cmp);
    let mean = |times: &[f64]| times.iter().sum::<f64>() / times.len() as f64;
    Figures {
        first: mean(&first),
        first_p99: first[first.len() * 99 / 100],
        last: mean(&last),
        busiest,
        computed: computed as f64 / prompts as f64,
    }
}

/// Requests of the busiest rank over the mean.
fn share(counts: &[u64]) -> f64 {
    let most = counts.iter().max().copied().unwrap_or(0);
    most as f64 * counts.len() as f64 / counts.iter().sum::<u64>() as f64
}

#[test]
fn policies_compared() {
    println!("| load | method | first token, mean ms | p99 ms | last token, mean ms | busiest / mean | computed |");
    println!("|---|---|---|---|---|---|---|");
    for load in &LOADS {
        let all = METHODS.map(|method| (method, figures(load, method)));
        for (method, f) in all {
            println!(
                "| {} | `{}` | {:.0} | {:.0} | {:.0} | {:.2} | {:.0} % |",
                load.name,
                method.name(),
                f.first,
                f.first_p99,
                f.last,
                f.busiest,
                100.0 * f.computed
            );
        }
    }
}
