//! A step's ids to text: scanned frame in, one body a worker out; a stop string on half of the streams.

use std::hint::black_box;
use std::sync::Arc;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use servekit_benches::{VOCABULARY, scan, settings, shard, token_step, vocabulary};
use servekit_core::detok::ShardOutput;
use servekit_core::wire::Kind;

fn detok(c: &mut Criterion) {
    let vocabulary = vocabulary();
    let mut group = c.benchmark_group("detok");
    group.warm_up_time(settings::WARM_UP).measurement_time(settings::MEASURE);
    for rows in [16, 64, 256, 1024] {
        let workers = 4;
        let body = Arc::new(token_step(rows, workers, VOCABULARY, 0));
        let mut shard = shard(Arc::clone(&vocabulary), rows, workers);
        group.throughput(Throughput::Elements(rows as u64));
        group.bench_function(BenchmarkId::from_parameter(format!("b{rows}_w{workers}")), |b| {
            b.iter(|| {
                let mut out = ShardOutput::default();
                shard.batch(&scan(Kind::BatchTokenId, &body), &mut out);
                black_box(out)
            });
        });
        assert_eq!(shard.live(), rows, "nobody finished");
    }
    group.finish();
}

criterion_group!(benches, detok);
criterion_main!(benches);
