//! A step's ids to text: scanned frame in, one body a worker out; a stop string on half of the streams.

use std::hint::black_box;
use std::sync::Arc;

use criterion::{BatchSize, BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use servekit_benches::{rid, scan, settings, token_step};
use servekit_core::detok::{Shard, ShardOutput, Vocabulary};
use servekit_core::wire::{Kind, TextOptions};

/// A byte-level vocabulary in which id 33 + i is the printable character of byte 33 + i.
fn vocabulary() -> Arc<Vocabulary> {
    let tokens: Vec<String> = (0..94).map(|i| format!("{:?}:{i}", char::from(b'!' + i).to_string())).collect();
    let json = format!(
        r#"{{"version":"1.0","truncation":null,"padding":null,"added_tokens":[],"normalizer":null,
        "pre_tokenizer":{{"type":"ByteLevel","add_prefix_space":false,"trim_offsets":true,"use_regex":true}},
        "post_processor":null,"decoder":{{"type":"ByteLevel","add_prefix_space":true,"trim_offsets":true,"use_regex":true}},
        "model":{{"type":"BPE","dropout":null,"unk_token":null,"continuing_subword_prefix":null,"end_of_word_suffix":null,
        "fuse_unk":false,"byte_fallback":false,"ignore_merges":false,"vocab":{{{}}},"merges":[]}}}}"#,
        tokens.join(",")
    );
    match Vocabulary::from_json(json.as_bytes()) {
        Ok(vocabulary) => Arc::new(vocabulary),
        Err(error) => panic!("{error}"),
    }
}

fn detok(c: &mut Criterion) {
    let vocabulary = vocabulary();
    let mut group = c.benchmark_group("detok");
    group.warm_up_time(settings::WARM_UP).measurement_time(settings::MEASURE);
    for rows in [16, 64, 256, 1024] {
        let workers = 4;
        let body = Arc::new(token_step(rows, workers, |i| (i % 90) as u32));
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
