//! Output to HTTP workers: one socket each, found from the request id alone.

mod mapping;
mod thread;
mod unacknowledged;

pub use mapping::{MAX_UNACKNOWLEDGED, PeerCounters, RETRY, Sent, SocketMapping};
pub(crate) use thread::{Fanout, FanoutTask, Task, run};
