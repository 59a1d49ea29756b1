//! The whole control process under 256 streams at a step a millisecond: how much of a core it takes.

use std::time::{Duration, Instant};

use servekit_benches::{VOCABULARY, token_step};

use crate::figures::{Figures, cpu_time};
use crate::peers::{Folder, Peer};
use crate::router::{activate, start};

/// Time between two steps.
pub(crate) const PERIOD: Duration = Duration::from_millis(1);
const STREAMS: usize = 256;
const WORKERS: usize = 2;
const SAMPLES: usize = 5;

pub(crate) fn run(figures: &mut Figures) {
    let folder = Folder::new();
    let tokenizer = folder.path().join("tokenizer.json");
    std::fs::write(&tokenizer, servekit_benches::tokenizer()).expect("a file");
    let plane = start(folder.path(), WORKERS, 1, Some(&tokenizer));
    let mut rank = Peer::start("stepper", folder.path(), &[STREAMS, WORKERS]);
    activate(&plane);
    let numbers = |worker| [worker, WORKERS, STREAMS];
    let _clients: Vec<Peer> =
        (0..WORKERS).map(|worker| Peer::start("client", folder.path(), &numbers(worker))).collect();
    assert_eq!(rank.line(), "stepping");
    std::thread::sleep(Duration::from_millis(500));
    let sample = |_| {
        let (cpu, began) = (cpu_time(), Instant::now());
        std::thread::sleep(Duration::from_secs(1));
        (cpu_time() - cpu).as_secs_f64() / began.elapsed().as_secs_f64()
    };
    let samples: Vec<f64> = (0..SAMPLES).map(sample).collect();
    figures.write("control_256_streams_1ms_cores", "cores", &samples);
    let state = plane.state().expect("its state");
    let state: serde_json::Value = serde_json::from_str(&state).expect("JSON");
    assert_eq!(state["in_flight"], STREAMS, "nobody finished: {state}");
}

/// What a rank sends: a token each for all streams.
pub(crate) fn step_body(streams: usize, workers: usize) -> Vec<u8> {
    token_step(streams, workers, VOCABULARY, 0)
}
