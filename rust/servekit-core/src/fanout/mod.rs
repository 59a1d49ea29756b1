//! Output to HTTP workers: one socket each, found from the request id alone.

mod mapping;
mod thread;

pub use mapping::{PeerCounters, Sent, SocketMapping};
pub(crate) use thread::{FanoutTask, run};
