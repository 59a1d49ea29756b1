//! A step's ids to text: scanned frame in, one body a worker out; a stop string on half of the streams.

use std::hint::black_box;
use std::sync::Arc;

use criterion::{BatchSize, BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use servekit_benches::{rid, scan, settings, token_step, tokenizer_json};
use servekit_core::detok::{Shard, ShardOutput, Vocabulary};
use servekit_core::wire::{Kind, TextOptions};

/// The tokenizer of `SERVEKIT_BENCH_TOKENIZER`, a `tokenizer.json`; without it one of single bytes, which has fewer ids.
fn vocabulary() -> (Arc<Vocabulary>, u32) {
    let given = std::env::var_os("SERVEKIT_BENCH_TOKENIZER");
    let (json, first) = match given {
        Some(path) => (std::fs::read(path).unwrap_or_default(), 300),
        None => (tokenizer_json().into_bytes(), 0),
    };
    match Vocabulary::from_json(&json) {
        Ok(vocabulary) => (Arc::new(vocabulary), first),
        Err(error) => panic!("{error}"),
    }
}

fn detok(c: &mut Criterion) {
    let (vocabulary, first) = vocabulary();
    let mut group = c.benchmark_group("detok");
    group.warm_up_time(settings::WARM_UP).measurement_time(settings::MEASURE);
    for rows in [16, 64, 256, 1024] {
        let workers = 4;
        let body = Arc::new(token_step(rows, workers, |i| first + (i * 31 % 90) as u32));
        let mut shard = Shard::new(0, 1, Some(Arc::clone(&vocabulary)));
        for i in 0..rows {
            let stops = if i % 2 == 0 { vec!["never said".to_owned()] } else { Vec::new() };
            shard.open(rid(i, workers), TextOptions { stops, ..TextOptions::default() }, true);
        }
        group.throughput(Throughput::Elements(rows as u64));
        group.bench_function(BenchmarkId::from_parameter(format!("b{rows}_w{workers}")), |b| {
            b.iter_batched(
                ShardOutput::default,
                |mut out| {
                    shard.batch(&scan(Kind::BatchTokenId, &body), &mut out);
                    black_box(out)
                },
                BatchSize::SmallInput,
            );
        });
        assert_eq!(shard.live(), rows, "nobody finished");
    }
    group.finish();
}

criterion_group!(benches, detok);
criterion_main!(benches);
