//! The thread that owns the worker sockets.

use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::Sender;

use super::{RETRY, Sent, SocketMapping};
use crate::detok::WorkerFrame;
use crate::log::{Level, LogSink};
use crate::plane::{Inbox, Mailbox, Next, ShardRun, ShardTask};
use crate::router::frames::{Frames, batch};
use crate::wire::Route;

/// Something to send.
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

/// Work for the thread.
pub(crate) enum Task {
    /// Something to send.
    Send(FanoutTask),
    /// A turn of the first shard, which lives here: with one shard, a step's text is sent by the thread that made it.
    Turn(Vec<ShardTask>),
}

/// Tasks that are taken before what they led to is sent.
const TURN: usize = 256;

/// The sockets, and who is told of workers that lose messages.
pub(crate) struct Fanout {
    /// The sockets.
    pub(crate) mapping: SocketMapping,
    /// Life of this control process.
    pub(crate) epoch: u32,
    /// Workers that lose a message, for the router.
    pub(crate) cuts: Arc<Mailbox<Route>>,
    /// Where that is said.
    pub(crate) log: LogSink,
}

/// Sends what comes until the router and the other shards have gone.
pub(crate) fn run(mut fanout: Fanout, mut first_shard: ShardRun, mut inbox: Inbox<Task>) {
    let mut all_sent = true;
    loop {
        let mut task = match inbox.next_within(if all_sent { Duration::MAX } else { RETRY }) {
            Next::Item(task) => Some(task),
            Next::Late => None,
            Next::Over => return,
        };
        // What follows closely goes to each worker in one system call.
        let mut left = TURN;
        while let Some(next) = task {
            match next {
                Task::Send(task) => fanout.act(task),
                Task::Turn(turn) => {
                    first_shard.turn(turn, |task| {
                        fanout.act(task);
                        true
                    });
                }
            }
            left -= 1;
            task = if left > 0 { inbox.at_hand() } else { None };
        }
        all_sent = fanout.mapping.flush();
    }
}

impl Fanout {
    fn act(&mut self, task: FanoutTask) {
        match task {
            FanoutTask::Text(frames) => {
                for frame in frames {
                    let envelope = batch(self.epoch, frame.kind, frame.rank, frame.rows);
                    self.send(frame.route, &[&envelope[..], frame.body.as_ref()]);
                }
            }
            FanoutTask::Single { route, frames } => self.send(route, &frames),
            FanoutTask::Acknowledge { route, number } => {
                // What a life that is over has handled is of no interest.
                self.mapping.acknowledge(route, number);
            }
            FanoutTask::Greet { worker, epoch } => self.mapping.greet(worker, epoch),
            FanoutTask::Forget { worker } => self.mapping.remove(worker),
            FanoutTask::Flush(done) => {
                self.mapping.flush();
                // Whoever waited may have given up.
                let _ = done.try_send(());
            }
        }
    }

    fn send<F: AsRef<[u8]>>(&mut self, route: Route, frames: &[F]) {
        match self.mapping.send_output(route, frames) {
            Sent::Yes | Sent::NoRoute => {}
            Sent::Cut => {
                self.log.write(Level::Error, "fanout", format_args!("{route} reads too slowly: its streams are cut"));
                self.cuts.put(route);
            }
            // Of a stream that began after the cut: it ends as well.
            Sent::Lost => self.cuts.put(route),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::detok::Shard;
    use crate::log::log_channel;
    use crate::plane::test_inbox;

    #[test]
    fn no_task_is_lost_between_two_turns() {
        let (log, _lines) = log_channel();
        let (tasks, inbox, cuts, shard) = test_inbox(Shard::new(0, 1, None));
        let (done, told) = crossbeam_channel::unbounded();
        let sent = 3 * TURN + 1;
        for _ in 0..sent {
            assert!(tasks.send(Task::Send(FanoutTask::Flush(done.clone()))));
        }
        drop((tasks, done));
        let mapping = SocketMapping::open(std::path::Path::new("/nowhere"), 1, "test");
        run(Fanout { mapping, epoch: 1, cuts, log }, shard, inbox);
        assert_eq!(told.iter().count(), sent);
    }
}
