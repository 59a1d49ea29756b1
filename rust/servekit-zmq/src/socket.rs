//! Contexts, sockets and waiting for them.

use std::ffi::{CString, c_int, c_long, c_void};
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::time::Duration;

use crate::error::{Error, Result, check};
use crate::ffi;
use crate::message::Message;

struct RawContext(*mut c_void);

// SAFETY: a libzmq context is thread-safe.
unsafe impl Send for RawContext {}
// SAFETY: as above.
unsafe impl Sync for RawContext {}

impl Drop for RawContext {
    fn drop(&mut self) {
        // SAFETY: every socket holds this context alive, so none is open here and the call can't block for ever.
        unsafe { ffi::zmq_ctx_term(self.0) };
    }
}

/// Owner of libzmq's I/O threads. Cloning shares it; the last clone or socket that goes ends it.
#[derive(Clone)]
pub struct Context(Arc<RawContext>);

impl Context {
    /// A context with one I/O thread.
    pub fn new() -> Self {
        // SAFETY: no arguments. It returns null only without memory or file descriptors, which `socket` then reports.
        Self(Arc::new(RawContext(unsafe { ffi::zmq_ctx_new() })))
    }

    /// Number of I/O threads, 1 or more; to be called before the first socket.
    pub fn set_io_threads(&self, n: i32) -> Result<()> {
        // SAFETY: the context is open.
        check(unsafe { ffi::zmq_ctx_set(self.0.0, ffi::ZMQ_IO_THREADS, n) }).map(drop)
    }

    /// A new socket. It lingers for 0 ms when dropped, unless `set_linger` says otherwise.
    pub fn socket(&self, kind: SocketKind) -> Result<Socket> {
        // SAFETY: the context is open.
        let raw = unsafe { ffi::zmq_socket(self.0.0, kind as c_int) };
        if raw.is_null() {
            return Err(Error::last());
        }
        let socket = Socket { raw, _context: self.clone() };
        socket.set_int(ffi::ZMQ_LINGER, 0)?;
        Ok(socket)
    }
}

impl Default for Context {
    fn default() -> Self {
        Self::new()
    }
}

/// The socket types that servekit uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
pub enum SocketKind {
    /// One to one, between threads.
    Pair = ffi::ZMQ_PAIR,
    /// Asks, then waits for the answer.
    Req = ffi::ZMQ_REQ,
    /// Answers.
    Rep = ffi::ZMQ_REP,
    /// Receives from many.
    Pull = ffi::ZMQ_PULL,
    /// Sends to one of many.
    Push = ffi::ZMQ_PUSH,
}

/// A socket. It may move to another thread, but only one uses it at a time (`Send`, not `Sync`).
pub struct Socket {
    raw: *mut c_void,
    _context: Context,
}

// SAFETY: libzmq lets a socket migrate between threads with a full fence, which moving a value between threads implies.
unsafe impl Send for Socket {}

impl Drop for Socket {
    fn drop(&mut self) {
        // SAFETY: open until here.
        unsafe { ffi::zmq_close(self.raw) };
    }
}

fn text(s: &str) -> Result<CString> {
    CString::new(s).map_err(|_| Error::Nul)
}

impl Socket {
    /// Listens on an endpoint, such as `ipc:///run/x.ipc` or `tcp://127.0.0.1:*`.
    pub fn bind(&self, endpoint: &str) -> Result<()> {
        let endpoint = text(endpoint)?;
        // SAFETY: open socket, NUL-terminated text.
        check(unsafe { ffi::zmq_bind(self.raw, endpoint.as_ptr()) }).map(drop)
    }

    /// Takes connections from a TCP socket that listens already, and does not block. It belongs to this socket from now
    /// on, which closes it.
    pub fn bind_fd(&self, listener: RawFd) -> Result<()> {
        self.set_int(ffi::ZMQ_USE_FD, listener)?;
        // Of the endpoint, nothing but its kind counts.
        self.bind("tcp://127.0.0.1:0")
    }

    /// Connects to an endpoint; a peer that is not there yet is waited for in the background.
    pub fn connect(&self, endpoint: &str) -> Result<()> {
        let endpoint = text(endpoint)?;
        // SAFETY: open socket, NUL-terminated text.
        check(unsafe { ffi::zmq_connect(self.raw, endpoint.as_ptr()) }).map(drop)
    }

    /// The endpoint of the last bind, with the port that was chosen.
    pub fn last_endpoint(&self) -> Result<String> {
        let mut buf = [0u8; 256];
        let mut len = buf.len();
        // SAFETY: the buffer holds `len` bytes.
        check(unsafe { ffi::zmq_getsockopt(self.raw, ffi::ZMQ_LAST_ENDPOINT, buf.as_mut_ptr().cast(), &raw mut len) })?;
        Ok(String::from_utf8_lossy(&buf[..len.saturating_sub(1)]).into_owned())
    }

    /// Sends all frames of one message, or none of them: with `dont_wait`, a full pipe is `Error::Again` and the
    /// frames come back.
    ///
    /// # Errors
    /// The error and the frames that were not sent.
    pub fn send(&self, frames: Vec<Message>, dont_wait: bool) -> std::result::Result<(), (Error, Vec<Message>)> {
        let wait = if dont_wait { ffi::ZMQ_DONTWAIT } else { 0 };
        let mut left = frames.into_iter();
        while let Some(mut frame) = left.next() {
            let more = if left.len() > 0 { ffi::ZMQ_SNDMORE } else { 0 };
            loop {
                // SAFETY: open socket, initialized message, which is empty afterwards if it was sent.
                match check(unsafe { ffi::zmq_msg_send(frame.as_mut_ptr(), self.raw, wait | more) }) {
                    Ok(_) => break,
                    Err(Error::Interrupted) => {}
                    Err(error) => return Err((error, std::iter::once(frame).chain(left).collect())),
                }
            }
        }
        Ok(())
    }

    /// Receives one message with all its frames.
    ///
    /// # Errors
    /// `Error::Again` when there is none (with `dont_wait`) or the time-out ran out.
    pub fn recv(&self, dont_wait: bool) -> Result<Vec<Message>> {
        let wait = if dont_wait { ffi::ZMQ_DONTWAIT } else { 0 };
        let mut frames = Vec::with_capacity(2);
        loop {
            match Message::recv(self.raw, wait) {
                Ok((frame, more)) => {
                    frames.push(frame);
                    if !more {
                        return Ok(frames);
                    }
                }
                Err(Error::Interrupted) => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// How long a dropped socket keeps sending what it holds; `None` for ever.
    pub fn set_linger(&self, linger: Option<Duration>) -> Result<()> {
        self.set_int(ffi::ZMQ_LINGER, millis(linger))
    }

    /// Most messages that wait to be sent to one peer; 0 for no bound.
    pub fn set_send_hwm(&self, messages: i32) -> Result<()> {
        self.set_int(ffi::ZMQ_SNDHWM, messages)
    }

    /// Most messages that wait to be received from one peer; 0 for no bound.
    pub fn set_recv_hwm(&self, messages: i32) -> Result<()> {
        self.set_int(ffi::ZMQ_RCVHWM, messages)
    }

    /// How long `recv` waits; `None` for ever.
    pub fn set_recv_timeout(&self, timeout: Option<Duration>) -> Result<()> {
        self.set_int(ffi::ZMQ_RCVTIMEO, millis(timeout))
    }

    /// How long `send` waits; `None` for ever.
    pub fn set_send_timeout(&self, timeout: Option<Duration>) -> Result<()> {
        self.set_int(ffi::ZMQ_SNDTIMEO, millis(timeout))
    }

    /// Whether messages queue only for peers whose connection is complete.
    pub fn set_immediate(&self, on: bool) -> Result<()> {
        self.set_int(ffi::ZMQ_IMMEDIATE, on.into())
    }

    /// Time between two tries to connect.
    pub fn set_reconnect_interval(&self, interval: Duration) -> Result<()> {
        self.set_int(ffi::ZMQ_RECONNECT_IVL, millis(Some(interval)))
    }

    /// Whether IPv6 addresses are allowed.
    pub fn set_ipv6(&self, on: bool) -> Result<()> {
        self.set_int(ffi::ZMQ_IPV6, on.into())
    }

    /// Largest frame taken from a peer, in bytes; the connection of one that sends more is closed.
    pub fn set_max_message_size(&self, bytes: i64) -> Result<()> {
        self.set_bytes(ffi::ZMQ_MAXMSGSIZE, &bytes.to_ne_bytes())
    }

    /// Makes this the server side of CURVE, with its secret key in Z85.
    pub fn set_curve_server(&self, secret_key: &str) -> Result<()> {
        self.set_int(ffi::ZMQ_CURVE_SERVER, 1)?;
        self.set_bytes(ffi::ZMQ_CURVE_SECRETKEY, secret_key.as_bytes())
    }

    /// Makes this the client side of CURVE: the server's public key and the own pair, all in Z85.
    pub fn set_curve_client(&self, server_key: &str, keys: &CurveKeys) -> Result<()> {
        self.set_bytes(ffi::ZMQ_CURVE_SERVERKEY, server_key.as_bytes())?;
        self.set_bytes(ffi::ZMQ_CURVE_PUBLICKEY, keys.public.as_bytes())?;
        self.set_bytes(ffi::ZMQ_CURVE_SECRETKEY, keys.secret.as_bytes())
    }

    /// Whether a `recv` would return a message now. Reading it also re-arms the descriptor of `as_raw_fd`.
    pub fn readable(&self) -> Result<bool> {
        Ok(self.get_int(ffi::ZMQ_EVENTS)? & c_int::from(ffi::ZMQ_POLLIN) != 0)
    }

    fn set_int(&self, option: c_int, value: c_int) -> Result<()> {
        self.set_bytes(option, &value.to_ne_bytes())
    }

    fn set_bytes(&self, option: c_int, value: &[u8]) -> Result<()> {
        // SAFETY: open socket; libzmq copies `len` bytes from the pointer.
        check(unsafe { ffi::zmq_setsockopt(self.raw, option, value.as_ptr().cast(), value.len()) }).map(drop)
    }

    fn get_int(&self, option: c_int) -> Result<c_int> {
        let mut value: c_int = 0;
        let mut len = size_of::<c_int>();
        // SAFETY: open socket; `value` holds `len` bytes.
        check(unsafe { ffi::zmq_getsockopt(self.raw, option, (&raw mut value).cast(), &raw mut len) })?;
        Ok(value)
    }
}

impl AsRawFd for Socket {
    /// The descriptor that wakes an event loop; edge-triggered, so drain the socket on every wake-up.
    fn as_raw_fd(&self) -> RawFd {
        self.get_int(ffi::ZMQ_FD).unwrap_or(-1)
    }
}

fn millis(time: Option<Duration>) -> c_int {
    time.map_or(-1, |t| c_int::try_from(t.as_millis()).unwrap_or(c_int::MAX))
}

/// What `poll` waits for: readable sockets and readable descriptors.
pub enum Source<'a> {
    /// A socket of libzmq.
    Socket(&'a Socket),
    /// Any other descriptor.
    Fd(RawFd),
    /// A descriptor that is to take bytes.
    Writable(RawFd),
}

/// Waits until a source is ready or the time is over; `None` waits for ever. One flag a source comes back; `others` end
/// the wait too, and whoever they are about looks for themselves. A signal ends the wait early, with nothing ready.
pub fn poll<'a, const N: usize>(
    sources: [Source<'a>; N],
    others: impl IntoIterator<Item = Source<'a>>,
    timeout: Option<Duration>,
) -> Result<[bool; N]> {
    let item = |source: Source<'_>| {
        let (socket, fd, events) = match source {
            Source::Socket(socket) => (socket.raw, 0, ffi::ZMQ_POLLIN),
            Source::Fd(fd) => (std::ptr::null_mut(), fd, ffi::ZMQ_POLLIN),
            Source::Writable(fd) => (std::ptr::null_mut(), fd, ffi::ZMQ_POLLOUT),
        };
        ffi::ZmqPollItem { socket, fd, events, revents: 0 }
    };
    let mut items: Vec<_> = sources.into_iter().chain(others).map(item).collect();
    // Rounded up: waking a fraction of a millisecond early would poll again for nothing.
    let wait = timeout.map_or(-1, |t| c_long::try_from(t.as_nanos().div_ceil(1_000_000)).unwrap_or(c_long::MAX));
    let n = c_int::try_from(items.len()).unwrap_or(c_int::MAX);
    // SAFETY: `items` holds `n` valid items.
    match check(unsafe { ffi::zmq_poll(items.as_mut_ptr(), n, wait) }) {
        Ok(_) | Err(Error::Interrupted) => {
            let mut ready = items.iter().map(|item| item.revents != 0);
            Ok(std::array::from_fn(|_| ready.next().unwrap_or(false)))
        }
        Err(error) => Err(error),
    }
}

/// libzmq's own forwarding loop, the yardstick of the router's bench. It returns when the context ends.
pub fn proxy(frontend: &Socket, backend: &Socket) -> Result<()> {
    // SAFETY: both sockets are open and used by this thread only.
    check(unsafe { ffi::zmq_proxy(frontend.raw, backend.raw, std::ptr::null_mut()) }).map(drop)
}

/// A pair of CURVE keys in Z85, 40 characters each.
#[derive(Clone)]
pub struct CurveKeys {
    /// Known to everyone.
    pub public: String,
    /// Known to its owner.
    pub secret: String,
}

impl CurveKeys {
    /// A new random pair.
    pub fn generate() -> Result<Self> {
        let (mut public, mut secret) = ([0u8; 41], [0u8; 41]);
        // SAFETY: both buffers hold the 41 bytes that libzmq writes.
        check(unsafe { ffi::zmq_curve_keypair(public.as_mut_ptr().cast(), secret.as_mut_ptr().cast()) })?;
        Ok(Self { public: z85(&public), secret: z85(&secret) })
    }

    /// The pair of a secret key.
    ///
    /// # Errors
    /// The secret is not 40 characters of Z85.
    pub fn from_secret(secret: &str) -> Result<Self> {
        // libzmq decodes a shorter text into a shorter key and says nothing.
        if secret.len() != 40 {
            return Err(Error::Other(libc::EINVAL));
        }
        let mut public = [0u8; 41];
        let raw = text(secret)?;
        // SAFETY: 41 bytes to write to, a NUL-terminated secret to read.
        check(unsafe { ffi::zmq_curve_public(public.as_mut_ptr().cast(), raw.as_ptr()) })?;
        Ok(Self { public: z85(&public), secret: secret.to_owned() })
    }
}

fn z85(buf: &[u8; 41]) -> String {
    String::from_utf8_lossy(&buf[..40]).into_owned()
}
