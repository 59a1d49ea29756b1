//! The wrapper against the real library: frames arrive whole, full pipes give them back, CURVE keeps strangers out.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::{Duration, Instant};

use servekit_zmq::{Context, CurveKeys, Error, Message, Socket, SocketKind, Source, has, poll, version};

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
fn frames_of_every_length_arrive_unchanged_and_in_order() {
    let (pull, push) = pair(&Context::new(), |_, _| {});
    for len in [0, 1, 255, 256, 100_000] {
        let owned = (0..len).map(|i| u8::try_from(i % 251).unwrap()).collect::<Vec<u8>>();
        push.send(vec![Message::copy_of(b"head"), owned.clone().into()], false).unwrap();
        let got = pull.recv(false).unwrap();
        assert_eq!(got.len(), 2);
        assert_eq!((&*got[0], &*got[1]), (&b"head"[..], &owned[..]));
    }
}

#[test]
fn a_frame_that_is_kept_stays_when_the_other_has_gone() {
    let (pull, push) = pair(&Context::new(), |_, _| {});
    for len in [1, 40, 500, 100_000] {
        push.send(vec![Message::from(vec![7; len])], false).unwrap();
        let mut got = pull.recv(false).unwrap();
        let kept: Vec<Message> = got.iter_mut().map(Message::share).collect();
        push.send(got, false).unwrap();
        drop(pull.recv(false).unwrap());
        assert_eq!(&*kept[0], &vec![7; len]);
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

#[test]
fn one_socket_is_open_at_a_path_and_guarded_at_a_port_that_somebody_else_has_bound() {
    let context = Context::new();
    let (server, client) = (CurveKeys::generate().unwrap(), CurveKeys::generate().unwrap());
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let address = format!("tcp://{}", listener.local_addr().unwrap());
    let path = format!("ipc://{}", std::env::temp_dir().join(format!("guarded-{}", std::process::id())).display());
    let pull = context.socket(SocketKind::Pull).unwrap();
    pull.set_recv_timeout(PATIENCE).unwrap();
    pull.bind(&path).unwrap();
    pull.set_curve_server(&server.secret).unwrap();
    pull.bind_fd(std::os::fd::IntoRawFd::into_raw_fd(listener)).unwrap();
    let connect = |address: &str, keys: bool| {
        let push = context.socket(SocketKind::Push).unwrap();
        push.set_send_timeout(PATIENCE).unwrap();
        if keys {
            push.set_curve_client(&server.public, &client).unwrap();
        }
        push.connect(address).unwrap();
        push
    };
    let stranger = connect(&address, false);
    stranger.send(vec![Message::copy_of(b"stranger")], false).unwrap();
    for (address, keys) in [(&path, false), (&address, true)] {
        let push = connect(address, keys);
        push.send(vec![Message::copy_of(address.as_bytes())], false).unwrap();
        assert_eq!(&*pull.recv(false).unwrap()[0], address.as_bytes());
    }
    assert_eq!(pull.recv(true).unwrap_err(), Error::Again);
}
