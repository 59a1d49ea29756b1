//! The processes around the one that is measured, as roles of this program.

mod drain;
mod rank;
mod worker;

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use servekit_core::wire::{Envelope, EnvelopeBuilder, Kind, SCHEMA, Section};
use servekit_zmq::Message;

/// First argument of a peer; its role and settings follow.
pub(crate) const FLAG: &str = "--peer";
/// Life of every process here.
pub(crate) const EPOCH: u32 = 1;
/// Requests that a receiver has taken are told to the sender by so many.
const CREDIT: usize = 500;
/// Requests that are under way at most: fewer than what the router queues for a rank before it refuses more.
const WINDOW: usize = 3000;
/// Body of messages that need none.
pub(crate) const NIL: [u8; 1] = [0xc0];

/// Plays a role until it is over or nobody reads what it says.
pub(crate) fn run(arguments: &[String]) {
    // The end of the starter's pipe is the end of this process.
    std::thread::spawn(|| {
        let mut line = String::new();
        while std::io::stdin().read_line(&mut line).is_ok_and(|read| read > 0) {}
        std::process::exit(0);
    });
    let number = |at: usize| arguments[at].parse::<usize>().expect("a number");
    let folder = PathBuf::from(&arguments[1]);
    match arguments[0].as_str() {
        "drain" => drain::run(&folder, number(2) as u16),
        "sender" => worker::send(&folder, number(2), number(3), number(4)),
        "client" => worker::live(&folder, number(2) as u16, number(3), number(4)),
        "receiver" => rank::receive(&folder, number(2), number(3), number(4)),
        "stepper" => rank::step(&folder, number(2), number(3)),
        role => panic!("no role {role}"),
    }
}

/// A peer that runs; it ends with this value.
pub(crate) struct Peer {
    child: Child,
    _stdin: ChildStdin,
    said: BufReader<ChildStdout>,
}

impl Peer {
    /// Starts a role and waits until it is ready.
    pub(crate) fn start(role: &str, folder: &Path, numbers: &[usize]) -> Self {
        let mut command = Command::new(std::env::current_exe().expect("this program"));
        command.arg(FLAG).arg(role).arg(folder).args(numbers.iter().map(ToString::to_string));
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("a peer");
        let said = BufReader::new(child.stdout.take().expect("its output"));
        let stdin = child.stdin.take().expect("its input");
        let mut peer = Self { child, _stdin: stdin, said };
        assert_eq!(peer.line(), "ready");
        peer
    }

    /// The next line that it says.
    pub(crate) fn line(&mut self) -> String {
        let mut line = String::new();
        self.said.read_line(&mut line).expect("a line");
        line.trim_end().to_owned()
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A folder for sockets, gone with this value.
pub(crate) struct Folder(PathBuf);

impl Folder {
    pub(crate) fn new() -> Self {
        static COUNT: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(0);
        let number = COUNT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("servekit-bench-{}-{number}", std::process::id()));
        std::fs::create_dir_all(&path).expect("a folder");
        Self(path)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// First message on a link.
fn hello(sender: u16) -> Vec<Message> {
    let envelope = EnvelopeBuilder {
        sender,
        sender_epoch: EPOCH,
        receiver_epoch: EPOCH,
        seq: 1,
        ..EnvelopeBuilder::new(Kind::Hello, Section::Hello { schema: SCHEMA })
    };
    vec![Message::from(envelope.encode()), Message::copy_of(&NIL)]
}

/// Number on its link and kind of a message.
fn seq_and_kind(frames: &[Message]) -> (u64, Kind) {
    let envelope = Envelope::parse(&frames[0]).expect("an envelope");
    (envelope.seq, envelope.kind)
}
