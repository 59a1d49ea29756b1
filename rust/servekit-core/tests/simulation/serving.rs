//! Ranks that serve as a model does, in virtual time: what a choice of ranks costs the clients.
//!
//! A step takes a while for itself, for each prompt token and for each running request; a prompt is computed in pieces;
//! finished prefixes stay in a cache that forgets what was used longest ago. The dispatcher hears of all that as it does
//! in a server: by reports, some time later.

use std::collections::{BTreeMap, HashMap, VecDeque};

use servekit_core::dispatch::{CHUNK, DispatchError, DpBudget, LoadBalanceMethod, Prompt, Report};

use super::random::Random;
use super::world::MS;

/// A step without work, each prompt token in it, and each request that gets a token.
const STEP: u64 = 8 * MS;
const PER_TOKEN: u64 = 40_000;
const PER_ROW: u64 = 50_000;
/// Prompt tokens in a step, and requests that run at once.
const PIECE: u64 = 512;
const RUNNING: usize = 32;
/// Prefixes that a rank has room for: as many tokens as 64 requests of 1024.
const CACHED: usize = 64 * 1024 / CHUNK;

/// One request, before it is dispatched.
#[derive(Clone, Debug)]
pub(crate) struct Job {
    pub(crate) at: u64,
    pub(crate) tokens: u64,
    pub(crate) prefixes: Vec<u64>,
    pub(crate) output: u64,
    pub(crate) room: u64,
}

/// What the dispatcher knows, and when.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Serving {
    pub(crate) ranks: usize,
    /// Time from a step to its report's arrival.
    pub(crate) late: u64,
    /// Least time between two reports of a rank.
    pub(crate) every: u64,
    /// Whether ranks keep prefixes.
    pub(crate) caches: bool,
    /// From when to when rank 0 takes no requests.
    pub(crate) away: (u64, u64),
}

/// What became of all jobs.
#[derive(Clone, Debug, Default)]
pub(crate) struct Outcome {
    /// Times to the first token and to the last one, in ms.
    pub(crate) first: Vec<f64>,
    pub(crate) last: Vec<f64>,
    /// Requests of each rank.
    pub(crate) counts: Vec<u64>,
    /// Rank of each job.
    pub(crate) homes: Vec<usize>,
    /// Prompt tokens that were computed, and all.
    pub(crate) computed: u64,
    pub(crate) prompts: u64,
}

struct Run {
    job: usize,
    left: u64,
    output: u64,
    held: u64,
}

/// Prefixes by when they were used last.
#[derive(Default)]
struct Cache {
    used: HashMap<u64, u64>,
    oldest: BTreeMap<u64, u64>,
    clock: u64,
}

impl Cache {
    fn depth(&self, prefixes: &[u64]) -> usize {
        prefixes.iter().take_while(|prefix| self.used.contains_key(prefix)).count()
    }

    fn keep(&mut self, prefixes: &[u64]) {
        // The longest first: of a prompt, the end is forgotten before the beginning.
        for &prefix in prefixes.iter().rev() {
            self.clock += 1;
            if let Some(before) = self.used.insert(prefix, self.clock) {
                self.oldest.remove(&before);
            }
            self.oldest.insert(self.clock, prefix);
        }
        while self.used.len() > CACHED {
            if let Some((_, prefix)) = self.oldest.pop_first() {
                self.used.remove(&prefix);
            }
        }
    }
}

#[derive(Default)]
struct Rank {
    waiting: VecDeque<usize>,
    running: Vec<Run>,
    cache: Cache,
    last_dispatch: u64,
    busy: bool,
    reported: u64,
}

enum What {
    Arrive(usize),
    Step(usize),
    Report(usize, Report),
    Active(usize, bool),
}

/// Serves all jobs.
pub(crate) struct Model<'a> {
    serving: Serving,
    jobs: &'a [Job],
    budget: DpBudget,
    ranks: Vec<Rank>,
    /// What happens when, in the order of time and then of its coming up.
    queue: BTreeMap<(u64, u64), What>,
    orders: u64,
    outcome: Outcome,
}

impl<'a> Model<'a> {
    /// Serves `jobs`, in the order of their times, and says what became of them.
    pub(crate) fn serve(serving: Serving, method: LoadBalanceMethod, jobs: &'a [Job]) -> Outcome {
        let mut model = Model {
            serving,
            jobs,
            budget: DpBudget::new(serving.ranks),
            ranks: (0..serving.ranks).map(|_| Rank::default()).collect(),
            queue: BTreeMap::new(),
            orders: 0,
            outcome: Outcome { counts: vec![0; serving.ranks], ..Outcome::default() },
        };
        for (number, job) in jobs.iter().enumerate() {
            model.at(job.at, What::Arrive(number));
        }
        let (leaves, returns) = serving.away;
        if leaves < returns {
            model.at(leaves, What::Active(0, false));
            model.at(returns, What::Active(0, true));
        }
        while let Some(((now, _), what)) = model.queue.pop_first() {
            match what {
                What::Arrive(job) => model.arrive(now, job, method),
                What::Step(rank) => model.step(now, rank),
                What::Active(rank, active) => model.budget.set_active(rank, active),
                What::Report(rank, report) => {
                    model.budget.update(rank, report);
                }
            }
        }
        model.outcome
    }

    fn at(&mut self, at: u64, what: What) {
        self.orders += 1;
        self.queue.insert((at, self.orders), what);
    }

    fn arrive(&mut self, now: u64, number: usize, method: LoadBalanceMethod) {
        let job = &self.jobs[number];
        let prompt = Prompt { tokens: job.tokens, room: Some(job.room), prefixes: &job.prefixes };
        let chosen = match self.budget.dispatch(method, prompt) {
            // The room's rank is away: its client comes back with another room.
            Err(DispatchError::RankInactive(rank)) => {
                self.budget.dispatch(method, Prompt { room: Some(rank as u64 + 1), ..prompt })
            }
            chosen => chosen,
        };
        let chosen = chosen.expect("some ranks are active");
        self.outcome.counts[chosen.rank] += 1;
        self.outcome.homes.push(chosen.rank);
        self.outcome.prompts += job.tokens;
        let rank = &mut self.ranks[chosen.rank];
        rank.waiting.push_back(number);
        rank.last_dispatch = chosen.dispatch;
        if !std::mem::replace(&mut rank.busy, true) {
            self.begin(now, chosen.rank);
        }
    }

    /// Begins a step, whose work is decided now and is done at its end.
    fn begin(&mut self, now: u64, number: usize) {
        let rank = &mut self.ranks[number];
        while rank.running.len() < RUNNING {
            let Some(job) = rank.waiting.pop_front() else { break };
            let cached = if self.serving.caches { rank.cache.depth(&self.jobs[job].prefixes) * CHUNK } else { 0 };
            let (tokens, output) = (self.jobs[job].tokens, self.jobs[job].output);
            let left = tokens.saturating_sub(cached as u64).max(1);
            self.outcome.computed += left;
            rank.running.push(Run { job, left, output, held: tokens - left });
        }
        let prompts: u64 = rank.running.iter().map(|run| run.left).sum();
        let rows = rank.running.iter().filter(|run| run.left == 0).count() as u64;
        let time = STEP + PER_TOKEN * prompts.min(PIECE) + PER_ROW * rows;
        self.at(now + time, What::Step(number));
    }

    fn step(&mut self, now: u64, number: usize) {
        let (rank, jobs, outcome) = (&mut self.ranks[number], self.jobs, &mut self.outcome);
        let mut piece = PIECE;
        let since = |job: usize| (now - jobs[job].at) as f64 / MS as f64;
        rank.running.retain_mut(|run| {
            if run.left > 0 {
                let done = run.left.min(piece);
                piece -= done;
                (run.left, run.held) = (run.left - done, run.held + done);
                if run.left > 0 {
                    return true;
                }
                outcome.first.push(since(run.job));
                rank.cache.keep(&jobs[run.job].prefixes);
            }
            (run.output, run.held) = (run.output - 1, run.held + 1);
            if run.output == 0 {
                outcome.last.push(since(run.job));
            }
            run.output > 0
        });
        let idle = rank.running.is_empty() && rank.waiting.is_empty();
        if idle || now >= rank.reported + self.serving.every {
            rank.reported = now;
            let requests = (rank.running.len() + rank.waiting.len()) as u64;
            let waiting = rank.waiting.iter().map(|&job| jobs[job].tokens);
            let pending = rank.running.iter().map(|run| run.left).chain(waiting).sum();
            let held: u64 = rank.running.iter().map(|run| run.held).sum();
            let report = Report { last_dispatch: rank.last_dispatch, requests, tokens: held + pending, pending };
            self.at(now + self.serving.late, What::Report(number, report));
        }
        if idle {
            self.ranks[number].busy = false;
        } else {
            self.begin(now, number);
        }
    }
}

/// How long prompts and answers are, and what they share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lengths {
    /// All alike, nothing shared.
    Uniform,
    /// Most short, a few very long; nothing shared.
    Skewed,
    /// One of 200 beginnings of 1024 tokens, then 128 of their own.
    Shared,
}

/// Jobs that arrive at random, `rate` a second on average.
pub(crate) fn jobs(seed: u64, lengths: Lengths, rate: f64, count: usize) -> Vec<Job> {
    let mut random = Random::new(seed);
    let mut at = 0.0;
    let uniform = |random: &mut Random| (random.below(1 << 53) + 1) as f64 / (1_u64 << 53) as f64;
    (0..count)
        .map(|number| {
            at -= uniform(&mut random).ln() / rate * 1e9;
            let own = random.next();
            let (tokens, output, shared, family) = match lengths {
                Lengths::Uniform => (256, 64, 0, 0),
                Lengths::Skewed => {
                    // Pareto: the mean is near that of `Uniform`, one in a hundred is ten times as long.
                    let long = |random: &mut Random, least: f64, most: f64| {
                        (least / uniform(random).powf(0.8)).min(most) as u64
                    };
                    (long(&mut random, 64.0, 8192.0), long(&mut random, 16.0, 1024.0), 0, 0)
                }
                Lengths::Shared => (1024 + 128, 64, 1024 / CHUNK as u64, random.below(200)),
            };
            let chunk = |chunk| {
                let of = if chunk < shared { family } else { own };
                Random::new(of.wrapping_mul(31) ^ chunk).next()
            };
            let prefixes = (0..tokens / CHUNK as u64).map(chunk).collect();
            Job { at: at as u64, tokens, prefixes, output, room: number as u64 ^ own }
        })
        .collect()
}
