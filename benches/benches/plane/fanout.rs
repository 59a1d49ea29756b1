//! Splitting a step and sending the parts to workers that drain them: CPU of the sender, I/O thread included.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use servekit_benches::{scan, str_step};
use servekit_core::fanout::{RETRY, Sent, SocketMapping};
use servekit_core::router::frames::batch;
use servekit_core::split::{Part, split_by_worker};
use servekit_core::wire::Kind;
use servekit_zmq::{Context, Message, Socket, SocketKind};

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
        let body = Arc::new(str_step(rows, workers));
        let mapping = SocketMapping::open(folder.path(), EPOCH, "bench");
        let mut mapping = mapping.with_most_unacknowledged(usize::MAX);
        measure(figures, &format!("fanout_b{rows}_w{workers}"), rows, |batches| {
            (0..batches).for_each(|_| split_and_send(&body, &mut mapping));
            // As the thread that owns a mapping does: when nothing follows.
            while !mapping.flush() {
                std::thread::sleep(RETRY);
            }
        });
        let (context, parts) = (Context::new(), split_by_worker(&scan(Kind::BatchStr, &body)));
        let sockets: Vec<Socket> = parts.iter().map(|part| connect(&context, folder.path(), part)).collect();
        measure(figures, &format!("libzmq_alone_b{rows}_w{workers}"), rows, |batches| {
            for _ in 0..batches {
                parts.iter().zip(&sockets).for_each(|(part, socket)| send(part, socket));
            }
        });
    }
}

/// One step: scanned, split, sent.
fn split_and_send(body: &Arc<Vec<u8>>, mapping: &mut SocketMapping) {
    for part in split_by_worker(&scan(Kind::BatchStr, body)) {
        let envelope = batch(EPOCH, Kind::BatchStr, -1, part.rows);
        assert_eq!(mapping.send_output(part.route, &[&envelope[..], (*part.body).as_ref()]), Sent::Yes);
    }
}

/// The same bytes to the same readers, ready-made: what libzmq and the kernel take of it.
fn send(part: &Part, socket: &Socket) {
    let envelope = batch(EPOCH, Kind::BatchStr, -1, part.rows);
    socket.send(vec![Message::from(envelope), Message::copy_of((*part.body).as_ref())], true).expect("sent");
}

fn connect(context: &Context, folder: &Path, part: &Part) -> Socket {
    let socket = context.socket(SocketKind::Push).expect("a socket");
    socket.set_send_hwm(0).expect("an option");
    socket.connect(&format!("ipc://{}", folder.join(part.route.to_string()).display())).expect("an address");
    socket
}

/// CPU time a request, with batches back to back and with one every 2 ms.
fn measure(figures: &mut Figures, name: &str, rows: usize, mut work: impl FnMut(usize)) {
    work(1);
    std::thread::sleep(Duration::from_millis(100));
    let per_request = |batches: usize, cpu: Duration| cpu.as_secs_f64() * 1e6 / (batches * rows) as f64;
    let samples: Vec<f64> = (0..SAMPLES).map(|_| per_request(BURST * BURSTS, bursts(&mut work))).collect();
    figures.write(&format!("{name}_us_per_request"), "us", &samples);
    let samples: Vec<f64> = (0..SAMPLES).map(|_| per_request(PACED, paced(&mut work))).collect();
    figures.write(&format!("{name}_every_2ms_us_per_request"), "us", &samples);
}

/// CPU time of batches back to back.
fn bursts(work: &mut impl FnMut(usize)) -> Duration {
    let before = cpu_time();
    for _ in 0..BURSTS {
        work(BURST);
        // An I/O thread and the readers work on; waiting costs nothing.
        std::thread::sleep(Duration::from_millis(100));
    }
    cpu_time() - before
}

/// CPU time of one batch every 2 ms.
fn paced(work: &mut impl FnMut(usize)) -> Duration {
    let before = cpu_time();
    let mut due = Instant::now();
    for _ in 0..PACED {
        work(1);
        due += Duration::from_millis(2);
        std::thread::sleep(due.saturating_duration_since(Instant::now()));
    }
    cpu_time() - before
}
