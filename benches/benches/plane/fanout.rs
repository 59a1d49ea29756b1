//! Splitting a step and sending the parts to workers that drain them: CPU of the sender, I/O thread included.

use std::sync::Arc;
use std::time::{Duration, Instant};

use servekit_benches::{scan, str_step};
use servekit_core::fanout::{Sent, SocketMapping};
use servekit_core::router::frames::batch;
use servekit_core::split::split_by_worker;
use servekit_core::wire::Kind;
use servekit_zmq::{Context, Message};

use crate::figures::{Figures, cpu_time};
use crate::peers::{EPOCH, Folder, Peer};

const SAMPLES: usize = 7;
/// Batches in a burst; the readers empty their sockets between two.
const BURST: usize = 200;
const BURSTS: usize = 3;
/// Batches of a sample at one every 2 ms.
const PACED: usize = 150;

pub(crate) fn run(figures: &mut Figures) {
    for (rows, workers) in [(64, 16), (256, 4)] {
        let folder = Folder::new();
        let _readers: Vec<Peer> = (0..workers).map(|worker| Peer::start("drain", folder.path(), &[worker])).collect();
        let mapping = SocketMapping::open(Context::new(), folder.path(), EPOCH, "bench");
        let mut sender = Sender { mapping: mapping.with_most_unacknowledged(usize::MAX), body: body(rows, workers) };
        sender.send();
        std::thread::sleep(Duration::from_millis(100));
        let per_request = |batches: usize, cpu: Duration| cpu.as_secs_f64() * 1e6 / (batches * rows) as f64;
        let samples: Vec<f64> = (0..SAMPLES).map(|_| per_request(BURST * BURSTS, sender.bursts())).collect();
        figures.write(&format!("fanout_b{rows}_w{workers}_us_per_request"), "us", &samples);
        let samples: Vec<f64> = (0..SAMPLES).map(|_| per_request(PACED, sender.paced())).collect();
        figures.write(&format!("fanout_b{rows}_w{workers}_every_2ms_us_per_request"), "us", &samples);
    }
}

fn body(rows: usize, workers: usize) -> Arc<Vec<u8>> {
    Arc::new(str_step(rows, workers))
}

struct Sender {
    mapping: SocketMapping,
    body: Arc<Vec<u8>>,
}

impl Sender {
    /// One step: scanned, split, sent.
    fn send(&mut self) {
        for part in split_by_worker(&scan(Kind::BatchStr, &self.body)) {
            let frames = vec![Message::from(batch(EPOCH, Kind::BatchStr, part.rows)), Message::from_shared(part.body)];
            let sent = self.mapping.send_output(part.route, frames);
            assert_eq!(sent.expect("a socket"), Sent::Yes);
        }
    }

    /// CPU time of batches back to back.
    fn bursts(&mut self) -> Duration {
        let before = cpu_time();
        for _ in 0..BURSTS {
            (0..BURST).for_each(|_| self.send());
            // The I/O thread and the readers work on; waiting costs nothing.
            std::thread::sleep(Duration::from_millis(100));
        }
        cpu_time() - before
    }

    /// CPU time of one batch every 2 ms.
    fn paced(&mut self) -> Duration {
        let before = cpu_time();
        let mut due = Instant::now();
        for _ in 0..PACED {
            self.send();
            due += Duration::from_millis(2);
            std::thread::sleep(due.saturating_duration_since(Instant::now()));
        }
        cpu_time() - before
    }
}
