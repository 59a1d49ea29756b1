//! A detokenizer thread.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use crossbeam_channel::Sender;
use serde_json::{Value, json};

use super::inbox::{Inbox, Mailbox};
use super::report::ThreadError;
use crate::detok::{Shard, ShardOutput};
use crate::fanout::FanoutTask;
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
pub(super) enum ShardTask {
    /// A request begins.
    Open { rid: Rid, rank: Option<u16>, text: TextOptions, stream: bool },
    /// A step of a rank; the shard takes its own rows.
    Batch { rank: u16, batch: Arc<ScannedBatch> },
    /// A request ends with an error.
    Fail { rid: Rid, status: u16, kind: &'static str, message: String },
    /// Tell when all before this has been handed to the sockets.
    Flush(Sender<()>),
}

/// Works until the plane stops. Requests that a stop string ended go to `stops`, the what it holds and has counted to `view`.
pub(super) fn run(
    mut shard: Shard,
    inbox: &Inbox<Vec<ShardTask>>,
    fanout: &Sender<FanoutTask>,
    stops: &Arc<Mailbox<Rid>>,
    view: &ShardView,
) -> Result<(), ThreadError> {
    let mut out = ShardOutput::default();
    while let Some(turn) = inbox.next() {
        for task in turn {
            let mut flush = None;
            match task {
                ShardTask::Open { rid, rank, text, stream } => shard.open_at(rank, rid.0, text, stream),
                ShardTask::Batch { rank, batch } => shard.batch_of(rank, &batch, &mut out),
                ShardTask::Fail { rid, status, kind, message } => {
                    shard.fail(rid.0, status, kind, &message, &mut out);
                }
                ShardTask::Flush(done) => flush = Some(done),
            }
            if !out.aborts.is_empty() {
                stops.put_all(out.aborts.drain(..).map(Rid));
            }
            view.update(&shard);
            let frames = std::mem::take(&mut out.frames);
            let text = (!frames.is_empty()).then_some(FanoutTask::Text(frames));
            for task in text.into_iter().chain(flush.map(FanoutTask::Flush)) {
                if fanout.send(task).is_err() {
                    // The fan-out thread has ended, and said why.
                    return Ok(());
                }
            }
        }
    }
    Ok(())
}
