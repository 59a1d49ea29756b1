//! Workers and ranks as the control process meets them: what they hold, and which frames count to them.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use servekit_core::wire::{Load, Rid};

use super::bodies::{Row, token};
use super::random::Random;

/// Most requests that a rank runs at once.
pub(crate) const MAX_RUNNING: usize = 4;

/// What an envelope says of its link.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Link {
    pub(crate) sender_epoch: u32,
    pub(crate) receiver_epoch: u32,
    pub(crate) seq: u64,
}

/// Incoming frames of one process: which of them count.
#[derive(Clone, Default)]
pub(crate) struct Incoming {
    pub(crate) control_epoch: u32,
    seq: u64,
}

/// What becomes of a frame.
#[derive(PartialEq)]
pub(crate) enum Verdict {
    Take,
    Drop,
    /// Frames are missing before it.
    Gap,
}

impl Incoming {
    pub(crate) fn judge(&mut self, own_epoch: u32, link: Link, hello: bool) -> Verdict {
        if link.sender_epoch != self.control_epoch || link.receiver_epoch != own_epoch || link.seq <= self.seq {
            return Verdict::Drop;
        }
        let missing = !hello && link.seq != self.seq + 1;
        self.seq = link.seq;
        if missing { Verdict::Gap } else { Verdict::Take }
    }

    /// A later life of the control process begins.
    pub(crate) fn meet(&mut self, control_epoch: u32) {
        *self = Self { control_epoch, seq: 0 };
    }
}

/// An HTTP worker.
pub(crate) struct Worker {
    pub(crate) epoch: u32,
    pub(crate) alive: bool,
    pub(crate) frozen_until: u64,
    pub(crate) seq: u64,
    pub(crate) incoming: Incoming,
    pub(crate) minted: u64,
    /// Requests of which the client has heard no end.
    pub(crate) live: BTreeSet<Rid>,
}

/// A request at a rank.
struct Run {
    position: u32,
    limit: u32,
    prompt: u64,
}

/// A rank: each running request gets up to two tokens a step.
pub(crate) struct Rank {
    pub(crate) epoch: u32,
    pub(crate) alive: bool,
    pub(crate) frozen_until: u64,
    pub(crate) seq: u64,
    pub(crate) incoming: Incoming,
    pub(crate) last_dispatch: u64,
    /// Whether a step is due at some time.
    pub(crate) stepping: bool,
    running: BTreeMap<Rid, Run>,
    waiting: VecDeque<(Rid, Run)>,
    closing: Vec<Rid>,
    reported: (u64, Load),
    before: (u64, Load),
}

impl Rank {
    pub(crate) fn new(epoch: u32, control_epoch: u32) -> Self {
        Self {
            epoch,
            alive: true,
            frozen_until: 0,
            seq: 0,
            incoming: Incoming { control_epoch, seq: 0 },
            last_dispatch: 0,
            stepping: false,
            running: BTreeMap::new(),
            waiting: VecDeque::new(),
            closing: Vec::new(),
            reported: (0, Load::default()),
            before: (0, Load::default()),
        }
    }

    pub(crate) fn accept(&mut self, rid: Rid, dispatch: u64, limit: u32, prompt: u64) {
        self.last_dispatch = self.last_dispatch.max(dispatch);
        if !self.running.contains_key(&rid) && self.waiting.iter().all(|(waiting, _)| *waiting != rid) {
            self.waiting.push_back((rid, Run { position: 0, limit, prompt }));
        }
    }

    pub(crate) fn abort(&mut self, rid: Rid) {
        let waiting = self.waiting.len();
        self.waiting.retain(|(waiting, _)| *waiting != rid);
        if self.running.remove(&rid).is_some() || self.waiting.len() < waiting {
            self.closing.push(rid);
        }
    }

    pub(crate) fn busy(&self) -> bool {
        !(self.running.is_empty() && self.waiting.is_empty() && self.closing.is_empty())
    }

    /// The rows of a step.
    pub(crate) fn step(&mut self, number: usize, random: &mut Random) -> Vec<Row> {
        while self.running.len() < MAX_RUNNING {
            let Some((rid, run)) = self.waiting.pop_front() else { break };
            self.running.insert(rid, run);
        }
        let close = |rid| Row { rid, tokens: Vec::new(), end: Some("abort") };
        let mut rows: Vec<Row> = self.closing.drain(..).map(close).collect();
        let epoch = self.epoch;
        self.running.retain(|&rid, run| {
            let count = (random.below(3) as u32).min(run.limit - run.position);
            let tokens = (0..count).map(|i| token(number, epoch, rid, run.position + i)).collect();
            run.position += count;
            let ended = run.position == run.limit;
            rows.push(Row { rid, tokens, end: ended.then_some("length") });
            !ended
        });
        rows
    }

    /// Its load after a step; with `stale`, what it said before its last word.
    pub(crate) fn report(&mut self, stale: bool) -> (u64, Load) {
        if stale {
            self.before
        } else {
            let load = Load {
                running: self.running.len() as u32,
                waiting: self.waiting.len() as u32,
                held_tokens: self.running.values().map(|run| run.prompt + u64::from(run.position)).sum(),
                pending_tokens: self.waiting.iter().map(|(_, run)| run.prompt).sum(),
                pool_tokens: 0,
            };
            self.before = std::mem::replace(&mut self.reported, (self.last_dispatch, load));
            self.reported
        }
    }

    /// A later life of the control process begins; what runs here goes on.
    pub(crate) fn meet(&mut self, control_epoch: u32) {
        self.incoming.meet(control_epoch);
        (self.seq, self.last_dispatch) = (0, 0);
        (self.reported, self.before) = Default::default();
    }
}
