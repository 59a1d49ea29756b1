//! What workers, ranks and supervision do when something reaches them.

use servekit_core::dispatch::LoadBalanceMethod;
use servekit_core::router::{Event, Request, Side};
use servekit_core::wire::{Group, Rid, Route, TextOptions};

use super::bodies::{self, Row, token};
use super::peers::{Link, MAX_RUNNING, Rank, Verdict};
use super::world::{Chaos, Down, MS, Up, What, World};

/// A rank's step.
const STEP: u64 = 10 * MS;

impl World {
    // Workers

    /// A worker's client asks for tokens; sometimes for two choices of one prompt.
    pub(crate) fn ask(&mut self, number: usize) {
        if !self.workers[number].alive {
            return;
        }
        let prompt = self.random.between(1, 3000);
        let choices = if self.random.once_in(8) { 2 } else { 1 };
        let mut group = None;
        for index in 0..choices {
            let worker = &mut self.workers[number];
            worker.minted += 1;
            let rid = Rid::mint(number as u16, worker.epoch, worker.minted);
            worker.live.insert(rid);
            let id = *group.get_or_insert(rid.0);
            let limit = self.random.between(1, 12) as u32;
            self.ledger.ask(rid, limit, prompt);
            let ranks = self.ranks.len() as u64;
            let rank = if self.random.once_in(8) { self.random.below(ranks + 1) as i32 } else { -1 };
            let follow = self.method == LoadBalanceMethod::FollowBootstrapRoom;
            let room = (follow && !self.random.once_in(10)).then(|| self.random.next());
            let text = TextOptions {
                stops: if self.random.once_in(3) { vec!["abca".to_owned(), "ddd".to_owned()] } else { Vec::new() },
                ids: true,
                ..TextOptions::default()
            };
            let request = Request {
                rid,
                rank,
                tokens: prompt as u32,
                stream: !self.random.once_in(4),
                group: (choices > 1).then_some(Group { id, index, size: choices, prompt: 0 }),
                room,
                prefixes: self.prefixes(),
                text: if self.random.once_in(40) { Err("truncated".to_owned()) } else { Ok(text) },
                bytes: self.random.between(100, 40_000) as usize,
                frame: rid.0,
            };
            self.send_up(Side::Worker, number, Up::Request(request));
            if self.random.once_in(8) {
                let delay = self.random.below(100 * MS);
                self.after(delay, What::ClientGone { rid });
            }
        }
    }

    /// Names of the prefixes of a prompt: a few beginnings that many share.
    fn prefixes(&mut self) -> Vec<u64> {
        let (family, length) = (self.random.below(4), self.random.below(6));
        (0..length).map(|chunk| (family * 100 + chunk).wrapping_mul(0x9E37_79B9_7F4A_7C15)).collect()
    }

    pub(crate) fn at_worker(&mut self, route: Route, link: Link, message: Down) {
        let number = usize::from(route.worker);
        let worker = &mut self.workers[number];
        if !worker.alive || worker.epoch as u16 != route.epoch {
            return;
        }
        match worker.incoming.judge(worker.epoch, link, matches!(message, Down::Hello)) {
            Verdict::Drop => return,
            Verdict::Gap => {
                for rid in std::mem::take(&mut worker.live) {
                    self.send_up(Side::Worker, number, Up::Abort(rid));
                }
            }
            Verdict::Take => {}
        }
        match message {
            Down::Text(body) => {
                for row in bodies::text_rows(&body).into_iter().filter(|row| row.ended) {
                    self.workers[number].live.remove(&row.rid);
                }
            }
            Down::Ask(id) => self.send_up(Side::Worker, number, Up::Reply(id)),
            _ => {}
        }
    }

    // Ranks

    pub(crate) fn at_rank(&mut self, number: usize, link: Link, message: Down) {
        let rank = &mut self.ranks[number];
        if !rank.alive {
            return;
        }
        match rank.incoming.judge(rank.epoch, link, matches!(message, Down::Hello)) {
            Verdict::Drop => return,
            // What was lost may have been a request: a rank can't go on.
            Verdict::Gap => return self.kill(Side::Rank, number),
            Verdict::Take => {}
        }
        match message {
            Down::Request { rid, dispatch } => {
                let (limit, prompt) = self.ledger.size(rid);
                self.ranks[number].accept(rid, dispatch, limit, prompt);
            }
            Down::Abort(rid) => self.ranks[number].abort(rid),
            Down::Ask(id) => self.send_up(Side::Rank, number, Up::Reply(id)),
            Down::Hello | Down::Text(_) | Down::Answer => {}
        }
        self.wake(number);
    }

    fn wake(&mut self, number: usize) {
        let rank = &mut self.ranks[number];
        if rank.busy() && !rank.stepping {
            rank.stepping = true;
            let epoch = rank.epoch;
            self.after(STEP, What::Step { rank: number, epoch });
        }
    }

    pub(crate) fn step(&mut self, number: usize, epoch: u32) {
        let rank = &mut self.ranks[number];
        if !rank.alive || rank.epoch != epoch {
            return;
        }
        rank.stepping = false;
        let mut rows = rank.step(number, &mut self.random);
        if self.random.once_in(self.chaos.strays) {
            let worker = self.random.below(self.workers.len() as u64) as usize;
            if let Some(&rid) = self.workers[worker].live.iter().next()
                // One that is still on its way to control may yet come here, and then the row would be no stray.
                && self.ledger.rank(rid).is_some_and(|home| home != number)
            {
                let end = self.random.once_in(3).then_some("length");
                rows.push(Row { rid, tokens: vec![token(number, epoch, rid, 0)], end });
            }
        }
        let stale = self.random.once_in(self.chaos.stale);
        let (last_dispatch, load) = self.ranks[number].report(stale);
        let load = (!self.random.once_in(self.chaos.stale)).then_some(load);
        let body = (!rows.is_empty()).then(|| bodies::step(&rows));
        self.send_up(Side::Rank, number, Up::Batch { last_dispatch, load, body });
        self.wake(number);
    }

    // Supervision

    fn kill(&mut self, side: Side, number: usize) {
        let (alive, epoch) = match side {
            Side::Worker => {
                let worker = &mut self.workers[number];
                worker.live.clear();
                (&mut worker.alive, worker.epoch)
            }
            Side::Rank => {
                let rank = &mut self.ranks[number];
                (&mut rank.alive, rank.epoch)
            }
        };
        if !std::mem::take(alive) {
            return;
        }
        let told = self.random.between(MS, 50 * MS);
        self.after(told, What::Down { side, number, epoch });
        if !self.random.once_in(4) {
            // A new life may be heard of before supervision has told of the old one's end.
            let delay = self.random.between(MS, 100 * MS);
            self.after(delay, What::Start { side, number, epoch: epoch + 1 });
        }
    }

    fn start(&mut self, side: Side, number: usize, epoch: u32) {
        match side {
            Side::Worker => {
                let worker = &mut self.workers[number];
                (worker.epoch, worker.alive, worker.frozen_until, worker.seq) = (epoch, true, 0, 0);
                worker.incoming.meet(self.control);
            }
            Side::Rank => {
                self.ranks[number] = Rank::new(epoch, self.control);
                let delay = self.random.between(0, 20 * MS);
                self.after(delay, What::Ready { rank: number, epoch });
            }
        }
        self.send_up(side, number, Up::Hello);
    }

    pub(crate) fn supervise(&mut self, what: What) {
        match what {
            What::Kill { side, number } => self.kill(side, number),
            What::Start { side, number, epoch } => self.start(side, number, epoch),
            What::Freeze { side, number } => {
                let until = self.now + self.random.between(20 * MS, 2000 * MS);
                match side {
                    Side::Worker => self.workers[number].frozen_until = until,
                    Side::Rank => self.ranks[number].frozen_until = until,
                }
            }
            What::Down { side: Side::Worker, number: worker, epoch } => {
                self.tell(Event::WorkerDown { worker, epoch: Some(epoch) }, None);
            }
            What::Down { side: Side::Rank, number: rank, epoch } => self.rank_state(rank, epoch, false),
            What::Ready { rank, epoch } => {
                if self.ranks[rank].alive && self.ranks[rank].epoch == epoch {
                    self.rank_state(rank, epoch, true);
                }
            }
            What::RestartControl => {
                self.restart_core();
                let control = self.control;
                let ranks = self.ranks.iter().enumerate().map(|(i, rank)| (Side::Rank, i, rank.epoch));
                let workers = self.workers.iter().enumerate().map(|(i, worker)| (Side::Worker, i, worker.epoch));
                for (side, number, epoch) in ranks.chain(workers).collect::<Vec<_>>() {
                    let delay = self.random.between(MS, 30 * MS);
                    self.after(delay, What::MeetControl { side, number, epoch, control });
                }
            }
            What::MeetControl { side, number, epoch, control } => self.meet(side, number, epoch, control),
            _ => unreachable!("not supervision's"),
        }
    }

    fn rank_state(&mut self, rank: usize, epoch: u32, active: bool) {
        let max_running = MAX_RUNNING;
        let reason = "killed by signal 9".to_owned();
        self.tell(Event::RankState { rank, epoch: Some(epoch), active, reason, max_running }, None);
    }

    /// A process learns of a later life of the control process.
    fn meet(&mut self, side: Side, number: usize, epoch: u32, control: u32) {
        match side {
            Side::Worker => {
                let worker = &mut self.workers[number];
                if !worker.alive || worker.epoch != epoch || control != self.control {
                    return;
                }
                // Streams of a control process that is gone end here.
                worker.live.clear();
                worker.seq = 0;
                worker.incoming.meet(control);
            }
            Side::Rank => {
                let rank = &mut self.ranks[number];
                if !rank.alive || rank.epoch != epoch || control != self.control {
                    return;
                }
                rank.meet(control);
                self.after(10 * MS, What::Ready { rank: number, epoch });
            }
        }
        self.send_up(side, number, Up::Hello);
    }

    /// Nothing goes wrong any more, and every link says a last word: it shows what was lost before.
    pub(crate) fn settle(&mut self) {
        self.chaos = Chaos::NONE;
        for number in 0..self.ranks.len() {
            if self.ranks[number].alive {
                let everybody = vec![true; self.ranks.len()];
                self.send_up(Side::Rank, number, Up::Mask(everybody));
                let (last_dispatch, load) = self.ranks[number].report(false);
                self.send_up(Side::Rank, number, Up::Batch { last_dispatch, load: Some(load), body: None });
            }
        }
        for number in 0..self.workers.len() {
            if self.workers[number].alive {
                self.workers[number].minted += 1;
                let id = Rid::mint(number as u16, self.workers[number].epoch, self.workers[number].minted);
                self.send_up(Side::Worker, number, Up::Ask(id));
            }
        }
    }
}
