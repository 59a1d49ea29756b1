//! One frame, owned.

use std::ffi::c_void;
use std::fmt;
use std::mem::MaybeUninit;
use std::ops::Deref;

use crate::error::{Result, check};
use crate::ffi::{self, ZmqMsg};

/// A frame. It owns its bytes, or shares them with others that were made from it.
pub struct Message(ZmqMsg);

// SAFETY: a zmq_msg_t may be handed to another thread; it is not used by two at once, for `&self` only reads.
unsafe impl Send for Message {}
// SAFETY: as above, all methods on `&self` only read.
unsafe impl Sync for Message {}

impl Message {
    /// An empty frame, to receive into.
    pub fn new() -> Self {
        let mut msg = MaybeUninit::<ZmqMsg>::uninit();
        // SAFETY: zmq_msg_init writes the whole struct and can't fail.
        unsafe {
            ffi::zmq_msg_init(msg.as_mut_ptr());
            Self(msg.assume_init())
        }
    }

    /// A frame with a copy of `data`.
    pub fn copy_of(data: &[u8]) -> Self {
        let mut msg = MaybeUninit::<ZmqMsg>::uninit();
        // SAFETY: zmq_msg_init_size fails only without memory, where Rust aborts too; the copy fits what was asked for.
        unsafe {
            assert_eq!(ffi::zmq_msg_init_size(msg.as_mut_ptr(), data.len()), 0, "out of memory");
            let to = ffi::zmq_msg_data(msg.as_mut_ptr()).cast::<u8>();
            std::ptr::copy_nonoverlapping(data.as_ptr(), to, data.len());
            Self(msg.assume_init())
        }
    }

    /// Another frame over the same bytes; those of a large one are not copied.
    #[must_use]
    pub fn share(&mut self) -> Self {
        let mut shared = Self::new();
        // SAFETY: both are initialized; libzmq counts who refers to the bytes, atomically.
        unsafe { assert_eq!(ffi::zmq_msg_copy(shared.as_mut_ptr(), self.as_mut_ptr()), 0, "a frame that is none") };
        shared
    }

    pub(crate) fn as_mut_ptr(&mut self) -> *mut ZmqMsg {
        &raw mut self.0
    }

    pub(crate) fn recv(socket: *mut c_void, flags: i32) -> Result<(Self, bool)> {
        let mut msg = Self::new();
        // SAFETY: `socket` is open, `msg` initialized.
        check(unsafe { ffi::zmq_msg_recv(msg.as_mut_ptr(), socket, flags) })?;
        // SAFETY: `msg` was just received.
        let more = unsafe { ffi::zmq_msg_more(&raw const msg.0) } != 0;
        Ok((msg, more))
    }
}

impl Default for Message {
    fn default() -> Self {
        Self::new()
    }
}

impl From<Vec<u8>> for Message {
    fn from(data: Vec<u8>) -> Self {
        Self::copy_of(&data)
    }
}

impl Deref for Message {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        let msg = (&raw const self.0).cast_mut();
        // SAFETY: data and size describe one initialized buffer that lives as long as the message; both calls only read.
        unsafe {
            let len = ffi::zmq_msg_size(msg);
            if len == 0 {
                return &[];
            }
            std::slice::from_raw_parts(ffi::zmq_msg_data(msg).cast::<u8>(), len)
        }
    }
}

impl AsRef<[u8]> for Message {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl fmt::Debug for Message {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Message({} bytes)", self.len())
    }
}

impl Drop for Message {
    fn drop(&mut self) {
        // SAFETY: the message is initialized, and closed only here; a sent one is an empty one.
        unsafe { ffi::zmq_msg_close(self.as_mut_ptr()) };
    }
}
