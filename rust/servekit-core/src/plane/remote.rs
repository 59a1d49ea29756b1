//! Links to ranks on other machines: libzmq's own sockets, for only they speak CURVE.

use std::collections::VecDeque;
use std::fmt;
use std::os::fd::RawFd;

use servekit_zmq::{Context, Error, Message, Socket, SocketKind};

/// Messages that libzmq holds for a rank; more wait here.
const SEND_HWM: i32 = 1024;

/// Where ranks on other machines meet control: TCP sockets that somebody else has bound, so that their ports were told
/// before this process ran. Each listens and does not block; it belongs to the plane once that has started.
#[derive(Clone)]
pub struct Remote {
    /// Secret CURVE key of all of them, in Z85. Whoever knows the public one that belongs to it may connect.
    pub secret_key: String,
    /// Where the ranks' messages arrive.
    pub egress: RawFd,
    /// Each rank that is elsewhere, and where its messages are fetched.
    pub ranks: Vec<(usize, RawFd)>,
}

impl fmt::Debug for Remote {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Remote").field("egress", &self.egress).field("ranks", &self.ranks).finish_non_exhaustive()
    }
}

/// The sending end of a link to one rank elsewhere. Nothing here ever waits: what libzmq does not take yet is kept.
///
/// It tells nobody when a connection broke and what was on its way with it. The rank sees that numbers are missing.
pub(super) struct RemoteRank {
    socket: Socket,
    waiting: VecDeque<Vec<Message>>,
}

impl RemoteRank {
    pub(super) fn bind(context: &Context, listener: RawFd, secret_key: &str) -> Result<Self, Error> {
        let socket = context.socket(SocketKind::Push)?;
        socket.set_send_hwm(SEND_HWM)?;
        socket.set_curve_server(secret_key)?;
        socket.bind_fd(listener)?;
        Ok(Self { socket, waiting: VecDeque::new() })
    }

    /// Takes one message, and lets `patch` change its first frame on the way.
    pub(super) fn push<F: AsRef<[u8]>>(&mut self, frames: &[F], patch: impl FnOnce(&mut [u8])) {
        let mut patch = Some(patch);
        let copy = |frame: &F| {
            let mut bytes = frame.as_ref().to_vec();
            if let Some(patch) = patch.take() {
                patch(&mut bytes);
            }
            Message::from(bytes)
        };
        self.waiting.push_back(frames.iter().map(copy).collect());
    }

    /// Messages that libzmq has not taken.
    pub(super) fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Drops them.
    pub(super) fn clear(&mut self) {
        self.waiting.clear();
    }

    /// Hands on what waits as far as libzmq takes it.
    pub(super) fn flush(&mut self) {
        while let Some(frames) = self.waiting.pop_front() {
            if let Err((_, frames)) = self.socket.send(frames, true) {
                self.waiting.push_front(frames);
                break;
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use std::net::TcpListener;
    use std::os::fd::IntoRawFd;
    use std::time::{Duration, Instant};

    use servekit_zmq::CurveKeys;

    use super::*;

    #[test]
    fn what_is_said_before_a_rank_is_there_waits_for_it_and_comes_in_order() {
        let context = Context::new();
        let (keys, own) = (CurveKeys::generate().unwrap(), CurveKeys::generate().unwrap());
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let address = format!("tcp://{}", listener.local_addr().unwrap());
        let mut rank = RemoteRank::bind(&context, listener.into_raw_fd(), &keys.secret).unwrap();
        for number in 0..3u8 {
            rank.push(&[&[9, number][..], b"body"], |head| head[0] = number);
        }
        rank.flush();
        assert_eq!(rank.waiting(), 3);

        let pull = context.socket(SocketKind::Pull).unwrap();
        pull.set_curve_client(&keys.public, &own).unwrap();
        pull.set_recv_timeout(Some(Duration::from_secs(10))).unwrap();
        pull.connect(&address).unwrap();
        let deadline = Instant::now() + Duration::from_secs(10);
        while rank.waiting() > 0 {
            assert!(Instant::now() < deadline, "nobody came");
            rank.flush();
        }
        for number in 0..3 {
            let frames = pull.recv(false).unwrap();
            assert_eq!((&*frames[0], &*frames[1]), (&[number, number][..], &b"body"[..]));
        }
        rank.push(&[b"late"], |_| {});
        rank.clear();
        rank.flush();
        assert_eq!(rank.waiting(), 0);
        assert_eq!(pull.recv(true).unwrap_err(), Error::Again);
    }

    #[test]
    fn the_secret_is_not_shown() {
        let remote = Remote { secret_key: "s3cr3t".to_owned(), egress: 3, ranks: vec![(1, 4)] };
        assert!(!format!("{remote:?}").contains("s3cr3t"));
    }
}
