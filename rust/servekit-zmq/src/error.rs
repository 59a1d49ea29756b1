//! What libzmq answers when it can't.

use std::ffi::{CStr, c_int};

use crate::ffi;

/// An error of libzmq. `Again` is the only one that a caller usually handles: nothing to receive, or a full pipe.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The call would block, or its time-out ran out.
    #[error("would block")]
    Again,
    /// A signal came first; call again.
    #[error("interrupted by a signal")]
    Interrupted,
    /// The context was terminated.
    #[error("context was terminated")]
    Terminated,
    /// An endpoint or capability name holds a NUL byte.
    #[error("text holds a NUL byte")]
    Nul,
    /// Anything else, by its errno.
    #[error("{}", message(*.0))]
    Other(c_int),
}

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
