//! The links to the ranks.

use servekit_zmq::{Context, Error, Outlet, Source};

use super::remote::{Remote, RemoteRank};
use crate::router::frames::{Frames, patch_link};
use crate::wire::patch_request;

/// Messages that wait for a rank that reads too slowly before it gets no further request. Aborts and the like are taken
/// beyond that: there are at most a few for each request.
const WAITING: usize = 5120;

struct Rank {
    way: Way,
    seq: u64,
    /// Whether it is among those that are due.
    due: bool,
}

/// How a rank is reached.
enum Way {
    /// On this machine.
    Local(Outlet),
    /// On another one.
    Remote(RemoteRank),
}

impl Way {
    fn push<F: AsRef<[u8]>>(&mut self, frames: &[F], patch: impl FnOnce(&mut [u8])) {
        match self {
            Self::Local(outlet) => outlet.push(frames, patch),
            Self::Remote(rank) => rank.push(frames, patch),
        }
    }

    /// Sends what waits, as far as the rank takes it; whether there is more to do.
    fn flush(&mut self) -> bool {
        match self {
            Self::Local(outlet) => {
                outlet.flush();
                outlet.waiting() > 0 || outlet.source().is_some()
            }
            Self::Remote(rank) => {
                rank.flush();
                rank.waiting() > 0
            }
        }
    }

    fn waiting(&self) -> usize {
        match self {
            Self::Local(outlet) => outlet.waiting(),
            Self::Remote(rank) => rank.waiting(),
        }
    }

    fn clear(&mut self) {
        match self {
            Self::Local(outlet) => outlet.clear(),
            Self::Remote(rank) => rank.clear(),
        }
    }
}

/// One bound endpoint a rank. Nothing here ever waits for a rank.
pub(super) struct RankLinks {
    epoch: u32,
    ranks: Vec<Rank>,
    /// Ranks to which something is to be sent, or whose link is being made: few of hundreds.
    due: Vec<usize>,
}

impl RankLinks {
    /// Binds the endpoints of the life `epoch` of this process.
    pub(super) fn bind(addresses: &[String], epoch: u32) -> Result<Self, Error> {
        let bind = |address: &String| Ok(Rank { way: Way::Local(Outlet::bind(address)?), seq: 0, due: false });
        Ok(Self { epoch, ranks: addresses.iter().map(bind).collect::<Result<_, _>>()?, due: Vec::new() })
    }

    /// Serves ranks on other machines where they come in.
    pub(super) fn serve_remote(&mut self, context: &Context, remote: &Remote) -> Result<(), Error> {
        for (rank, listener) in &remote.ranks {
            if let Some(known) = self.ranks.get_mut(*rank) {
                known.way = Way::Remote(RemoteRank::bind(context, *listener, &remote.secret_key)?);
            }
        }
        Ok(())
    }

    /// Takes a request with what the router decided; false if its rank is too far behind to take it.
    pub(super) fn request(
        &mut self,
        rank: usize,
        frames: &Frames,
        attempt: u32,
        dispatch: u64,
        receiver_epoch: u32,
    ) -> bool {
        let Some(known) = self.ranks.get_mut(rank) else { return false };
        if known.way.waiting() >= WAITING {
            return false;
        }
        known.seq += 1;
        let (epoch, seq) = (self.epoch, known.seq);
        known.way.push(frames, |envelope| {
            patch_request(envelope, i32::try_from(rank).unwrap_or(-1), attempt, dispatch, receiver_epoch, seq);
            patch_link(envelope, epoch, receiver_epoch, seq);
        });
        self.is_due(rank);
        true
    }

    /// Takes a message of another kind.
    pub(super) fn message<F: AsRef<[u8]>>(&mut self, rank: usize, frames: &[F], receiver_epoch: u32) {
        let Some(known) = self.ranks.get_mut(rank) else { return };
        known.seq += 1;
        let (epoch, seq) = (self.epoch, known.seq);
        known.way.push(frames, |envelope| patch_link(envelope, epoch, receiver_epoch, seq));
        self.is_due(rank);
    }

    fn is_due(&mut self, rank: usize) {
        if let Some(known) = self.ranks.get_mut(rank)
            && !std::mem::replace(&mut known.due, true)
        {
            self.due.push(rank);
        }
    }

    /// Starts a rank's link anew: what waited for its last life is dropped, and the next frame is number 1.
    pub(super) fn restart(&mut self, rank: usize) {
        if let Some(known) = self.ranks.get_mut(rank) {
            known.way.clear();
            if let Way::Local(outlet) = &mut known.way {
                outlet.take_newer();
            }
            known.seq = 0;
        }
        self.is_due(rank);
    }

    /// Drops what waits for a rank.
    pub(super) fn forget(&mut self, rank: usize) {
        if let Some(known) = self.ranks.get_mut(rank) {
            known.way.clear();
        }
    }

    /// Sends what was taken, as far as the ranks take it.
    pub(super) fn flush(&mut self) {
        let ranks = &mut self.ranks;
        self.due.retain(|&rank| {
            let Some(known) = ranks.get_mut(rank) else { return false };
            known.due = known.way.flush();
            known.due
        });
    }

    /// What to wait for where something still waits. What waits for a rank elsewhere is tried again at the next turn.
    pub(super) fn sources(&self) -> impl Iterator<Item = Source<'_>> {
        self.due.iter().filter_map(|&rank| match &self.ranks.get(rank)?.way {
            Way::Local(outlet) => outlet.source(),
            Way::Remote(_) => None,
        })
    }

    /// Messages that wait for each rank.
    pub(super) fn backlogs(&self) -> impl Iterator<Item = usize> {
        self.ranks.iter().map(|rank| rank.way.waiting())
    }
}
