//! What libzmq answers when it can't.

use std::ffi::{CStr, c_int};
use std::fmt;

use crate::ffi;

/// An error of libzmq. `Again` is the only one that a caller usually handles: nothing to receive, or a full pipe.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Error {
    /// The call would block, or its time-out ran out.
    Again,
    /// A signal came first; call again.
    Interrupted,
    /// The context was terminated.
    Terminated,
    /// An endpoint or capability name holds a NUL byte.
    Nul,
    /// Anything else, by its errno.
    Other(c_int),
}

// By hand: a derive would tie this crate to the features of `syn`, and every change of those would build libzmq again.
impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Again => f.write_str("would block"),
            Self::Interrupted => f.write_str("interrupted by a signal"),
            Self::Terminated => f.write_str("context was terminated"),
            Self::Nul => f.write_str("text holds a NUL byte"),
            Self::Other(errno) => f.write_str(&message(*errno)),
        }
    }
}

impl std::error::Error for Error {}

const ETERM: c_int = 156_384_712 + 53;

fn message(errno: c_int) -> String {
    // SAFETY: zmq_strerror returns a static, NUL-terminated text for every number.
    unsafe { CStr::from_ptr(ffi::zmq_strerror(errno)) }.to_string_lossy().into_owned()
}

impl Error {
    pub(crate) fn last() -> Self {
        // SAFETY: no arguments; it reads a thread-local number.
        match unsafe { ffi::zmq_errno() } {
            libc::EAGAIN => Self::Again,
            libc::EINTR => Self::Interrupted,
            ETERM => Self::Terminated,
            errno => Self::Other(errno),
        }
    }
}

/// Result of every fallible call here.
pub type Result<T> = std::result::Result<T, Error>;

pub(crate) fn check(code: c_int) -> Result<c_int> {
    if code < 0 { Err(Error::last()) } else { Ok(code) }
}
