//! Choosing a data-parallel rank and booking the request there, reports coming back.

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use servekit_benches::settings;
use servekit_core::dispatch::{DpBudget, LoadBalanceMethod, Prompt, Report, prefix_hashes};

const RANKS: [usize; 4] = [2, 8, 64, 256];
/// Tokens of a prompt whose prefixes are known, and how many such prompts take turns.
const TOKENS: u32 = 2048;
const PROMPTS: u32 = 512;

/// A choice, and the report that shows it: what was dispatched becomes what is held.
fn serve(budget: &mut DpBudget, method: LoadBalanceMethod, prompt: Prompt<'_>) {
    if let Ok(booked) = budget.dispatch(method, black_box(prompt)) {
        let report = Report::new(booked.dispatch, 1, prompt.tokens);
        budget.update(booked.rank, report);
    }
}

fn dispatch(c: &mut Criterion) {
    let mut group = c.benchmark_group("dispatch");
    group.warm_up_time(settings::WARM_UP).measurement_time(settings::MEASURE);
    for method in [
        LoadBalanceMethod::RoundRobin,
        LoadBalanceMethod::FollowBootstrapRoom,
        LoadBalanceMethod::TotalRequests,
        LoadBalanceMethod::TotalTokens,
    ] {
        for ranks in RANKS {
            group.bench_function(BenchmarkId::new(method.name(), ranks), |b| {
                let mut budget = DpBudget::new(ranks);
                b.iter(|| serve(&mut budget, method, Prompt { tokens: 128, room: Some(7), prefixes: &[] }));
            });
        }
    }
    // Prompts of which a rank has half: documents that were seen before, each with a new question.
    let hashes: Vec<Vec<u64>> = (0..PROMPTS)
        .map(|number| {
            let ids = (0..TOKENS).map(|i| if i < TOKENS / 2 { number / 4 + i } else { (number << 12) ^ i });
            prefix_hashes(&ids.flat_map(u32::to_le_bytes).collect::<Vec<_>>(), b"")
        })
        .collect();
    for ranks in RANKS {
        group.bench_function(BenchmarkId::new(LoadBalanceMethod::CacheAware.name(), ranks), |b| {
            let mut budget = DpBudget::new(ranks);
            let mut turn = hashes.iter().cycle();
            b.iter(|| {
                let prefixes = turn.next().map_or(&[][..], Vec::as_slice);
                let prompt = Prompt { tokens: u64::from(TOKENS), room: None, prefixes };
                serve(&mut budget, LoadBalanceMethod::CacheAware, prompt);
            });
        });
    }
    let ids: Vec<u8> = (0..TOKENS).flat_map(u32::to_le_bytes).collect();
    group.bench_function(BenchmarkId::new("prefix_hashes", TOKENS), |b| b.iter(|| prefix_hashes(black_box(&ids), b"")));
    group.finish();
}

criterion_group!(benches, dispatch);
criterion_main!(benches);
