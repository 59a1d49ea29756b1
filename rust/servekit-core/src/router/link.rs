//! Which frames of a peer count: those of its present life, meant for this process's present life, each once.

use super::event::Peer;

/// One peer's link.
#[derive(Clone, Debug)]
pub(super) struct Link {
    /// Present life of the peer.
    pub(super) epoch: u32,
    /// Whether its HELLO came.
    pub(super) greeted: bool,
    /// Whether something was logged about it already; the rest is only counted.
    pub(super) complained: bool,
    seq: u64,
}

/// What becomes of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// It counts; that many frames before it are missing.
    Take { missing: u64 },
    /// It belongs to another life.
    Fenced,
    /// It came before.
    Replayed,
}

impl Link {
    pub(super) fn new(epoch: u32) -> Self {
        Self { epoch, greeted: false, complained: false, seq: 0 }
    }

    /// Judges a frame that is no HELLO.
    pub(super) fn judge(&mut self, own_epoch: u32, from: Peer) -> Verdict {
        if !self.greeted || from.epoch != self.epoch || from.receiver_epoch != own_epoch {
            return Verdict::Fenced;
        }
        if from.seq <= self.seq {
            return Verdict::Replayed;
        }
        let missing = from.seq - self.seq - 1;
        self.seq = from.seq;
        Verdict::Take { missing }
    }

    /// Judges a HELLO; one of a later life begins that life.
    pub(super) fn greet(&mut self, own_epoch: u32, from: Peer) -> Verdict {
        if from.epoch < self.epoch || !(from.receiver_epoch == 0 || from.receiver_epoch == own_epoch) {
            return Verdict::Fenced;
        }
        if self.greeted && from.epoch == self.epoch {
            return Verdict::Replayed;
        }
        *self = Self { greeted: true, seq: from.seq, ..Self::new(from.epoch) };
        Verdict::Take { missing: 0 }
    }

    /// Ends the present life: nothing of it counts any more.
    pub(super) fn end(&mut self) {
        self.greeted = false;
        self.epoch = self.epoch.saturating_add(1);
    }
}
