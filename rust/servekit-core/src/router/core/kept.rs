//! Frames of requests that are at a rank, by reference, so that they could be sent to another one.

use std::collections::VecDeque;

use super::super::event::{Request, Share};
use super::{Core, Place};
use crate::wire::Rid;

/// From so many bytes on a request is large: it gives its frames up before any small one does.
const LARGE: usize = 16 << 10;
/// Entries of ended requests that a queue may hold beside those of live ones before it is swept.
const SLACK: usize = 1024;

/// A request's frames.
#[derive(Debug)]
pub(super) struct Kept<F> {
    frame: F,
    bytes: usize,
}

/// Whose frames are kept, oldest first, and how large they are together.
#[derive(Debug, Default)]
pub(super) struct Keeper {
    bytes: usize,
    large: VecDeque<Rid>,
    small: VecDeque<Rid>,
}

impl Keeper {
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Frames that were kept go.
    pub(super) fn release<F>(&mut self, kept: Option<Kept<F>>) {
        self.bytes -= kept.map_or(0, |kept| kept.bytes);
    }
}

impl<F: Share> Core<F> {
    /// Another reference to the frames of a request that is at a rank, if they are kept: it could be sent once more.
    pub fn kept_frame(&mut self, rid: Rid) -> Option<F> {
        match self.table.get_mut(&rid) {
            Some(Place::Rank { kept: Some(kept), .. }) => Some(kept.frame.share()),
            _ => None,
        }
    }

    /// Keeps a request's frames. To make room, the oldest large requests lose theirs, then the oldest small ones: they
    /// go on, and only can't be sent once more.
    pub(super) fn keep(&mut self, request: &mut Request<F>) -> Option<Kept<F>> {
        if request.bytes > self.config.resume_memory {
            self.counters.unresumable += 1;
            return None;
        }
        while self.keeper.bytes + request.bytes > self.config.resume_memory {
            let oldest = self.keeper.large.pop_front().or_else(|| self.keeper.small.pop_front())?;
            // One that has ended keeps nothing any more.
            if let Some(Place::Rank { kept, .. }) = self.table.get_mut(&oldest) {
                self.counters.unresumable += 1;
                self.keeper.release(kept.take());
            }
        }
        let live = self.table.len();
        let queue = if request.bytes >= LARGE { &mut self.keeper.large } else { &mut self.keeper.small };
        if queue.len() > 2 * live + SLACK {
            queue.retain(|rid| self.table.contains_key(rid));
        }
        queue.push_back(request.rid);
        self.keeper.bytes += request.bytes;
        Some(Kept { frame: request.frame.share(), bytes: request.bytes })
    }
}
