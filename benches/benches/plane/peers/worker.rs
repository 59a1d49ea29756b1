//! Workers: one that sends requests as fast as it can, and one that lives with its streams.

use std::path::Path;
use std::time::{Duration, Instant};

use servekit_core::wire::envelope::FLAG_STREAM;
use servekit_core::wire::{EnvelopeBuilder, Ext, Kind, Rid, Section, TextOptions};
use servekit_zmq::{Context, Error, Message, Socket, SocketKind};

use super::{CREDIT, EPOCH, NIL, WINDOW, hello, seq_and_kind};

/// How often a worker says how far it has come.
const ACKNOWLEDGE: Duration = Duration::from_millis(50);

/// Sends requests of so many prompt ids as worker 0, one every so many microseconds; 0 is as fast as they are taken.
pub(super) fn send(folder: &Path, requests: usize, ids: usize, every: usize) {
    let socket = connect(folder);
    let credits = Context::new().socket(SocketKind::Pull).expect("a socket");
    credits.bind(&format!("ipc://{}", folder.join("credits.ipc").display())).expect("an address");
    println!("ready");
    let mut window = WINDOW;
    socket.send(hello(0), false).expect("sent");
    let body = body(ids);
    let mut template = request(Rid::mint(0, EPOCH, 0), ids, Vec::new());
    let mut due = Instant::now();
    for i in 0..requests as u64 {
        if every > 0 {
            due += Duration::from_micros(every as u64);
            std::thread::sleep(due.saturating_duration_since(Instant::now()));
        }
        while window == 0 || credits.readable().expect("a socket") {
            credits.recv(false).expect("credit");
            window += CREDIT;
        }
        window -= 1;
        template[24..32].copy_from_slice(&(i + 2).to_le_bytes());
        template[32..40].copy_from_slice(&Rid::mint(0, EPOCH, i).0.to_le_bytes());
        let frames = vec![Message::copy_of(&template), Message::copy_of(&body)];
        socket.send(frames, false).expect("sent");
    }
    println!("sent");
    std::thread::sleep(Duration::from_secs(60));
}

/// One of `workers`, with every so many-th of `streams` streams; half of them have a stop string. Reads for ever.
pub(super) fn live(folder: &Path, worker: u16, workers: usize, streams: usize) {
    let context = Context::new();
    let texts = context.socket(SocketKind::Pull).expect("a socket");
    let route = Rid::mint(worker, EPOCH, 0).route();
    texts.bind(&format!("ipc://{}", folder.join(route.to_string()).display())).expect("an address");
    texts.set_recv_timeout(Some(ACKNOWLEDGE)).expect("an option");
    let socket = connect(folder);
    println!("ready");
    socket.send(hello(worker), false).expect("sent");
    let mut seq = 1;
    let body = body(128);
    for i in (usize::from(worker)..streams).step_by(workers) {
        seq += 1;
        let stops = if (i / workers).is_multiple_of(2) { vec!["never said".to_owned()] } else { Vec::new() };
        let mut envelope = request(Rid::mint(worker, EPOCH, i as u64), 128, stops);
        envelope[14..16].copy_from_slice(&worker.to_le_bytes());
        envelope[24..32].copy_from_slice(&(seq as u64).to_le_bytes());
        let frames = vec![Message::from(envelope), Message::copy_of(&body)];
        socket.send(frames, false).expect("sent");
    }
    let (mut handled, mut said, mut due) = (0, 0, Instant::now());
    loop {
        match texts.recv(false) {
            Ok(frames) => handled = seq_and_kind(&frames).0,
            Err(Error::Again) => {}
            Err(error) => panic!("{error}"),
        }
        if handled > said && Instant::now() >= due {
            seq += 1;
            let envelope = EnvelopeBuilder {
                sender: worker,
                sender_epoch: EPOCH,
                receiver_epoch: EPOCH,
                seq: seq as u64,
                id: handled,
                ..EnvelopeBuilder::new(Kind::Ack, Section::Empty)
            };
            socket.send(vec![Message::from(envelope.encode()), Message::copy_of(&NIL)], false).expect("sent");
            (said, due) = (handled, Instant::now() + ACKNOWLEDGE);
        }
    }
}

fn connect(folder: &Path) -> Socket {
    let socket = Context::new().socket(SocketKind::Push).expect("a socket");
    socket.connect(&format!("ipc://{}", folder.join("ingress.ipc").display())).expect("an address");
    socket
}

/// Envelope of a streamed request.
fn request(rid: Rid, ids: usize, stops: Vec<String>) -> Vec<u8> {
    let text = TextOptions { stops, ..TextOptions::default() }.encode();
    EnvelopeBuilder {
        flags: FLAG_STREAM,
        sender_epoch: EPOCH,
        receiver_epoch: EPOCH,
        id: rid.0,
        exts: vec![(Ext::Text as u16, text)],
        ..EnvelopeBuilder::new(
            Kind::Generate,
            Section::Request { rank: -1, tokens: ids as u32, attempt: 0, dispatch: 0 },
        )
    }
    .encode()
}

/// A body of the size of a request's: control does not look at it, so its ids stand for all.
fn body(ids: usize) -> Vec<u8> {
    let mut bytes = vec![0x93, 0xb9];
    bytes.extend_from_slice(b"TokenizedGenerateReqInput");
    bytes.push(0xc0);
    bytes.push(0xc6);
    bytes.extend_from_slice(&(4 * ids as u32).to_be_bytes());
    (0..ids as u32).for_each(|id| bytes.extend_from_slice(&id.to_le_bytes()));
    bytes
}
