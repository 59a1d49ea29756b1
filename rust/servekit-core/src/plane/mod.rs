//! The threads of the control process: `router`, `fanout` with the first detokenizer shard, and `detok-<i>` for the
//! others. They carry bytes between the sockets and the router core; Python starts them and waits.

mod control;
mod controller;
mod endpoints;
mod inbox;
mod queue;
mod ranks;
mod report;
mod router;
mod shard;
mod state;

pub use control::{Plane, PlaneConfig, PlaneError, RESUME_MEMORY};
pub use controller::{Controller, ControllerConfig, ControllerCounts};
pub use endpoints::Endpoints;
pub(crate) use inbox::{Inbox, Mailbox};
pub(crate) use queue::Next;
pub(crate) use shard::{ShardRun, ShardTask};
