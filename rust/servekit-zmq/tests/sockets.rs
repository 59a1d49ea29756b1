//! The wrapper against the real library: frames arrive whole, full pipes give them back, CURVE keeps strangers out.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::sync::Arc;
use std::time::{Duration, Instant};

use servekit_zmq::{Context, CurveKeys, Error, Message, SharedBytes, Socket, SocketKind, Source, has, poll, version};

const PATIENCE: Option<Duration> = Some(Duration::from_secs(10));

fn pair(context: &Context, prepare: impl Fn(&Socket, &Socket)) -> (Socket, Socket) {
    let (pull, push) = (context.socket(SocketKind::Pull).unwrap(), context.socket(SocketKind::Push).unwrap());
    pull.set_recv_timeout(PATIENCE).unwrap();
    push.set_send_timeout(PATIENCE).unwrap();
    prepare(&pull, &push);
    pull.bind("tcp://127.0.0.1:*").unwrap();
    push.connect(&pull.last_endpoint().unwrap()).unwrap();
    (pull, push)
}

#[test]
fn is_built_with_curve() {
    assert!(has("curve"));
    assert!(!has("no such thing"));
    assert_eq!(version(), (4, 3, 5));
}

#[test]
fn frames_of_every_origin_arrive_unchanged_and_in_order() {
    let (pull, push) = pair(&Context::new(), |_, _| {});
    let shared: SharedBytes = Arc::new(vec![7u8; 5000]);
    for len in [0, 1, 255, 256, 100_000] {
        let owned = (0..len).map(|i| u8::try_from(i % 251).unwrap()).collect::<Vec<u8>>();
        let sent = vec![Message::copy_of(b"head"), owned.clone().into(), Message::from_shared(Arc::clone(&shared))];
        push.send(sent, false).unwrap();
        let got = pull.recv(false).unwrap();
        assert_eq!(got.len(), 3);
        assert_eq!((&*got[0], &*got[1]), (&b"head"[..], &owned[..]));
        assert_eq!(&*got[2], (*shared).as_ref());
    }
    let deadline = Instant::now() + Duration::from_secs(10);
    while Arc::strong_count(&shared) > 1 && Instant::now() < deadline {
        std::thread::yield_now();
    }
    assert_eq!(Arc::strong_count(&shared), 1, "libzmq gave the shared bytes back");
}

#[test]
fn a_frame_is_written_to_without_touching_what_others_hold() {
    let shared: SharedBytes = Arc::new(vec![7u8; 500]);
    let mut over_shared = Message::from_shared(Arc::clone(&shared));
    over_shared.make_mut()[0] = 1;
    assert_eq!((over_shared[0], (*shared).as_ref()[0]), (1, 7));
    let (pull, push) = pair(&Context::new(), |_, _| {});
    for len in [1, 40, 500, 100_000] {
        push.send(vec![Message::from(vec![7; len]), Message::from(vec![8; len])], false).unwrap();
        let mut got = pull.recv(false).unwrap();
        got[0].make_mut().fill(9);
        assert!(got[0].iter().all(|byte| *byte == 9) && got[1].iter().all(|byte| *byte == 8));
    }
    assert!(Message::new().make_mut().is_empty());
}

#[test]
fn a_frame_that_is_kept_stays_as_it_was() {
    let (pull, push) = pair(&Context::new(), |_, _| {});
    let shared: SharedBytes = Arc::new(vec![7u8; 500]);
    for len in [1, 40, 500, 100_000] {
        push.send(vec![Message::from(vec![7; len]), Message::from_shared(Arc::clone(&shared))], false).unwrap();
        let mut got = pull.recv(false).unwrap();
        let kept: Vec<Message> = got.iter_mut().map(Message::share).collect();
        got.iter_mut().for_each(|frame| frame.make_mut().fill(9));
        push.send(got, false).unwrap();
        assert!(pull.recv(false).unwrap().iter().all(|frame| frame.iter().all(|byte| *byte == 9)));
        assert_eq!([kept[0].len(), kept[1].len()], [len, 500]);
        assert!(kept.iter().all(|frame| frame.iter().all(|byte| *byte == 7)));
    }
}

#[test]
fn a_full_pipe_gives_the_frames_back() {
    let context = Context::new();
    let push = context.socket(SocketKind::Push).unwrap();
    let (error, frames) = push.send(vec![Message::copy_of(b"a"), Message::copy_of(b"b")], true).unwrap_err();
    assert_eq!(error, Error::Again);
    assert_eq!(frames.iter().map(|f| f.to_vec()).collect::<Vec<_>>(), [b"a".to_vec(), b"b".to_vec()]);
}

#[test]
fn poll_tells_which_source_is_readable() {
    let (pull, push) = pair(&Context::new(), |_, _| {});
    let (reader, writer) = std::os::unix::net::UnixStream::pair().unwrap();
    let fd = std::os::fd::AsRawFd::as_raw_fd(&reader);
    let wait = |timeout| poll([Source::Socket(&pull), Source::Fd(fd)], [], Some(timeout)).unwrap();
    assert_eq!(wait(Duration::ZERO), [false, false]);
    std::io::Write::write_all(&mut &writer, b"x").unwrap();
    assert_eq!(wait(Duration::from_secs(10)), [false, true]);
    push.send(vec![Message::copy_of(b"m")], false).unwrap();
    let deadline = Instant::now() + Duration::from_secs(10);
    while !wait(Duration::from_secs(1))[0] {
        assert!(Instant::now() < deadline, "the message never became readable");
    }
    assert!(pull.readable().unwrap());
}

#[test]
fn curve_lets_the_key_holder_in_and_nobody_else() {
    let context = Context::new();
    let (server, client) = (CurveKeys::generate().unwrap(), CurveKeys::generate().unwrap());
    assert_eq!(CurveKeys::from_secret(&server.secret).unwrap().public, server.public);
    assert!(CurveKeys::from_secret("short").is_err());

    let (pull, push) = pair(&context, |pull, push| {
        pull.set_curve_server(&server.secret).unwrap();
        push.set_curve_client(&server.public, &client).unwrap();
    });
    let plain = context.socket(SocketKind::Push).unwrap();
    plain.connect(&pull.last_endpoint().unwrap()).unwrap();
    plain.send(vec![Message::copy_of(b"stranger")], false).unwrap();
    for i in 0..20u8 {
        push.send(vec![Message::copy_of(&[i])], false).unwrap();
    }
    for i in 0..20u8 {
        assert_eq!(&*pull.recv(false).unwrap()[0], &[i]);
    }
    assert_eq!(pull.recv(true).unwrap_err(), Error::Again);
}
