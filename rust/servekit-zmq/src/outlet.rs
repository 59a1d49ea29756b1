//! PUSH to one local peer, by the calling thread itself.
//!
//! libzmq hands each message to its I/O thread, and that one makes the system call. Where a message or two go to each
//! peer every few milliseconds, waking that thread costs as much as all the rest; and where many go at once, each takes
//! its way through two queues. Here the owner writes, and what was pushed since the last time is one system call.
//!
//! The peer is any PULL socket: the bytes are ZMTP 3.0 with the NULL mechanism
//! (<https://rfc.zeromq.org/spec/23/>). Peers on other machines need CURVE, and so a [`Socket`](crate::Socket).

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::error::{Error, Result};
use crate::socket::Source;

/// Signature, version 3.0, mechanism, not a server, filler.
const GREETING: [u8; 64] = {
    let mut bytes = [0; 64];
    [bytes[0], bytes[9], bytes[10]] = [0xff, 0x7f, 3];
    [bytes[12], bytes[13], bytes[14], bytes[15]] = *b"NULL";
    bytes
};
/// The command READY with the one property that a PULL socket asks for.
const READY: &[u8] = b"\x04\x1a\x05READY\x0bSocket-Type\x00\x00\x00\x04PUSH";
/// Flag of a frame that another one follows.
const MORE: u8 = 1;
/// Flag of a frame whose length takes eight bytes.
const LONG: u8 = 2;
/// Flag of a command.
const COMMAND: u8 = 4;
/// So many bytes are written at once, though more may be pushed right after them.
const FULL: usize = 32 << 10;
/// A buffer larger than that is given back once it is empty, and moved to its front when so much of it was written.
const LARGE: usize = 1 << 20;
/// Time between two tries to connect; libzmq's own.
const RECONNECT: Duration = Duration::from_millis(100);

/// A connection, whichever its family.
trait Stream: Read + Write + AsRawFd + Send {}
impl<T: Read + Write + AsRawFd + Send> Stream for T {}

/// Where the peer comes from.
enum Place {
    /// It listens there, now or later.
    Path { path: PathBuf, next_try: Option<Instant> },
    /// It connects to this Unix socket.
    Unix { listener: UnixListener, path: PathBuf },
    /// It connects to this port.
    Tcp(TcpListener),
}

/// A connection and what the peer has said on it.
struct Link {
    stream: Box<dyn Stream>,
    /// Its greeting and its READY as far as they have come; none once they have, and messages may go.
    said: Option<Vec<u8>>,
}

/// The sending end of a link to one PULL socket. Nothing here ever waits: what the peer does not take yet is kept.
pub struct Outlet {
    place: Place,
    link: Option<Link>,
    /// Messages as they go over the wire.
    bytes: Vec<u8>,
    /// Of them, handed to the kernel.
    written: usize,
    /// Of them, those of messages that are written to their end.
    done: usize,
    /// Where in `bytes` each of the other messages ends.
    ends: VecDeque<usize>,
}

impl Outlet {
    /// An outlet to whoever listens at a path, now or later.
    pub fn connect(path: &Path) -> Self {
        Self::of(Place::Path { path: path.to_owned(), next_try: None })
    }

    /// An outlet to whoever connects to an endpoint, `ipc:///path` or `tcp://127.0.0.1:port`. It serves one peer at a
    /// time, the next one when its link has ended or [`Outlet::take_newer`] is called.
    ///
    /// # Errors
    /// The endpoint is none, or can't be bound.
    pub fn bind(endpoint: &str) -> Result<Self> {
        let place = if let Some(path) = endpoint.strip_prefix("ipc://") {
            let path = PathBuf::from(path);
            // As libzmq does: what is there was left by somebody who is gone.
            let _ = std::fs::remove_file(&path);
            let listener = UnixListener::bind(&path).map_err(failed)?;
            listener.set_nonblocking(true).map_err(failed)?;
            Place::Unix { listener, path }
        } else {
            let address = endpoint.strip_prefix("tcp://").and_then(|address| address.parse::<SocketAddr>().ok());
            let listener = TcpListener::bind(address.ok_or(Error::Other(libc::EINVAL))?).map_err(failed)?;
            listener.set_nonblocking(true).map_err(failed)?;
            Place::Tcp(listener)
        };
        Ok(Self::of(place))
    }

    fn of(place: Place) -> Self {
        Self { place, link: None, bytes: Vec::new(), written: 0, done: 0, ends: VecDeque::new() }
    }

    /// Takes one message, and lets `patch` change its first frame on the way. It goes with the next [`Outlet::flush`],
    /// or at once when much waits.
    pub fn push<F: AsRef<[u8]>>(&mut self, frames: &[F], patch: impl FnOnce(&mut [u8])) {
        let mut patch = Some(patch);
        for (at, frame) in frames.iter().enumerate() {
            let frame = frame.as_ref();
            let more = if at + 1 < frames.len() { MORE } else { 0 };
            if let Ok(len) = u8::try_from(frame.len()) {
                self.bytes.extend_from_slice(&[more, len]);
            } else {
                self.bytes.push(more | LONG);
                self.bytes.extend_from_slice(&(frame.len() as u64).to_be_bytes());
            }
            let start = self.bytes.len();
            self.bytes.extend_from_slice(frame);
            if let (Some(patch), Some(first)) = (patch.take(), self.bytes.get_mut(start..)) {
                patch(first);
            }
        }
        self.ends.push_back(self.bytes.len());
        if self.bytes.len() - self.written >= FULL {
            self.flush();
        }
    }

    /// Messages that the peer has not taken.
    pub fn waiting(&self) -> usize {
        self.ends.len()
    }

    /// Drops the messages that wait, but for the rest of one whose beginning has gone.
    pub fn clear(&mut self) {
        self.ends.truncate(usize::from(self.written > self.done));
        self.bytes.truncate(self.ends.back().copied().unwrap_or(self.done));
        self.tidy();
    }

    /// Turns to a peer that has connected since, if one has.
    pub fn take_newer(&mut self) {
        while let Ok(Some(stream)) = self.place.next_peer() {
            self.end_link();
            self.link = Link::begin(stream).ok();
        }
    }

    /// Writes what waits as far as the peer takes it. Returns whether nothing waits any more.
    pub fn flush(&mut self) -> bool {
        while !self.ends.is_empty() {
            match self.go_on() {
                Ok(true) => {}
                Ok(false) => return false,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return false,
                Err(_) => self.end_link(),
            }
        }
        true
    }

    /// What to wait for before [`Outlet::flush`] can do more: nothing if nothing waits, or if only time helps.
    pub fn source(&self) -> Option<Source<'_>> {
        match &self.link {
            Some(Link { stream, said: Some(_) }) => Some(Source::Fd(stream.as_raw_fd())),
            Some(Link { stream, said: None }) if !self.ends.is_empty() => Some(Source::Writable(stream.as_raw_fd())),
            Some(_) => None,
            None => self.place.fd().filter(|_| !self.ends.is_empty()).map(Source::Fd),
        }
    }

    /// One step towards an empty buffer; false if there is none to take now.
    fn go_on(&mut self) -> io::Result<bool> {
        let Some(link) = &mut self.link else {
            let Some(stream) = self.place.next_peer()? else { return Ok(false) };
            self.link = Some(Link::begin(stream)?);
            return Ok(true);
        };
        if link.said.is_some() {
            link.listen()?;
            return Ok(true);
        }
        self.written += link.stream.write(self.bytes.get(self.written..).unwrap_or_default())?;
        self.tidy();
        Ok(true)
    }

    /// A message that was not written to its end begins anew with the next peer.
    fn end_link(&mut self) {
        self.link = None;
        self.written = self.done;
    }

    /// Forgets what is written.
    fn tidy(&mut self) {
        while let Some(end) = self.ends.front().copied().filter(|end| *end <= self.written) {
            self.done = end;
            self.ends.pop_front();
        }
        if self.ends.is_empty() {
            self.bytes.clear();
            self.bytes.shrink_to(LARGE);
            (self.written, self.done) = (0, 0);
        } else if self.done >= LARGE {
            self.bytes.drain(..self.done);
            self.written -= self.done;
            self.ends.iter_mut().for_each(|end| *end -= self.done);
            self.done = 0;
        }
    }
}

impl Drop for Outlet {
    fn drop(&mut self) {
        if let Place::Unix { path, .. } = &self.place {
            // Whoever has removed the folder before is right too.
            let _ = std::fs::remove_file(path);
        }
    }
}

impl Place {
    /// A peer that is there and was not before; none if there is none now.
    fn next_peer(&mut self) -> io::Result<Option<Box<dyn Stream>>> {
        let stream: Box<dyn Stream> = match self {
            Self::Path { path, next_try } => {
                if next_try.is_some_and(|next_try| Instant::now() < next_try) {
                    return Ok(None);
                }
                *next_try = Some(Instant::now() + RECONNECT);
                let Ok(stream) = UnixStream::connect(path) else { return Ok(None) };
                stream.set_nonblocking(true)?;
                Box::new(stream)
            }
            Self::Unix { listener, .. } => match listener.accept() {
                Ok((stream, _)) => {
                    stream.set_nonblocking(true)?;
                    Box::new(stream)
                }
                Err(error) => return not_now(error),
            },
            Self::Tcp(listener) => match listener.accept() {
                Ok((stream, _)) => {
                    stream.set_nonblocking(true)?;
                    stream.set_nodelay(true)?;
                    Box::new(stream)
                }
                Err(error) => return not_now(error),
            },
        };
        Ok(Some(stream))
    }

    fn fd(&self) -> Option<RawFd> {
        match self {
            Self::Path { .. } => None,
            Self::Unix { listener, .. } => Some(listener.as_raw_fd()),
            Self::Tcp(listener) => Some(listener.as_raw_fd()),
        }
    }
}

impl Link {
    fn begin(mut stream: Box<dyn Stream>) -> io::Result<Self> {
        // A new connection's buffer takes so little at once.
        stream.write_all(&[&GREETING[..], READY].concat())?;
        Ok(Self { stream, said: Some(Vec::new()) })
    }

    /// Takes what the peer says before messages may go: its greeting, then READY.
    fn listen(&mut self) -> io::Result<()> {
        let Some(said) = &mut self.said else { return Ok(()) };
        let mut some = [0; 256];
        let read = self.stream.read(&mut some)?;
        if read == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        said.extend_from_slice(some.get(..read).unwrap_or_default());
        match greeted(said) {
            Some(true) => self.said = None,
            Some(false) => return Err(io::ErrorKind::InvalidData.into()),
            None => {}
        }
        Ok(())
    }
}

/// Whether these are the first bytes of a peer that takes messages; none while that can't be told.
fn greeted(said: &[u8]) -> Option<bool> {
    let expected = |at: usize, bytes: &[u8]| said.get(at..at + bytes.len()).map(|said| said == bytes);
    let (first, tenth, version) = (expected(0, &[0xff])?, expected(9, &[0x7f])?, *said.get(10)? >= 3);
    let mechanism = expected(12, b"NULL\0")?;
    let command = *said.get(GREETING.len())? == COMMAND;
    if !(first && tenth && version && mechanism && command) {
        return Some(false);
    }
    let length = usize::from(*said.get(GREETING.len() + 1)?);
    let body = said.get(GREETING.len() + 2..)?;
    // A PULL socket says nothing more.
    (body.len() >= length).then(|| body.starts_with(b"\x05READY"))
}

fn not_now<T>(error: io::Error) -> io::Result<Option<T>> {
    if error.kind() == io::ErrorKind::WouldBlock { Ok(None) } else { Err(error) }
}

fn failed(error: io::Error) -> Error {
    Error::Other(error.raw_os_error().unwrap_or(libc::EINVAL))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_greeting_is_known_when_it_is_whole_and_any_bytes_are_borne() {
        let whole = [&GREETING[..], b"\x04\x1a\x05READY\x0bSocket-Type\x00\x00\x00\x04PULL"].concat();
        assert_eq!(greeted(&whole), Some(true));
        for end in 0..whole.len() {
            assert_eq!(greeted(&whole[..end]), None, "{end} bytes");
        }
        let told = [0, 9, 10, 12, 13, 14, 15, 16, 64, 66, 67, 68, 69, 70, 71];
        for at in 0..whole.len() {
            for byte in [0, 1, 2, 5, 0x7e, 0x80, 0xff] {
                let mut changed = whole.clone();
                changed[at] = byte;
                let heard = greeted(&changed);
                assert!(
                    !told.contains(&at) || byte == whole[at] || at == 10 && byte >= 3 || heard == Some(false),
                    "{at}"
                );
            }
        }
    }
}
