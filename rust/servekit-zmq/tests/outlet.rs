//! An outlet against libzmq's own PULL sockets, and against peers that are none.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::io::{Read, Write};
use std::net::TcpListener;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use servekit_zmq::{Context, Error, Outlet, Socket, SocketKind};

const PATIENCE: Duration = Duration::from_secs(10);

/// A folder of its own, gone with the value.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("servekit-outlet-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    fn socket(&self) -> PathBuf {
        self.0.join("peer.ipc")
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        std::fs::remove_dir_all(&self.0).unwrap();
    }
}

fn ipc(path: &Path) -> String {
    format!("ipc://{}", path.display())
}

fn pull(context: &Context) -> Socket {
    let socket = context.socket(SocketKind::Pull).unwrap();
    socket.set_recv_timeout(Some(PATIENCE)).unwrap();
    socket.set_recv_hwm(4).unwrap();
    socket
}

/// Flushes until something is true.
fn until(outlet: &mut Outlet, mut done: impl FnMut(&mut Outlet, bool) -> bool) {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let all = outlet.flush();
        if done(outlet, all) {
            return;
        }
        assert!(Instant::now() < deadline, "{} messages still wait", outlet.waiting());
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn bytes(len: usize) -> Vec<u8> {
    (0..len).map(|i| u8::try_from(i % 251).unwrap()).collect()
}

#[test]
fn messages_reach_a_pull_socket_that_binds_later_whole_and_in_order() {
    let folder = Folder::new("later");
    let mut outlet = Outlet::connect(&folder.socket());
    let lengths = [0, 1, 255, 256, 65_535, 3_000_000];
    for len in lengths {
        outlet.push(&[&b"head"[..], &bytes(len), b""], |head| head.make_ascii_uppercase());
    }
    assert!(!outlet.flush() && outlet.waiting() == lengths.len() && outlet.source().is_none());
    let context = Context::new();
    let peer = pull(&context);
    peer.bind(&ipc(&folder.socket())).unwrap();
    let reader = std::thread::spawn(move || lengths.map(|_| peer.recv(false).unwrap()));
    until(&mut outlet, |_, all| all);
    for (len, frames) in lengths.into_iter().zip(reader.join().unwrap()) {
        let [head, body, last] = &frames[..] else { panic!("{} frames", frames.len()) };
        assert_eq!((&**head, &**body, &**last), (&b"HEAD"[..], &bytes(len)[..], &b""[..]));
    }
}

#[test]
fn a_slow_peer_is_waited_for_by_nobody_and_gets_all_when_it_reads() {
    let folder = Folder::new("slow");
    let mut outlet = Outlet::bind(&ipc(&folder.socket())).unwrap();
    let context = Context::new();
    let peer = pull(&context);
    peer.connect(&ipc(&folder.socket())).unwrap();
    outlet.push(&[b"0"], |_| {});
    until(&mut outlet, |_, all| all);
    // Until neither libzmq nor the kernel takes more.
    let mut sent = 1;
    until(&mut outlet, |outlet, all| {
        if all {
            for _ in 0..100 {
                outlet.push(&[sent.to_string().into_bytes(), bytes(4096)], |_| {});
                sent += 1;
            }
        }
        !all && outlet.waiting() > 10
    });
    assert!(outlet.source().is_some());
    for number in 0..sent {
        let frames = loop {
            outlet.flush();
            if let Ok(frames) = peer.recv(true) {
                break frames;
            }
        };
        assert_eq!(&*frames[0], number.to_string().as_bytes());
    }
    assert_eq!(outlet.waiting(), 0);
}

#[test]
fn the_next_peer_gets_whole_messages() {
    let folder = Folder::new("next");
    let mut outlet = Outlet::bind(&ipc(&folder.socket())).unwrap();
    let context = Context::new();
    // It greets, reads a part of a large message, and goes.
    let mut first = UnixStream::connect(folder.socket()).unwrap();
    let mut greeting = [0; 64];
    (greeting[0], greeting[9], greeting[10]) = (0xff, 0x7f, 3);
    greeting[12..16].copy_from_slice(b"NULL");
    first.write_all(&greeting).unwrap();
    first.write_all(b"\x04\x1a\x05READY\x0bSocket-Type\x00\x00\x00\x04PULL").unwrap();
    for message in [bytes(10), bytes(3_000_000), b"last".to_vec()] {
        outlet.push(&[message], |_| {});
    }
    until(&mut outlet, |outlet, all| !all && outlet.waiting() == 2);
    let mut some = [0; 1000];
    first.read_exact(&mut some).unwrap();
    drop(first);
    let peer = pull(&context);
    peer.connect(&ipc(&folder.socket())).unwrap();
    let reader = std::thread::spawn(move || [(); 2].map(|()| peer.recv(false).unwrap()));
    until(&mut outlet, |_, all| all);
    let [large, last] = reader.join().unwrap();
    assert_eq!((&*large[0], &*last[0]), (&bytes(3_000_000)[..], &b"last"[..]));
}

#[test]
fn a_newer_peer_takes_the_place_of_one_that_is_silent() {
    let folder = Folder::new("newer");
    let mut outlet = Outlet::bind(&ipc(&folder.socket())).unwrap();
    let _silent = UnixStream::connect(folder.socket()).unwrap();
    outlet.push(&[b"to the old one"], |_| {});
    assert!(!outlet.flush());
    outlet.clear();
    assert!(outlet.flush() && outlet.waiting() == 0);
    let context = Context::new();
    let peer = pull(&context);
    peer.connect(&ipc(&folder.socket())).unwrap();
    outlet.push(&[b"to the new one"], |_| {});
    until(&mut outlet, |outlet, all| {
        outlet.take_newer();
        all
    });
    assert_eq!(&*peer.recv(false).unwrap()[0], b"to the new one");
}

#[test]
fn peers_that_speak_something_else_are_left() {
    let folder = Folder::new("else");
    let listener = UnixListener::bind(folder.socket()).unwrap();
    listener.set_nonblocking(true).unwrap();
    let mut outlet = Outlet::connect(&folder.socket());
    outlet.push(&[b"secret"], |_| {});
    let mut curve = vec![0xff, 0, 0, 0, 0, 0, 0, 0, 1, 0x7f, 3, 0];
    curve.extend_from_slice(b"CURVE");
    curve.resize(64, 0);
    for said in [&b"HTTP/1.1 200 OK"[..], &[0; 100], &curve] {
        let mut accepted = None;
        until(&mut outlet, |_, _| {
            accepted = listener.accept().ok();
            accepted.is_some()
        });
        let (mut stream, _) = accepted.unwrap();
        stream.set_nonblocking(false).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.write_all(said).unwrap();
        let mut heard = Vec::new();
        // It is left at once for most of these; a part of a greeting is waited for.
        let closed = std::thread::spawn(move || {
            drop(stream.shutdown(std::net::Shutdown::Write));
            stream.read_to_end(&mut heard).map(|_| heard)
        });
        until(&mut outlet, |_, _| closed.is_finished());
        let heard = closed.join().unwrap().unwrap_or_default();
        assert!(!heard.windows(6).any(|window| window == b"secret"));
    }
    assert_eq!(outlet.waiting(), 1);
}

#[test]
fn only_endpoints_are_bound() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("tcp://{}", taken.local_addr().unwrap());
    for endpoint in ["", "tcp://localhost", "tcp://127.0.0.1:*", "inproc://x", "ipc:///no/such/folder/x"] {
        assert!(Outlet::bind(endpoint).is_err(), "{endpoint}");
    }
    assert!(matches!(Outlet::bind(&address), Err(Error::Other(_))));
    drop(taken);
    let mut outlet = Outlet::bind(&address).unwrap();
    let context = Context::new();
    let peer = pull(&context);
    peer.connect(&address).unwrap();
    outlet.push(&[b"over tcp"], |_| {});
    until(&mut outlet, |_, all| all);
    assert_eq!(&*peer.recv(false).unwrap()[0], b"over tcp");
}
