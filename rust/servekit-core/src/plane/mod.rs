//! The threads of the control process: `router`, `fanout` with the first detokenizer shard, and `detok-<i>` for the
//! others. They carry bytes between the sockets and the router core; Python starts them and waits.

mod control;
mod controller;
mod endpoints;
mod inbox;
mod queue;
mod ranks;
mod remote;
mod report;
mod router;
mod shard;
mod state;

pub use control::{Plane, PlaneConfig, PlaneError, RESUME_MEMORY};
pub use controller::{Controller, ControllerConfig, ControllerCounts};
pub use endpoints::Endpoints;
pub(crate) use inbox::{Inbox, Mailbox};
pub(crate) use queue::Next;
pub use remote::Remote;
pub(crate) use shard::{ShardRun, ShardTask};

#[cfg(test)]
type Tested = (
    queue::Sender<crate::fanout::Task>,
    Inbox<crate::fanout::Task>,
    std::sync::Arc<Mailbox<crate::wire::Route>>,
    ShardRun,
);

/// What the fan-out's thread is started with, and the way to it.
#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
pub(crate) fn test_inbox(shard: crate::detok::Shard) -> Tested {
    let waker = inbox::Waker::new().unwrap();
    let (tasks, inbox) = Inbox::new(inbox::Pulse::new(None, 1));
    let run = ShardRun::new(shard, Mailbox::new(&waker), std::sync::Arc::new(shard::ShardView::default()));
    (tasks, inbox, Mailbox::new(&waker), run)
}
