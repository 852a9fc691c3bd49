//! The portfolio: every algorithm proposes, one simulator judges, the best is refined, and a lower
//! bound says how far it can be from optimal.

use crate::bounds::{self, Bound};
use crate::memory::repair::{self, Key};
use crate::problem::Problem;
use crate::schedule::algorithms as algo;
use crate::schedule::list::Insertion;
use crate::schedule::previous::{self, Kept};
use crate::schedule::simulate::{LinkOrder, simulate};
use crate::schedule::timeline::Timeline;
use crate::schedule::{baechi, ranks, receive};
use crate::search::refine::{self, Budget, Move, Moves, refine_logged};
use crate::search::symmetry::{self, Reduced, distinct_devices};
use crate::search::{exact, fold, singles, slices};
use crate::{Bytes, Nanos};
use std::collections::BTreeMap;
use std::time::Instant;

/// A way to place tasks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Algorithm {
    /// Everything on one device.
    Single(u32),
    /// TensorFlow's simple placer.
    Simple,
    /// The white paper's greedy simulation.
    Greedy,
    /// HEFT with insertion.
    Heft,
    /// HEFT without insertion.
    HeftAppend,
    /// HEFT whose groups vote.
    HeftVote,
    /// HEFT with PEFT's look-ahead.
    Peft,
    /// ETF.
    Etf,
    /// Blocks between tasks that cut the graph, each solved by itself.
    Series,
    /// The problem folded at its groups.
    Fold,
    /// Slices of a line, by dynamic programming.
    Slices,
    /// Baechi's m-ETF.
    MEtf,
    /// Baechi's m-SCT.
    MSct,
    /// Devices filled one after another, each to this many percent of its memory limit.
    Fill(u8),
}

impl Algorithm {
    /// Names of all algorithms but the single devices, which are `single`.
    pub const NAMES: [(&'static str, Algorithm); 12] = [
        ("simple", Algorithm::Simple),
        ("greedy", Algorithm::Greedy),
        ("heft", Algorithm::Heft),
        ("heft-append", Algorithm::HeftAppend),
        ("heft-vote", Algorithm::HeftVote),
        ("peft", Algorithm::Peft),
        ("etf", Algorithm::Etf),
        ("series", Algorithm::Series),
        ("fold", Algorithm::Fold),
        ("slices", Algorithm::Slices),
        ("m-etf", Algorithm::MEtf),
        ("m-sct", Algorithm::MSct),
    ];

    /// Its name; single devices are told apart by their index.
    pub fn name(self) -> String {
        let named = Algorithm::NAMES
            .iter()
            .find(|(_, a)| *a == self)
            .map(|(name, _)| (*name).to_owned());
        named.unwrap_or_else(|| match self {
            Algorithm::Single(d) => format!("single {d}"),
            Algorithm::Fill(percent) => format!("fill {percent}%"),
            _ => format!("{self:?}"),
        })
    }

    /// Its proposal; `None` when it is one that keeps memory limits and finds no way to. Proposals
    /// without times of their own are simulated, longest remaining path first.
    pub fn run(self, p: &Problem, preference: &[usize]) -> Option<Timeline> {
        if let Some(device) = self.devices(p, preference) {
            return Some(simulated(p, &device));
        }
        match self {
            Algorithm::Greedy => Some(algo::greedy(p)),
            Algorithm::HeftAppend => Some(algo::heft(p, Insertion::Append)),
            Algorithm::Peft => Some(algo::peft(p)),
            Algorithm::Etf => Some(algo::etf(p)),
            Algorithm::Series => exact::series(p, SERIES_NODES)?.timeline,
            Algorithm::Fold => fold::place(p, Budget::of(FOLD_TASKS)),
            Algorithm::Slices => slices::place(p),
            Algorithm::MEtf => baechi::m_etf(p),
            Algorithm::MSct => baechi::m_sct(p),
            Algorithm::Heft => Some(algo::heft(p, Insertion::Gaps)),
            Algorithm::Single(_) | Algorithm::Simple | Algorithm::HeftVote | Algorithm::Fill(_) => {
                None
            }
        }
    }

    /// The devices of an algorithm that gives no times.
    fn devices(self, p: &Problem, preference: &[usize]) -> Option<Vec<u32>> {
        match self {
            Algorithm::Single(d) => Some(algo::single(p, d as usize)),
            Algorithm::Simple => Some(algo::simple(p, preference)),
            Algorithm::HeftVote => Some(algo::heft_by_vote(p)),
            Algorithm::Fill(percent) => Some(algo::fill(p, u128::from(percent))),
            _ => None,
        }
    }
}

/// A placement simulated, longest remaining path first.
fn simulated(p: &Problem, device: &[u32]) -> Timeline {
    let keys = ranks::keys_of(p, &ranks::placed_tails(p, device));
    simulate(p, device, &keys, LinkOrder::Urgent)
}

/// Effort and inputs of a solution.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// Only this algorithm, without refinement.
    pub only: Option<Algorithm>,
    /// Tasks that refinement may simulate.
    pub refine_tasks: u64,
    /// Nodes that the search for a lower bound may look at.
    pub bound_nodes: u64,
    /// Nodes that the search for an optimum may look at.
    pub search_nodes: u64,
    /// Seed of the refinement.
    pub seed: u64,
    /// Devices as the simple placer prefers them.
    pub preference: Vec<usize>,
    /// An earlier answer, on devices of this problem: the new one is never worse than that is now
    /// ([`previous::keep`]), and is that one where nothing better is found. Not for
    /// [`Options::only`].
    pub previous: Option<Timeline>,
    /// Time after which no further member proposes and no search goes on; the first member always
    /// proposes. Without one the answer depends on the problem alone.
    pub deadline: Option<Instant>,
}

/// Nodes that searches look at in a millisecond, by a cautious estimate: a deadline limits them.
const NODES_PER_MS: u64 = 20;

/// Tasks that refinement simulates unless told otherwise: with them a run on a thousand tasks takes
/// one to three seconds (`benches/NOTES.md`).
pub const REFINE_TASKS: u64 = 5_000_000;
/// Of small problems as many runs of the whole are enough.
const REFINE_RUNS: u64 = 20_000;
/// Of the smallest ones more, as long as they simulate no more tasks than this.
const REFINE_RUNS_SMALL: u64 = 60_000;
const REFINE_TASKS_SMALL: u64 = 3_000_000;
/// The same for problems above [`LARGE`], each of whose simulations takes long.
const REFINE_TASKS_LARGE: u64 = 500_000;
/// Tasks of the folded problem that are simulated; the default run gives it that part of its own.
const FOLD_TASKS: u64 = REFINE_TASKS / FOLD_SHARE;
const FOLD_SHARE: u64 = 4;
/// The descent after all searches may simulate the tasks of refinement divided by this.
const DESCENT_SHARE: u64 = 4;
/// A search that may simulate the whole fewer times than this finds nothing, and is left out.
const FEWEST_RUNS: u64 = 12;
/// Nodes that the search for a lower bound looks at unless told otherwise.
pub const BOUND_NODES: u64 = 10_000;
/// Nodes that the search for an optimum looks at unless told otherwise.
pub const SEARCH_NODES: u64 = 100_000;
/// Of problems of more tasks than this the search for an optimum looks at as many fewer as each
/// takes longer, which goes with the square of the tasks: refinement makes better use of the time.
const QUICK_TASKS: u64 = 24;
/// Under memory limits nodes are quick, and searches of small problems find answers that no other
/// member does: they may look at more, the more the fewer tasks.
const LIMITED_NODES: u64 = 200 * SEARCH_NODES;
const MOST_LIMITED_NODES: u64 = 8 * SEARCH_NODES;
/// Nodes that the search of blocks one after the other looks at; the default run gives it that part
/// of its own.
const SERIES_NODES: u64 = SEARCH_NODES / 10;

impl Options {
    /// The whole portfolio with refinement; the simple placer prefers accelerators, then low
    /// indices.
    pub fn new(p: &Problem) -> Options {
        let mut preference: Vec<usize> = (0..p.n_devices()).collect();
        preference.sort_by_key(|&d| (p.devices[d].is_host, d));
        Options {
            only: None,
            refine_tasks: refine_tasks(p),
            bound_nodes: BOUND_NODES,
            search_nodes: search_nodes(p),
            seed: 1,
            preference,
            previous: None,
            deadline: None,
        }
    }

    /// The budget of a search that gets one part of so many.
    fn budget(&self, n_parts: u64) -> Budget {
        Budget {
            tasks: self.refine_tasks / n_parts,
            seed: self.seed,
            deadline: self.deadline,
        }
    }

    fn is_late(&self) -> bool {
        self.deadline
            .is_some_and(|deadline| Instant::now() >= deadline)
    }

    /// As many of the nodes as can be looked at before the deadline.
    fn until_deadline(&self, nodes: u64) -> u64 {
        let Some(deadline) = self.deadline else {
            return nodes;
        };
        let left = deadline.saturating_duration_since(Instant::now());
        let left_ms = u64::try_from(left.as_millis()).unwrap_or(u64::MAX);
        nodes.min(left_ms.saturating_mul(NODES_PER_MS))
    }

    /// Devices that an answer may have to name: those of the earlier answer, and of the one
    /// algorithm.
    fn wanted_devices(&self) -> Vec<u32> {
        let mut wanted = self
            .previous
            .as_ref()
            .map_or(Vec::new(), |t| t.device.clone());
        if let Some(Algorithm::Single(d)) = self.only {
            wanted.push(d);
        }
        wanted.sort_unstable();
        wanted.dedup();
        wanted
    }

    /// The same for a problem of fewer devices.
    fn reduced(&self, reduced: &Reduced) -> Options {
        let index = |d: u32| reduced.index_of(d);
        let only = self.only.map(|only| match only {
            Algorithm::Single(d) => Algorithm::Single(index(d).unwrap_or_default()),
            other => other,
        });
        let preference = self
            .preference
            .iter()
            .filter_map(|&d| index(d as u32))
            .map(|d| d as usize);
        Options {
            only,
            preference: preference.collect(),
            previous: self.previous.as_ref().and_then(|t| reduced.contract(t)),
            ..self.clone()
        }
    }

    /// The same with budgets of so many percent.
    pub fn with_effort(self, percent: u64) -> Options {
        let part =
            |n: u64| u64::try_from(u128::from(n) * u128::from(percent) / 100).unwrap_or(u64::MAX);
        Options {
            refine_tasks: part(self.refine_tasks),
            bound_nodes: part(self.bound_nodes),
            search_nodes: part(self.search_nodes),
            ..self
        }
    }
}

/// Tasks that refinement simulates unless told otherwise.
fn refine_tasks(p: &Problem) -> u64 {
    if p.n_tasks() > LARGE {
        return REFINE_TASKS_LARGE;
    }
    let n = p.n_tasks() as u64;
    let of_small = (REFINE_RUNS_SMALL * n).min(REFINE_TASKS_SMALL);
    REFINE_TASKS.min(of_small.max(REFINE_RUNS * n))
}

/// Nodes that the search for an optimum looks at unless told otherwise.
fn search_nodes(p: &Problem) -> u64 {
    if !p.is_limited() {
        return SEARCH_NODES;
    }
    (LIMITED_NODES / p.n_tasks().max(1) as u64).clamp(SEARCH_NODES, MOST_LIMITED_NODES)
}

/// A member of the portfolio and its result.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// Name of the algorithm.
    pub algorithm: String,
    /// Bytes over the memory limits, and the makespan.
    pub score: Key,
    /// Devices that run something.
    pub n_devices: usize,
}

/// A solved problem.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Solution {
    /// The best timeline.
    pub timeline: Timeline,
    /// Its score; bytes over the limits mean that no placement was found that keeps them.
    pub score: Key,
    /// Where it came from.
    pub algorithm: String,
    /// No placement is faster than this.
    pub lower_bound: Nanos,
    /// Name of that bound.
    pub bound: String,
    /// All that was tried.
    pub candidates: Vec<Candidate>,
    /// The last move of refinement for each group that it moved; empty where nothing was refined.
    pub moved: Vec<Option<Move>>,
}

/// Moves of refinement by the algorithm that it started from.
type MovesOf = BTreeMap<String, Moves>;

/// Problems of more tasks are not given to the slower list schedulers.
const SMALL: usize = 3_000;
/// Problems of more tasks get a smaller portfolio.
const LARGE: usize = 20_000;
/// Starts that refinement tries before it settles on one, and how many ninths of its budget it
/// gives them: more of both for small problems, where long searches from one start end near where
/// they begin.
const STARTS: (usize, u64) = (3, 3);
const SMALL_STARTS: (usize, u64) = (10, 6);

/// Places all tasks: the best of the portfolio, refined; of small problems the optimum, if a search
/// proves it.
///
/// Stops as soon as the best is proven to be optimal. `name` gives the names under which algorithms
/// are reported. Nothing when the one algorithm asked for finds no placement that keeps the limits.
pub fn solve(
    p: &Problem,
    options: &Options,
    name: &dyn Fn(Algorithm) -> String,
) -> Option<Solution> {
    match symmetry::reduced(p, &options.wanted_devices()) {
        Some(reduced) => solve_reduced(&reduced, options, name),
        None => solve_whole(p, options, name),
    }
}

/// Solves the problem without the devices that no schedule needs, and answers for the whole.
fn solve_reduced(
    reduced: &Reduced,
    options: &Options,
    name: &dyn Fn(Algorithm) -> String,
) -> Option<Solution> {
    let whole_name = |algorithm: Algorithm| match algorithm {
        Algorithm::Single(d) => name(Algorithm::Single(reduced.devices[d as usize] as u32)),
        other => name(other),
    };
    let mut solution = solve_whole(&reduced.problem, &options.reduced(reduced), &whole_name)?;
    solution.timeline = reduced.expand(solution.timeline);
    for moved in solution.moved.iter_mut().flatten() {
        moved.from = reduced.devices[moved.from as usize] as u32;
    }
    Some(solution)
}

fn solve_whole(
    p: &Problem,
    options: &Options,
    name: &dyn Fn(Algorithm) -> String,
) -> Option<Solution> {
    let asked = options.previous.as_ref().filter(|_| options.only.is_none());
    let mut run = Run {
        p,
        options,
        name,
        kept: asked.and_then(|t| previous::keep(p, t)),
        bound: quick_bound(p),
        proposals: Vec::new(),
        candidates: Vec::new(),
        moves: MovesOf::new(),
    };
    run.propose();
    match options.only {
        Some(_) => run.raise_bound(),
        None => run.search(),
    }
    run.finish()
}

/// A run of the portfolio.
struct Run<'a> {
    p: &'a Problem,
    options: &'a Options,
    name: &'a dyn Fn(Algorithm) -> String,
    /// The earlier answer.
    kept: Option<Kept>,
    bound: Bound,
    /// Proposals; in the end the best first.
    proposals: Vec<(Key, String, Timeline)>,
    candidates: Vec<Candidate>,
    moves: MovesOf,
}

impl Run<'_> {
    /// Lets all members propose, blocks one after the other first, until one is proven to be
    /// optimal.
    fn propose(&mut self) {
        let (p, options) = (self.p, self.options);
        // An exact one was searched around when it was found; another search would not be the same
        // as the one without it.
        if let Some(kept) = self.kept.as_ref().filter(|k| !k.is_exact) {
            self.offer(PREVIOUS.into(), kept.timeline.clone());
        }
        let wanted = options.only.is_none() && p.n_tasks() <= LARGE && p.n_devices() > 1;
        if wanted {
            self.propose_series();
        }
        for algorithm in members(p, options) {
            if self.is_optimal() || (options.is_late() && !self.proposals.is_empty()) {
                break;
            }
            if let Some(timeline) = self.proposal(algorithm) {
                self.offer((self.name)(algorithm), timeline);
            }
        }
        self.proposals.sort_by_key(rank);
    }

    /// Blocks one after the other.
    fn propose_series(&mut self) {
        let share = self.options.search_nodes / (SEARCH_NODES / SERIES_NODES);
        let nodes = self.options.until_deadline(for_devices(share, self.p));
        if nodes == 0 {
            return;
        }
        let Some(proof) = exact::series(self.p, nodes) else {
            return;
        };
        self.prove("series-blocks", proof.lower_bound);
        if let Some(timeline) = proof.timeline {
            self.offer((self.name)(Algorithm::Series), timeline);
        }
    }

    /// A member's proposal, if it has one. Of a large problem the same devices are simulated once.
    fn proposal(&self, algorithm: Algorithm) -> Option<Timeline> {
        let (p, options) = (self.p, self.options);
        if algorithm == Algorithm::Fold && options.only.is_none() {
            return fold::place(p, options.budget(FOLD_SHARE));
        }
        if p.n_tasks() > LARGE
            && let Some(device) = algorithm.devices(p, &options.preference)
        {
            let is_new = self.proposals.iter().all(|p| p.2.device != device);
            return is_new.then(|| simulated(p, &device));
        }
        algorithm.run(p, &options.preference)
    }

    /// Improves the best proposals, and proves optimality where it can.
    fn search(&mut self) {
        let (p, options) = (self.p, self.options);
        self.raise_bound();
        let can_refine = options.refine_tasks > FEWEST_RUNS * p.n_tasks() as u64;
        if can_refine && !self.is_done() {
            refine_best(
                p,
                &mut self.proposals,
                self.bound.value,
                options,
                &mut self.moves,
            );
        }
        self.search_tree();
        if can_refine && !self.is_done() {
            self.descend();
        }
    }

    /// Makes single moves from the best proposal as long as they help.
    fn descend(&mut self) {
        let Some((score, name, timeline)) = self.proposals.first_mut() else {
            return;
        };
        let start = name.strip_suffix(REFINED).unwrap_or(name).to_owned();
        let moves = self.moves.entry(start.clone()).or_default();
        let budget = self.options.budget(DESCENT_SHARE);
        let found = singles::descend(self.p, timeline, self.bound.value, budget, moves);
        let key = repair::key(self.p, &found);
        if key < *score {
            (*score, *name, *timeline) = (key, format!("{start}{REFINED}"), found);
        }
    }

    fn offer(&mut self, algorithm: String, timeline: Timeline) {
        let (score, n_devices) = (repair::key(self.p, &timeline), timeline.n_devices_used());
        self.candidates.push(Candidate {
            algorithm: algorithm.clone(),
            score,
            n_devices,
        });
        self.proposals.push((score, algorithm, timeline));
    }

    /// Takes a bound if it is greater.
    fn prove(&mut self, name: &'static str, value: Nanos) {
        if value > self.bound.value {
            self.bound = Bound { name, value };
        }
    }

    /// The bounds that take a search.
    fn raise_bound(&mut self) {
        let nodes = for_devices(self.options.bound_nodes, self.p);
        let nodes = self.options.until_deadline(nodes);
        if nodes > 0 && self.p.n_tasks() <= LARGE && !self.is_optimal() {
            bounds::blocks(self.p, nodes)
                .into_iter()
                .for_each(|b| self.prove(b.name, b.value));
        }
    }

    /// True when a search would find nothing better, or has no time to.
    fn is_done(&self) -> bool {
        self.is_optimal() || self.options.is_late()
    }

    fn is_optimal(&self) -> bool {
        self.proposals
            .iter()
            .any(|s| s.0 <= (Bytes::ZERO, self.bound.value))
    }

    /// Branch and bound from the best proposal.
    fn search_tree(&mut self) {
        let Some((score, _, timeline)) = self.proposals.first() else {
            return;
        };
        if *score <= (Bytes::ZERO, self.bound.value) {
            return;
        }
        let proof = exact::solve(
            self.p,
            timeline,
            self.bound.value,
            self.options
                .until_deadline(tree_nodes(self.p, self.options)),
        );
        if proof.lower_bound.is_finite() {
            self.prove("branch-and-bound", proof.lower_bound);
        }
        if let Some(better) = proof.timeline {
            self.proposals.insert(
                0,
                (
                    repair::key(self.p, &better),
                    "branch-and-bound".into(),
                    better,
                ),
            );
        }
    }

    fn finish(mut self) -> Option<Solution> {
        let (mut score, mut algorithm, mut timeline) = self.proposals.into_iter().next()?;
        if self.options.only.is_none() {
            timeline = receive::delay(self.p, timeline);
            score = repair::key(self.p, &timeline);
        }
        if let Some(k) = self.kept.filter(|k| k.key <= score) {
            (score, algorithm, timeline) = (k.key, PREVIOUS.into(), k.timeline);
        }
        let moved = algorithm
            .strip_suffix(REFINED)
            .and_then(|start| self.moves.remove(start))
            .unwrap_or_default()
            .last;
        let (lower_bound, bound) = (self.bound.value, self.bound.name.into());
        Some(Solution {
            timeline,
            score,
            algorithm,
            lower_bound,
            bound,
            candidates: self.candidates,
            moved,
        })
    }
}

/// The largest bound that the options have time for.
pub fn lower_bound(p: &Problem, options: &Options) -> Bound {
    if p.n_tasks() > LARGE {
        quick_bound(p)
    } else {
        bounds::best(p, for_devices(options.bound_nodes, p))
    }
}

/// A budget of nodes for more than four devices: each node takes so much longer.
fn for_devices(nodes: u64, p: &Problem) -> u64 {
    nodes.saturating_mul(4) / p.n_devices().max(4) as u64
}

/// Nodes of branch and bound. More tasks get fewer; under memory limits [`search_nodes`] already
/// reduced them once.
fn tree_nodes(p: &Problem, options: &Options) -> u64 {
    let n = (p.n_tasks() as u64).max(QUICK_TASKS);
    let part = |nodes: u64| nodes.saturating_mul(QUICK_TASKS) / n;
    if p.is_limited() {
        part(options.search_nodes)
    } else {
        part(part(options.search_nodes))
    }
}

/// The largest bound that takes no search.
fn quick_bound(p: &Problem) -> Bound {
    if p.n_tasks() > LARGE {
        bounds::quick(p)
    } else {
        bounds::best(p, 0)
    }
}

/// Order of proposals: least excess, least time, fewest devices.
fn rank(proposal: &(Key, String, Timeline)) -> (Key, usize) {
    (proposal.0, proposal.2.n_devices_used())
}

fn members(p: &Problem, options: &Options) -> Vec<Algorithm> {
    if let Some(only) = options.only {
        return vec![only];
    }
    let mut members: Vec<Algorithm> = distinct_devices(p)
        .into_iter()
        .map(Algorithm::Single)
        .collect();
    if p.is_limited() {
        members.extend([100, 90, 75, 50].map(Algorithm::Fill));
        if p.n_tasks() <= LARGE {
            members.extend([Algorithm::Slices, Algorithm::MEtf, Algorithm::MSct]);
        }
    }
    // On one device without a limit all orders take the same time.
    if p.n_devices() > 1 || p.is_limited() {
        members.extend([Algorithm::Simple, Algorithm::Heft, Algorithm::Greedy]);
        if p.n_tasks() <= LARGE {
            members.extend([
                Algorithm::Fold,
                Algorithm::Etf,
                Algorithm::Peft,
                Algorithm::HeftAppend,
                Algorithm::HeftVote,
            ]);
        }
        if p.n_tasks() <= SMALL && !p.is_limited() {
            members.extend([Algorithm::MEtf, Algorithm::MSct]);
        }
    }
    members
}

/// Refines the best few starts briefly, then the best of them for the rest of the budget. The best
/// comes first in the end.
fn refine_best(
    p: &Problem,
    proposals: &mut Vec<(Key, String, Timeline)>,
    lower_bound: Nanos,
    options: &Options,
    moves: &mut MovesOf,
) {
    let long = proposals[0].0 > (Bytes::ZERO, lower_bound);
    proposals.dedup_by(|a, b| a.2.device == b.2.device);
    let (most, ninths) = if p.n_tasks() <= refine::SMALL {
        SMALL_STARTS
    } else {
        STARTS
    };
    let n = if p.n_tasks() > LARGE {
        1
    } else {
        proposals.len().min(most)
    };
    let short = options.refine_tasks / (9 * n as u64) * ninths;
    for start in proposals.iter_mut().take(if long { n } else { 0 }) {
        let budget = Budget {
            tasks: short,
            ..options.budget(1)
        };
        improve(p, start, lower_bound, budget, moves);
    }
    proposals.sort_by_key(rank);
    if let Some(best) = proposals
        .first_mut()
        .filter(|b| b.0 > (Bytes::ZERO, lower_bound))
    {
        let budget = Budget {
            tasks: options.refine_tasks - short * n as u64,
            seed: options.seed.wrapping_add(1),
            deadline: options.deadline,
        };
        improve(p, best, lower_bound, budget, moves);
    }
}

/// Name of an earlier answer.
const PREVIOUS: &str = "previous";
/// Suffix of an algorithm's name after refinement.
const REFINED: &str = "+refine";

fn improve(
    p: &Problem,
    start: &mut (Key, String, Timeline),
    lower_bound: Nanos,
    budget: Budget,
    moves: &mut MovesOf,
) {
    let name = start.1.strip_suffix(REFINED).unwrap_or(&start.1).to_owned();
    let moves = moves.entry(name.clone()).or_default();
    let refined = refine_logged(p, &start.2, lower_bound, budget, moves);
    let score = repair::key(p, &refined);
    if score < start.0 {
        *start = (score, format!("{name}{REFINED}"), refined);
    }
}
