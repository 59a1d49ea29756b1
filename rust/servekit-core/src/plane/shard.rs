//! A detokenizer shard at work.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use serde_json::{Value, json};

use super::inbox::{Inbox, Mailbox};
use super::queue::Sender;
use crate::detok::{Shard, ShardOutput};
use crate::fanout::{FanoutTask, Task};
use crate::wire::{Rid, ScannedBatch, TextOptions};

/// What a shard holds and has counted, for others to look at.
#[derive(Debug, Default)]
pub(super) struct ShardView {
    live: AtomicUsize,
    dropped: AtomicU64,
    strays: AtomicU64,
    failed: AtomicU64,
}

impl ShardView {
    fn update(&self, shard: &Shard) {
        let counts = shard.counts();
        self.live.store(shard.live(), Ordering::Relaxed);
        self.dropped.store(counts.dropped, Ordering::Relaxed);
        self.strays.store(counts.strays, Ordering::Relaxed);
        self.failed.store(counts.failed, Ordering::Relaxed);
    }

    /// As JSON, with the work that waits for the shard.
    pub(super) fn json(&self, queued: usize) -> Value {
        json!({
            "queued": queued,
            "live": self.live.load(Ordering::Relaxed),
            "dropped": self.dropped.load(Ordering::Relaxed),
            "strays": self.strays.load(Ordering::Relaxed),
            "failed": self.failed.load(Ordering::Relaxed),
        })
    }
}

/// Work for a shard, in the order in which the router decided it.
pub(crate) enum ShardTask {
    /// A request begins.
    Open { rid: Rid, rank: Option<u16>, text: TextOptions, stream: bool },
    /// A step of a rank; the shard takes its own rows.
    Batch { rank: u16, batch: Arc<ScannedBatch> },
    /// A request ends with an error.
    Fail { rid: Rid, status: u16, kind: &'static str, message: String },
    /// Tell when all before this has been handed to the sockets.
    Flush(crossbeam_channel::Sender<()>),
}

/// A shard and where its news go, whichever thread it runs on.
pub(crate) struct ShardRun {
    shard: Shard,
    stops: Arc<Mailbox<Rid>>,
    view: Arc<ShardView>,
    out: ShardOutput,
}

impl ShardRun {
    /// Requests that a stop string ended go to `stops`, what it holds and has counted to `view`.
    pub(super) fn new(shard: Shard, stops: Arc<Mailbox<Rid>>, view: Arc<ShardView>) -> Self {
        Self { shard, stops, view, out: ShardOutput::default() }
    }

    /// Does the work of a turn of the router. What the workers are to get goes to `send`, which returns false if nobody
    /// sends any more; so does this.
    pub(crate) fn turn(&mut self, turn: Vec<ShardTask>, mut send: impl FnMut(FanoutTask) -> bool) -> bool {
        for task in turn {
            let mut flush = None;
            match task {
                ShardTask::Open { rid, rank, text, stream } => self.shard.open_at(rank, rid.0, text, stream),
                ShardTask::Batch { rank, batch } => self.shard.batch_of(rank, &batch, &mut self.out),
                ShardTask::Fail { rid, status, kind, message } => {
                    self.shard.fail(rid.0, status, kind, &message, &mut self.out);
                }
                ShardTask::Flush(done) => flush = Some(done),
            }
            if !self.out.aborts.is_empty() {
                self.stops.put_all(self.out.aborts.drain(..).map(Rid));
            }
            self.view.update(&self.shard);
            let frames = std::mem::take(&mut self.out.frames);
            let text = (!frames.is_empty()).then_some(FanoutTask::Text(frames));
            if !text.into_iter().chain(flush.map(FanoutTask::Flush)).all(&mut send) {
                return false;
            }
        }
        true
    }
}

/// The thread of a shard that has one of its own: works until the router has gone.
pub(super) fn run(mut shard: ShardRun, mut inbox: Inbox<Vec<ShardTask>>, fanout: &Sender<Task>) {
    while let Some(turn) = inbox.next() {
        if !shard.turn(turn, |task| fanout.send(Task::Send(task))) {
            // The fan-out thread has ended, and said why.
            return;
        }
    }
}
