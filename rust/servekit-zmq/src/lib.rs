//! A thin safe wrapper of the few libzmq functions that servekit needs, and a way around its I/O thread for local peers.
//!
//! libzmq 4.3.5 is built from source with CURVE over libsodium (`build.rs`). A received message becomes the next one as
//! it is; an [`Outlet`] copies frames into what it writes.
#![allow(unsafe_code, reason = "this crate is the boundary to C; every block says why it holds")]

mod error;
mod ffi;
mod message;
mod outlet;
mod socket;

use std::ffi::CString;

// Linked for libzmq, which calls it; nothing here does.
use libsodium_sys as _;

pub use error::{Error, Result};
pub use message::Message;
pub use outlet::Outlet;
pub use socket::{Context, CurveKeys, Socket, SocketKind, Source, poll, proxy};

/// Whether libzmq was built with a capability, such as `curve` or `ipc`.
pub fn has(capability: &str) -> bool {
    // SAFETY: a NUL-terminated text.
    CString::new(capability).is_ok_and(|name| unsafe { ffi::zmq_has(name.as_ptr()) } == 1)
}

/// Version of the libzmq that is linked: major, minor, patch.
pub fn version() -> (i32, i32, i32) {
    let (mut major, mut minor, mut patch) = (0, 0, 0);
    // SAFETY: three numbers to write to.
    unsafe { ffi::zmq_version(&raw mut major, &raw mut minor, &raw mut patch) };
    (major, minor, patch)
}
