//! One hot path over and over, for a profiler; prints the CPU time a row, which a busy machine distorts less than the
//! clock's.
//!
//! ```sh
//! cargo run --release -p servekit-benches --example hot -- split_str 256 4 100000
//! valgrind --tool=callgrind target/release/examples/hot detok 256 4 1000
//! ```
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "it ends by panicking")]

use std::hint::black_box;
use std::sync::Arc;

use servekit_benches::{VOCABULARY, scan, shard, str_step, token_step, vocabulary};
use servekit_core::detok::ShardOutput;
use servekit_core::split::split_by_worker;
use servekit_core::wire::Kind;

/// Samples of which the best counts.
const SAMPLES: usize = 20;

/// CPU time of this process so far, in nanoseconds.
fn cpu_time() -> u64 {
    let stat = std::fs::read_to_string("/proc/self/schedstat").expect("Linux");
    stat.split(' ').next().and_then(|field| field.parse().ok()).expect("a number")
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [path, numbers @ ..] = &arguments[..] else { panic!("hot PATH ROWS WORKERS ROUNDS") };
    let numbers: Vec<usize> = numbers.iter().map(|number| number.parse().expect("a number")).collect();
    let [rows, workers, rounds] = numbers[..] else { panic!("hot PATH ROWS WORKERS ROUNDS") };
    let split = |kind, body: Vec<u8>| {
        let body = Arc::new(body);
        Box::new(move || drop(black_box(split_by_worker(&scan(kind, &body))))) as Box<dyn FnMut()>
    };
    let mut work = match &path[..] {
        "split_str" => split(Kind::BatchStr, str_step(rows, workers)),
        "split_tokenid" => split(Kind::BatchTokenId, token_step(rows, workers, VOCABULARY, 0)),
        "split_tokenid_top5" => split(Kind::BatchTokenId, token_step(rows, workers, VOCABULARY, 5)),
        "detok" => {
            let body = Arc::new(token_step(rows, workers, VOCABULARY, 0));
            let mut shard = shard(vocabulary(), rows, workers);
            Box::new(move || {
                let mut out = ShardOutput::default();
                shard.batch(&scan(Kind::BatchTokenId, &body), &mut out);
                drop(black_box(out));
            })
        }
        other => panic!("no path {other}: split_str, split_tokenid, split_tokenid_top5 or detok"),
    };
    let mut samples: Vec<f64> = (0..SAMPLES)
        .map(|_| {
            let start = cpu_time();
            (0..rounds.div_ceil(SAMPLES)).for_each(|_| work());
            (cpu_time() - start) as f64 / (rounds.div_ceil(SAMPLES) * rows) as f64
        })
        .collect();
    samples.sort_by(f64::total_cmp);
    println!("{path} b{rows} w{workers}: best {:.1}, median {:.1} ns a row", samples[0], samples[SAMPLES / 2]);
}
