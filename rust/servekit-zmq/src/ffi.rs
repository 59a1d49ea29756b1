//! The part of `zmq.h` 4.3.5 that this crate calls.

use std::ffi::{c_char, c_int, c_long, c_short, c_void};

pub(crate) const ZMQ_IO_THREADS: c_int = 1;
pub(crate) const ZMQ_PAIR: c_int = 0;
pub(crate) const ZMQ_REQ: c_int = 3;
pub(crate) const ZMQ_REP: c_int = 4;
pub(crate) const ZMQ_PULL: c_int = 7;
pub(crate) const ZMQ_PUSH: c_int = 8;
pub(crate) const ZMQ_FD: c_int = 14;
pub(crate) const ZMQ_EVENTS: c_int = 15;
pub(crate) const ZMQ_LINGER: c_int = 17;
pub(crate) const ZMQ_RECONNECT_IVL: c_int = 18;
pub(crate) const ZMQ_MAXMSGSIZE: c_int = 22;
pub(crate) const ZMQ_SNDHWM: c_int = 23;
pub(crate) const ZMQ_RCVHWM: c_int = 24;
pub(crate) const ZMQ_RCVTIMEO: c_int = 27;
pub(crate) const ZMQ_SNDTIMEO: c_int = 28;
pub(crate) const ZMQ_LAST_ENDPOINT: c_int = 32;
pub(crate) const ZMQ_IMMEDIATE: c_int = 39;
pub(crate) const ZMQ_IPV6: c_int = 42;
pub(crate) const ZMQ_CURVE_SERVER: c_int = 47;
pub(crate) const ZMQ_CURVE_PUBLICKEY: c_int = 48;
pub(crate) const ZMQ_CURVE_SECRETKEY: c_int = 49;
pub(crate) const ZMQ_CURVE_SERVERKEY: c_int = 50;
pub(crate) const ZMQ_USE_FD: c_int = 89;
pub(crate) const ZMQ_DONTWAIT: c_int = 1;
pub(crate) const ZMQ_SNDMORE: c_int = 2;
pub(crate) const ZMQ_POLLIN: c_short = 1;
pub(crate) const ZMQ_POLLOUT: c_short = 2;

/// `zmq_msg_t`: 64 opaque bytes, aligned like a pointer.
#[repr(C, align(8))]
pub(crate) struct ZmqMsg(pub(crate) [u8; 64]);

#[repr(C)]
pub(crate) struct ZmqPollItem {
    pub(crate) socket: *mut c_void,
    pub(crate) fd: c_int,
    pub(crate) events: c_short,
    pub(crate) revents: c_short,
}

unsafe extern "C" {
    pub(crate) fn zmq_version(major: *mut c_int, minor: *mut c_int, patch: *mut c_int);
    pub(crate) fn zmq_errno() -> c_int;
    pub(crate) fn zmq_strerror(errnum: c_int) -> *const c_char;
    pub(crate) fn zmq_has(capability: *const c_char) -> c_int;
    pub(crate) fn zmq_curve_keypair(public: *mut c_char, secret: *mut c_char) -> c_int;
    pub(crate) fn zmq_curve_public(public: *mut c_char, secret: *const c_char) -> c_int;

    pub(crate) fn zmq_ctx_new() -> *mut c_void;
    pub(crate) fn zmq_ctx_set(context: *mut c_void, option: c_int, value: c_int) -> c_int;
    pub(crate) fn zmq_ctx_term(context: *mut c_void) -> c_int;

    pub(crate) fn zmq_socket(context: *mut c_void, kind: c_int) -> *mut c_void;
    pub(crate) fn zmq_close(socket: *mut c_void) -> c_int;
    pub(crate) fn zmq_setsockopt(socket: *mut c_void, option: c_int, value: *const c_void, len: usize) -> c_int;
    pub(crate) fn zmq_getsockopt(socket: *mut c_void, option: c_int, value: *mut c_void, len: *mut usize) -> c_int;
    pub(crate) fn zmq_bind(socket: *mut c_void, endpoint: *const c_char) -> c_int;
    pub(crate) fn zmq_connect(socket: *mut c_void, endpoint: *const c_char) -> c_int;

    pub(crate) fn zmq_msg_init(msg: *mut ZmqMsg) -> c_int;
    pub(crate) fn zmq_msg_init_size(msg: *mut ZmqMsg, size: usize) -> c_int;
    pub(crate) fn zmq_msg_copy(to: *mut ZmqMsg, from: *mut ZmqMsg) -> c_int;
    pub(crate) fn zmq_msg_data(msg: *mut ZmqMsg) -> *mut c_void;
    pub(crate) fn zmq_msg_size(msg: *const ZmqMsg) -> usize;
    pub(crate) fn zmq_msg_more(msg: *const ZmqMsg) -> c_int;
    pub(crate) fn zmq_msg_close(msg: *mut ZmqMsg) -> c_int;
    pub(crate) fn zmq_msg_send(msg: *mut ZmqMsg, socket: *mut c_void, flags: c_int) -> c_int;
    pub(crate) fn zmq_msg_recv(msg: *mut ZmqMsg, socket: *mut c_void, flags: c_int) -> c_int;

    pub(crate) fn zmq_poll(items: *mut ZmqPollItem, n: c_int, timeout_ms: c_long) -> c_int;
    pub(crate) fn zmq_proxy(frontend: *mut c_void, backend: *mut c_void, capture: *mut c_void) -> c_int;
}
