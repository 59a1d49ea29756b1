//! The thread that owns the worker sockets.

use std::sync::Arc;

use crossbeam_channel::Sender;

use super::{RETRY, Sent, SocketMapping};
use crate::detok::WorkerFrame;
use crate::log::{Level, LogSink};
use crate::plane::{Inbox, Mailbox};
use crate::router::frames::{Frames, batch};
use crate::wire::Route;

/// Work for the fan-out thread.
pub(crate) enum FanoutTask {
    /// What a shard has to say, one frame a worker.
    Text(Vec<WorkerFrame>),
    /// One message for one worker.
    Single {
        /// The worker.
        route: Route,
        /// Envelope, body and attachments.
        frames: Frames,
    },
    /// A worker has handled all messages up to a number.
    Acknowledge {
        /// The worker.
        route: Route,
        /// The number.
        number: u64,
    },
    /// A life of a worker is there.
    Greet {
        /// The worker.
        worker: u16,
        /// Its life.
        epoch: u32,
    },
    /// A worker is gone.
    Forget {
        /// The worker.
        worker: u16,
    },
    /// Tell when all before this has been handed to the sockets.
    Flush(Sender<()>),
}

/// Tasks that are taken before what they led to is sent.
const TURN: usize = 256;

/// Sends what comes until the plane stops. Workers that lose a message are told to the router as `cuts`.
pub(crate) fn run(
    mut mapping: SocketMapping,
    inbox: &Inbox<FanoutTask>,
    cuts: &Arc<Mailbox<Route>>,
    log: &LogSink,
    epoch: u32,
) {
    let mut all_sent = true;
    while let Some(first) = inbox.next_within(if all_sent { None } else { Some(RETRY) }) {
        // What follows closely goes to each worker in one system call.
        for task in first.into_iter().chain(inbox.at_hand()).take(TURN) {
            act(task, &mut mapping, cuts, log, epoch);
        }
        all_sent = mapping.flush();
    }
}

fn act(task: FanoutTask, mapping: &mut SocketMapping, cuts: &Arc<Mailbox<Route>>, log: &LogSink, epoch: u32) {
    match task {
        FanoutTask::Text(frames) => {
            for frame in frames {
                let envelope = batch(epoch, frame.kind, frame.rank, frame.rows);
                let sent = mapping.send_output(frame.route, &[&envelope[..], frame.body.as_ref()]);
                tell(sent, frame.route, cuts, log);
            }
        }
        FanoutTask::Single { route, frames } => tell(mapping.send_output(route, &frames), route, cuts, log),
        FanoutTask::Acknowledge { route, number } => {
            // What a life that is over has handled is of no interest.
            mapping.acknowledge(route, number);
        }
        FanoutTask::Greet { worker, epoch } => mapping.greet(worker, epoch),
        FanoutTask::Forget { worker } => mapping.remove(worker),
        FanoutTask::Flush(done) => {
            mapping.flush();
            // Whoever waited may have given up.
            let _ = done.try_send(());
        }
    }
}

fn tell(sent: Sent, route: Route, cuts: &Arc<Mailbox<Route>>, log: &LogSink) {
    match sent {
        Sent::Yes | Sent::NoRoute => {}
        Sent::Cut => {
            log.write(Level::Error, "fanout", format_args!("{route} reads too slowly: its streams are cut"));
            cuts.put(route);
        }
        // Of a stream that began after the cut: it ends as well.
        Sent::Lost => cuts.put(route),
    }
}
