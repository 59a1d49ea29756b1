//! Splitting a step's frame by worker: bytes in, one body a worker out.

use std::hint::black_box;
use std::sync::Arc;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use servekit_benches::{VOCABULARY, scan, settings, str_step, token_step};
use servekit_core::split::split_by_worker;
use servekit_core::wire::Kind;

fn split(c: &mut Criterion) {
    let mut group = c.benchmark_group("split");
    group.warm_up_time(settings::WARM_UP).measurement_time(settings::MEASURE);
    for workers in [1, 4, 16] {
        for rows in [1, 16, 64, 256, 1024] {
            let bodies = [
                ("str", Kind::BatchStr, Arc::new(str_step(rows, workers))),
                ("token_id", Kind::BatchTokenId, Arc::new(token_step(rows, workers, VOCABULARY, 0))),
                ("token_id_top5", Kind::BatchTokenId, Arc::new(token_step(rows, workers, VOCABULARY, 5))),
            ];
            for (name, kind, body) in bodies {
                group.throughput(Throughput::Elements(rows as u64));
                group.bench_with_input(BenchmarkId::new(name, format!("b{rows}_w{workers}")), &body, |b, body| {
                    b.iter(|| black_box(split_by_worker(&scan(kind, body))));
                });
            }
        }
    }
    group.finish();
}

criterion_group!(benches, split);
criterion_main!(benches);
