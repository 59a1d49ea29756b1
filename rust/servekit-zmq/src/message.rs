//! One frame, owned, without copying what a caller already owns.

use std::ffi::c_void;
use std::fmt;
use std::mem::MaybeUninit;
use std::ops::Deref;
use std::sync::Arc;

use crate::error::{Result, check};
use crate::ffi::{self, ZmqMsg};

/// Bytes that a frame can be made of without a copy: they stay alive until libzmq has written them.
pub type SharedBytes = Arc<dyn AsRef<[u8]> + Send + Sync>;

/// A frame. Small ones are copied into it, large ones keep the vector or the shared bytes they came from.
pub struct Message {
    raw: ZmqMsg,
    /// The bytes are those of a [`SharedBytes`], which libzmq knows nothing of.
    shared: bool,
}

/// Below this many bytes a copy is cheaper than an allocation that another thread frees.
const COPY_BELOW: usize = 4096;

// SAFETY: a zmq_msg_t may be handed to another thread; it is not used by two at once, for `&self` only reads.
unsafe impl Send for Message {}
// SAFETY: as above, all methods on `&self` only read.
unsafe impl Sync for Message {}

unsafe extern "C" fn free_vec(_data: *mut c_void, hint: *mut c_void) {
    // SAFETY: `hint` is the Box<Vec<u8>> that `From<Vec<u8>>` leaked for this message; libzmq calls this once.
    drop(unsafe { Box::from_raw(hint.cast::<Vec<u8>>()) });
}

unsafe extern "C" fn free_shared(_data: *mut c_void, hint: *mut c_void) {
    // SAFETY: `hint` is the Box<SharedBytes> that `from_shared` leaked for this message; libzmq calls this once.
    drop(unsafe { Box::from_raw(hint.cast::<SharedBytes>()) });
}

impl Message {
    /// An empty frame, to receive into.
    pub fn new() -> Self {
        let mut msg = MaybeUninit::<ZmqMsg>::uninit();
        // SAFETY: zmq_msg_init writes the whole struct and can't fail.
        unsafe {
            ffi::zmq_msg_init(msg.as_mut_ptr());
            Self { raw: msg.assume_init(), shared: false }
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
            Self { raw: msg.assume_init(), shared: false }
        }
    }

    /// A frame over bytes that others share: nothing is copied, the last owner frees them.
    pub fn from_shared(data: SharedBytes) -> Self {
        let bytes: &[u8] = (*data).as_ref();
        if bytes.len() < COPY_BELOW {
            return Self::copy_of(bytes);
        }
        let (ptr, len) = (bytes.as_ptr().cast_mut().cast::<c_void>(), bytes.len());
        let hint = Box::into_raw(Box::new(data)).cast::<c_void>();
        let mut message = Self::over(ptr, len, free_shared, hint);
        message.shared = true;
        message
    }

    /// The frame's bytes to write to. Bytes that others may hold too are copied first.
    pub fn make_mut(&mut self) -> &mut [u8] {
        // SAFETY: the message is initialized, the call only reads.
        if self.shared || unsafe { ffi::zmq_msg_get(&raw const self.raw, ffi::ZMQ_SHARED) } != 0 {
            *self = Self::copy_of(self);
        }
        // SAFETY: data and size describe one initialized buffer, which this message alone owns: it is not shared, and
        // `&mut self` keeps everyone else away while it is written.
        unsafe {
            let len = ffi::zmq_msg_size(self.as_mut_ptr());
            if len == 0 {
                return &mut [];
            }
            std::slice::from_raw_parts_mut(ffi::zmq_msg_data(self.as_mut_ptr()).cast::<u8>(), len)
        }
    }

    fn over(data: *mut c_void, len: usize, free: ffi::FreeFn, hint: *mut c_void) -> Self {
        let mut msg = MaybeUninit::<ZmqMsg>::uninit();
        // SAFETY: `hint` owns `data`, which neither moves nor changes until `free` is called with it.
        unsafe {
            assert_eq!(ffi::zmq_msg_init_data(msg.as_mut_ptr(), data, len, free, hint), 0, "out of memory");
            Self { raw: msg.assume_init(), shared: false }
        }
    }

    /// Another frame over the same bytes; those of a large one are not copied.
    #[must_use]
    pub fn share(&mut self) -> Self {
        let mut shared = Self::new();
        // SAFETY: both are initialized; libzmq counts who refers to the bytes, atomically, and marks both as shared, so
        // that `make_mut` writes to a copy.
        unsafe { assert_eq!(ffi::zmq_msg_copy(shared.as_mut_ptr(), self.as_mut_ptr()), 0, "a frame that is none") };
        shared.shared = self.shared;
        shared
    }

    pub(crate) fn as_mut_ptr(&mut self) -> *mut ZmqMsg {
        &raw mut self.raw
    }

    pub(crate) fn recv(socket: *mut c_void, flags: i32) -> Result<(Self, bool)> {
        let mut msg = Self::new();
        // SAFETY: `socket` is open, `msg` initialized.
        check(unsafe { ffi::zmq_msg_recv(msg.as_mut_ptr(), socket, flags) })?;
        // SAFETY: `msg` was just received.
        let more = unsafe { ffi::zmq_msg_more(&raw const msg.raw) } != 0;
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
        if data.len() < COPY_BELOW {
            return Self::copy_of(&data);
        }
        let mut boxed = Box::new(data);
        let (ptr, len) = (boxed.as_mut_ptr().cast::<c_void>(), boxed.len());
        Self::over(ptr, len, free_vec, Box::into_raw(boxed).cast::<c_void>())
    }
}

impl Deref for Message {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        let msg = (&raw const self.raw).cast_mut();
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
