//! The sockets to the ranks.

use std::collections::VecDeque;

use servekit_zmq::{Context, Error, Message, Socket, SocketKind};

use crate::router::frames::{Frames, patch_link};
use crate::wire::patch_request;

/// Messages that libzmq holds for one rank.
const SEND_HWM: i32 = 4096;
/// Requests that wait here, beyond that, for a rank that reads too slowly.
const BACKLOG: usize = 1024;

struct Rank {
    socket: Socket,
    seq: u64,
    /// Messages that the pipe did not take yet, in order. Aborts are let in beyond `BACKLOG`: there is at most one for
    /// each request.
    backlog: VecDeque<Frames>,
}

/// One bound socket a rank. Nothing here ever waits for a rank.
pub(super) struct RankSockets {
    epoch: u32,
    ranks: Vec<Rank>,
}

impl RankSockets {
    /// Binds the sockets of the life `epoch` of this process.
    pub(super) fn bind(context: &Context, addresses: &[String], epoch: u32) -> Result<Self, Error> {
        let bind = |address: &String| {
            let socket = context.socket(SocketKind::Push)?;
            socket.set_send_hwm(SEND_HWM)?;
            socket.bind(address)?;
            Ok(Rank { socket, seq: 0, backlog: VecDeque::new() })
        };
        Ok(Self { epoch, ranks: addresses.iter().map(bind).collect::<Result<_, _>>()? })
    }

    /// Sends a request with what the router decided; false if its rank is too far behind to take it.
    pub(super) fn request(
        &mut self,
        rank: usize,
        mut frames: Frames,
        attempt: u32,
        dispatch: u64,
        receiver_epoch: u32,
    ) -> Result<bool, Error> {
        let Some(known) = self.ranks.get_mut(rank) else { return Ok(false) };
        if known.backlog.len() >= BACKLOG {
            return Ok(false);
        }
        let Some(envelope) = frames.first_mut().map(Message::make_mut) else { return Ok(false) };
        known.seq += 1;
        patch_request(envelope, i32::try_from(rank).unwrap_or(-1), attempt, dispatch, receiver_epoch, known.seq);
        patch_link(envelope, self.epoch, receiver_epoch, known.seq);
        known.send(frames)?;
        Ok(true)
    }

    /// Sends a message of another kind.
    pub(super) fn message(&mut self, rank: usize, mut frames: Frames, receiver_epoch: u32) -> Result<(), Error> {
        let Some(known) = self.ranks.get_mut(rank) else { return Ok(()) };
        let Some(envelope) = frames.first_mut().map(Message::make_mut) else { return Ok(()) };
        known.seq += 1;
        patch_link(envelope, self.epoch, receiver_epoch, known.seq);
        known.send(frames)
    }

    /// Starts a rank's link anew: what waited for its last life is dropped, and the next frame is number 1.
    pub(super) fn restart(&mut self, rank: usize) {
        if let Some(known) = self.ranks.get_mut(rank) {
            known.backlog.clear();
            known.seq = 0;
        }
    }

    /// Drops what waits for a rank.
    pub(super) fn forget(&mut self, rank: usize) {
        if let Some(known) = self.ranks.get_mut(rank) {
            known.backlog.clear();
        }
    }

    /// Tries again to send what waits; returns whether something still does.
    pub(super) fn retry(&mut self) -> Result<bool, Error> {
        let mut waits = false;
        for rank in &mut self.ranks {
            waits |= !rank.drain()?;
        }
        Ok(waits)
    }

    /// Messages that wait for each rank.
    pub(super) fn backlogs(&self) -> impl Iterator<Item = usize> {
        self.ranks.iter().map(|rank| rank.backlog.len())
    }
}

impl Rank {
    fn send(&mut self, frames: Frames) -> Result<(), Error> {
        if self.backlog.is_empty() || self.drain()? {
            match self.socket.send(frames, true) {
                Ok(()) => {}
                Err((Error::Again, frames)) => self.backlog.push_back(frames),
                Err((error, _)) => return Err(error),
            }
        } else {
            self.backlog.push_back(frames);
        }
        Ok(())
    }

    /// Sends what waits as far as the pipe takes it; returns whether nothing waits any more.
    fn drain(&mut self) -> Result<bool, Error> {
        while let Some(frames) = self.backlog.pop_front() {
            match self.socket.send(frames, true) {
                Ok(()) => {}
                Err((Error::Again, frames)) => {
                    self.backlog.push_front(frames);
                    return Ok(false);
                }
                Err((error, _)) => return Err(error),
            }
        }
        Ok(true)
    }
}
