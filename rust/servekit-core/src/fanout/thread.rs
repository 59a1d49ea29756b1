//! The thread that owns the worker sockets.

use std::sync::Arc;

use crossbeam_channel::Sender;
use servekit_zmq::Message;

use super::{Sent, SocketMapping};
use crate::detok::WorkerFrame;
use crate::log::{Level, LogSink};
use crate::plane::{Inbox, Mailbox, ThreadError};
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

/// Sends what comes until the plane stops. Workers that lose a message are told to the router as `cuts`.
pub(crate) fn run(
    mut mapping: SocketMapping,
    inbox: &Inbox<FanoutTask>,
    cuts: &Arc<Mailbox<Route>>,
    log: &LogSink,
    epoch: u32,
) -> Result<(), ThreadError> {
    while let Some(task) = inbox.next() {
        match task {
            FanoutTask::Text(frames) => {
                for frame in frames {
                    let envelope = batch(epoch, frame.kind, frame.rank, frame.rows);
                    let frames = vec![Message::from(envelope), Message::from(frame.body)];
                    send(&mut mapping, frame.route, frames, cuts, log)?;
                }
            }
            FanoutTask::Single { route, frames } => send(&mut mapping, route, frames, cuts, log)?,
            FanoutTask::Acknowledge { route, number } => {
                // What a life that is over has handled is of no interest.
                mapping.acknowledge(route, number);
            }
            FanoutTask::Greet { worker, epoch } => mapping.greet(worker, epoch)?,
            FanoutTask::Forget { worker } => mapping.remove(worker),
            // Whoever waited may have given up.
            FanoutTask::Flush(done) => {
                let _ = done.try_send(());
            }
        }
    }
    Ok(())
}

fn send(
    mapping: &mut SocketMapping,
    route: Route,
    frames: Frames,
    cuts: &Arc<Mailbox<Route>>,
    log: &LogSink,
) -> Result<(), ThreadError> {
    match mapping.send_output(route, frames)? {
        Sent::Yes | Sent::NoRoute => {}
        Sent::Cut => {
            log.write(Level::Error, "fanout", format_args!("{route} reads too slowly: its streams are cut"));
            cuts.put(route);
        }
        // Of a stream that began after the cut: it ends as well.
        Sent::Lost => cuts.put(route),
    }
    Ok(())
}
