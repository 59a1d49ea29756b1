//! Choosing a data-parallel rank and booking the request there, reports coming back.

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use servekit_benches::settings;
use servekit_core::dispatch::{DpBudget, LoadBalanceMethod, Report};

fn dispatch(c: &mut Criterion) {
    let mut group = c.benchmark_group("dispatch");
    group.warm_up_time(settings::WARM_UP).measurement_time(settings::MEASURE);
    for method in [LoadBalanceMethod::RoundRobin, LoadBalanceMethod::TotalRequests, LoadBalanceMethod::TotalTokens] {
        for ranks in [2, 8, 64, 256] {
            group.bench_function(BenchmarkId::new(method.name(), ranks), |b| {
                let mut budget = DpBudget::new(ranks);
                (0..ranks).for_each(|rank| budget.set_active(rank, true));
                b.iter(|| {
                    let chosen = budget.dispatch(method, black_box(128), Some(7));
                    if let Ok(booked) = chosen {
                        // The rank sees the request and holds it: what was dispatched becomes what is reported.
                        let report = Report { last_dispatch: booked.dispatch, requests: 1, tokens: 128 };
                        budget.update(booked.rank, report);
                    }
                    chosen
                });
            });
        }
    }
    group.finish();
}

criterion_group!(benches, dispatch);
criterion_main!(benches);
