//! Ranks: some that take requests and report their load, and one that steps.

use std::path::Path;
use std::time::{Duration, Instant};

use servekit_benches::last_step;
use servekit_core::wire::{Envelope, EnvelopeBuilder, Kind, Load, Section};
use servekit_zmq::{Context, Message, Socket, SocketKind, Source, poll};

use super::{CREDIT, EPOCH, NIL, hello, seq_and_kind};
use crate::control::{PERIOD, step_body};

/// Takes requests as all of `ranks` ranks, each reporting its load after every `report` of them (0: never; what it took
/// is finished then), and says how many came a second, from the first to the last.
pub(super) fn receive(folder: &Path, ranks: usize, requests: usize, report: usize) {
    let mut ranks: Vec<Rank> = (0..ranks).map(|rank| Rank::connect(folder, rank as u16)).collect();
    let credits = Context::new().socket(SocketKind::Push).expect("a socket");
    credits.connect(&format!("ipc://{}", folder.join("credits.ipc").display())).expect("an address");
    ranks.iter_mut().for_each(Rank::greet);
    if report > 0 {
        // What is sent to a rank before it has been heard is dropped when it is.
        ranks.iter().for_each(Rank::await_greeting);
    }
    println!("ready");
    let (mut taken, mut first) = (0, None);
    while taken < requests {
        for rank in &mut ranks {
            while let Ok(frames) = rank.requests.recv(true) {
                let envelope = Envelope::parse(&frames[0]).expect("an envelope");
                let Section::Request { dispatch, .. } = envelope.section else { continue };
                first.get_or_insert_with(Instant::now);
                taken += 1;
                rank.running.push(envelope.id);
                if taken % CREDIT == 0 {
                    credits.send(vec![Message::copy_of(&NIL)], false).expect("sent");
                }
                if report > 0 && rank.running.len() == report {
                    rank.finish(dispatch);
                }
            }
        }
        if taken < requests {
            wait(&ranks);
        }
    }
    let seconds = first.expect("a request").elapsed().as_secs_f64();
    println!("{}", requests as f64 / seconds);
    std::thread::sleep(Duration::from_secs(60));
}

/// Waits for the first of the sockets, a moment at most: the others are looked at after it.
fn wait(ranks: &[Rank]) {
    poll([Source::Socket(&ranks[0].requests)], [], Some(Duration::from_millis(1))).expect("a poll");
}

/// Rank 0 with so many streams of so many workers: once their requests have come, one token each every millisecond.
pub(super) fn step(folder: &Path, streams: usize, workers: usize) {
    let mut rank = Rank::connect(folder, 0);
    println!("ready");
    rank.greet();
    let mut seen = 0;
    for _ in 0..streams {
        loop {
            let frames = rank.requests.recv(false).expect("a request");
            if let Section::Request { dispatch, .. } = Envelope::parse(&frames[0]).expect("an envelope").section {
                seen = dispatch;
                break;
            }
        }
    }
    println!("stepping");
    let body = step_body(streams, workers);
    let mut due = Instant::now();
    loop {
        rank.report(seen, streams as u32, &body);
        due += PERIOD;
        std::thread::sleep(due.saturating_duration_since(Instant::now()));
    }
}

struct Rank {
    number: u16,
    _context: Context,
    requests: Socket,
    outputs: Socket,
    seq: u64,
    /// Requests that came since the last report.
    running: Vec<u64>,
}

impl Rank {
    fn connect(folder: &Path, number: u16) -> Self {
        let context = Context::new();
        let requests = context.socket(SocketKind::Pull).expect("a socket");
        requests.set_recv_hwm(0).expect("an option");
        requests.connect(&format!("ipc://{}/rank{number}.ipc", folder.display())).expect("an address");
        let outputs = context.socket(SocketKind::Push).expect("a socket");
        outputs.connect(&format!("ipc://{}/egress.ipc", folder.display())).expect("an address");
        Self { number, _context: context, requests, outputs, seq: 1, running: Vec::new() }
    }

    fn greet(&mut self) {
        self.outputs.send(hello(self.number), false).expect("sent");
    }

    fn await_greeting(&self) {
        let frames = self.requests.recv(false).expect("a greeting");
        assert_eq!(seq_and_kind(&frames).1, Kind::Hello);
    }

    /// Ends all that it has.
    fn finish(&mut self, last_dispatch: u64) {
        let body = last_step(&self.running);
        self.report(last_dispatch, self.running.len() as u32, &body);
        self.running.clear();
    }

    /// A step's output.
    fn report(&mut self, last_dispatch: u64, rows: u32, body: &[u8]) {
        self.seq += 1;
        let load = Some(Load { running: 32, held_tokens: 4096, pool_tokens: 1 << 20, ..Load::default() });
        let section = Section::Batch { rows, rank: i32::from(self.number), last_dispatch, load };
        let envelope = EnvelopeBuilder {
            sender: self.number,
            sender_epoch: EPOCH,
            receiver_epoch: EPOCH,
            seq: self.seq,
            ..EnvelopeBuilder::new(Kind::BatchTokenId, section)
        };
        self.outputs.send(vec![Message::from(envelope.encode()), Message::copy_of(body)], false).expect("sent");
    }
}
