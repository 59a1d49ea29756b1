//! A detokenizer thread.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crossbeam_channel::Sender;

use super::inbox::{Inbox, Mailbox};
use super::report::ThreadError;
use crate::detok::{Shard, ShardOutput};
use crate::fanout::FanoutTask;
use crate::wire::{Rid, ScannedBatch, TextOptions};

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

/// Works until the plane stops. Requests that a stop string ended go to `stops`, the number of live ones to `live`.
pub(super) fn run(
    mut shard: Shard,
    inbox: &Inbox<Vec<ShardTask>>,
    fanout: &Sender<FanoutTask>,
    stops: &Arc<Mailbox<Rid>>,
    live: &AtomicUsize,
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
            live.store(shard.live(), Ordering::Relaxed);
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
