//! Invariants of every answer, on random problems with all features that a problem may have. The
//! numbers are those of the placer's list of invariants:
//!
//! 1 each task is on one device that can run it; 2 groups are on one device; 3 pins hold; 4 the
//! same problem gives the same answer; 5 timelines are valid; 6 no bound is above an answer, and a
//! proven optimum is between; 7 the answer is no worse than any member of the portfolio; 8
//! refinement makes nothing worse; 9 delta simulation is full simulation; 10 peaks keep the limits,
//! or the answer says that they do not; 11 one transfer per tensor and destination, and no bytes
//! but theirs; 14 late transfers neither lengthen anything nor raise a peak; 15 a device more, or
//! more bandwidth, makes nothing worse when the search starts from the old answer; 16 all times `k`
//! times as long make everything `k` times as long; 17 names do not matter, as far as ties let
//! them; 18 an answer placed again is that answer; 19 and nothing is adopted; 20 ordering edges of
//! no bytes hold across devices.
//!
//! Of graphs: 3 and 10 with their errors in `place/resolve/tests.rs` and
//! `tests/tests/placement.rs`, 11 to 13 and 20 in `partition/tests.rs` and
//! `tests/tests/multi_device.rs`.
//!
//! `GRISTMILL_FUZZ_ROUNDS` multiplies the number of problems tried.

use crate::memory::repair;
use crate::rng::Rng;
use crate::samples::{self, Shape};
use crate::schedule::{algorithms, list, ranks, receive};
use crate::search::portfolio::{self, Algorithm, Options, Solution};
use crate::search::refine::{self, Budget, refine};
use crate::search::{exact, singles};
use crate::{
    Bytes, Device, Limits, LinkOrder, LinkProfile, Links, Nanos, Parts, Payload, Problem,
    Simulator, Task, Tensor, Timeline, bounds, check, simulate,
};
use std::collections::BTreeSet;

/// A problem with its answer.
struct Case {
    what: String,
    parts: Parts,
    p: Problem,
    options: Options,
    solution: Solution,
}

fn rounds(usual: u64) -> u64 {
    let times = std::env::var("GRISTMILL_FUZZ_ROUNDS")
        .map_or(1, |n| n.parse().expect("GRISTMILL_FUZZ_ROUNDS is a number"));
    usual * times
}

fn options(p: &Problem) -> Options {
    Options {
        refine_tasks: 1_500,
        bound_nodes: 200,
        search_nodes: 300,
        ..Options::new(p)
    }
}

fn answer(p: &Problem, options: &Options) -> Solution {
    portfolio::solve(p, options, &Algorithm::name).expect("the whole portfolio proposes something")
}

/// Random cases, each with the generator that made it.
fn cases(
    first: u64,
    usual: u64,
    shape: impl Fn(&mut Rng) -> Shape,
) -> impl Iterator<Item = (Case, Rng)> {
    (first..first + rounds(usual)).map(move |seed| {
        let mut rng = Rng(seed);
        let shape = shape(&mut rng);
        let parts = samples::parts(&mut rng, shape);
        let p = Problem::new(parts.clone()).expect("a group can be on its home");
        let (options, what) = (options(&p), format!("seed {seed}, {shape:?}"));
        let solution = answer(&p, &options);
        (
            Case {
                what,
                parts,
                p,
                options,
                solution,
            },
            rng,
        )
    })
}

fn any(rng: &mut Rng) -> Shape {
    Shape::any(rng, 20, 4)
}

fn expect_valid(p: &Problem, timeline: &Timeline, what: &str) {
    let wrong = check::check(p, timeline);
    assert!(wrong.is_empty(), "{what}: {wrong:?}\n{p:?}");
}

/// A random device for each group.
pub(crate) fn random_devices(rng: &mut Rng, p: &Problem) -> Vec<u32> {
    let mut device = vec![0; p.n_tasks()];
    for group in 0..p.n_groups() {
        let open: Vec<usize> = p.feasible(p.members.row(group)[0] as usize).collect();
        let d = rng.pick(&open) as u32;
        p.members
            .row(group)
            .iter()
            .for_each(|&t| device[t as usize] = d);
    }
    device
}

#[test]
fn answers_are_valid_and_say_what_they_are() {
    for (c, _) in cases(1_000, 80, any) {
        let (t, what) = (&c.solution.timeline, c.what.as_str());
        expect_valid(&c.p, t, what);
        let device = |i: usize| t.device[i] as usize;
        for (i, task) in c.parts.tasks.iter().enumerate() {
            assert!(task.cost[device(i)].is_finite(), "1, 3: {what}: task {i}");
            let same = |o: &&Task| o.group.is_some() && o.group == task.group;
            let others = c.parts.tasks.iter().enumerate().filter(|(_, o)| same(o));
            assert!(
                others.into_iter().all(|(o, _)| device(o) == device(i)),
                "2: {what}: task {i}"
            );
        }
        let crossing: BTreeSet<(usize, usize)> = (c.parts.tensors.iter().enumerate())
            .flat_map(|(x, (_, consumers))| consumers.iter().map(move |&u| (x, u as usize)))
            .filter(|&(x, u)| device(c.parts.tensors[x].0.producer as usize) != device(u))
            .map(|(x, u)| (x, device(u)))
            .collect();
        let moved: Bytes = crossing
            .iter()
            .map(|&(x, _)| c.parts.tensors[x].0.bytes())
            .sum();
        assert_eq!(
            (t.transfers.len(), t.bytes_moved(&c.p)),
            (crossing.len(), moved),
            "11: {what}"
        );
        for (tensor, consumers) in c
            .parts
            .tensors
            .iter()
            .filter(|(tensor, _)| tensor.bytes() == Bytes::ZERO)
        {
            let end = t.end[tensor.producer as usize];
            assert!(
                consumers.iter().all(|&u| t.start[u as usize] >= end),
                "20: {what}"
            );
        }
        let over =
            |(peak, d): (Bytes, &Device)| d.memory.map_or(Bytes::ZERO, |m| peak.saturating_sub(m));
        let excess: Bytes = t
            .peak_bytes(&c.p)
            .into_iter()
            .zip(&c.p.devices)
            .map(over)
            .sum();
        assert_eq!(c.solution.score, (excess, t.makespan), "10: {what}");
        assert!(
            excess > Bytes::ZERO || repair::unfit(&c.p).is_none(),
            "10: {what}: proven not to fit, but it does"
        );
    }
}

#[test]
fn the_same_problem_gives_the_same_answer_on_every_thread() {
    for (c, _) in cases(2_000, 20, any) {
        let again = std::thread::scope(|s| {
            s.spawn(|| answer(&c.p, &c.options))
                .join()
                .expect("solving does not panic")
        });
        assert_eq!(again, c.solution, "4: {}", c.what);
    }
}

#[test]
fn bounds_are_below_and_members_above_the_answer() {
    let mut n_optimal = 0;
    for (c, _) in cases(3_000, 40, any) {
        let (s, what) = (&c.solution, c.what.as_str());
        let makespan = s.timeline.makespan;
        assert!(
            s.lower_bound <= makespan || s.score.0 > Bytes::ZERO,
            "6: {what}: {}",
            s.bound
        );
        let mut free = c.parts.clone();
        free.devices.iter_mut().for_each(|d| d.memory = None);
        let free = Problem::new(free).expect("limits do not matter here");
        let problem = if s.score.0 > Bytes::ZERO { &free } else { &c.p };
        let bounds = bounds::all(problem)
            .into_iter()
            .chain(bounds::blocks(problem, 500))
            .chain([bounds::quick(problem)]);
        let greatest = bounds
            .inspect(|b| assert!(b.value <= makespan, "6: {what}: {b:?} {makespan}"))
            .map(|b| b.value)
            .max();
        if s.score.0 == Bytes::ZERO {
            let proof = exact::solve(&c.p, &s.timeline, greatest.unwrap_or_default(), 2_000);
            let best = proof.timeline.as_ref().map_or(makespan, |t| t.makespan);
            assert!(
                proof.lower_bound <= best && best <= makespan,
                "6: {what}: {proof:?}"
            );
            assert!(
                !proof.complete || greatest.is_none_or(|g| g <= best),
                "6: {what}: {proof:?}"
            );
            n_optimal += u32::from(proof.complete);
        }
        for (name, algorithm) in Algorithm::NAMES {
            let Some(timeline) = algorithm.run(&c.p, &c.options.preference) else {
                continue;
            };
            expect_valid(&c.p, &timeline, &format!("{what}: {name}"));
            // By itself that one searches with the budget of a whole run; as a member it is among
            // the candidates below.
            assert!(
                algorithm == Algorithm::Fold || s.score <= repair::key(&c.p, &timeline),
                "7: {what}: {name}"
            );
        }
        assert!(s.candidates.iter().all(|k| s.score <= k.score), "7: {what}");
    }
    assert!(n_optimal > 8, "only {n_optimal} answers are proven optimal");
}

#[test]
fn refinement_never_makes_worse() {
    for (c, mut rng) in cases(4_000, 40, any) {
        let device = random_devices(&mut rng, &c.p);
        let keys = ranks::keys_of(&c.p, &ranks::placed_tails(&c.p, &device));
        let start = simulate(&c.p, &device, &keys, LinkOrder::Urgent);
        let refined = refine(
            &c.p,
            &start,
            Nanos::ZERO,
            Budget {
                seed: 3,
                ..Budget::of(4_000)
            },
        );
        expect_valid(&c.p, &refined, &c.what);
        assert!(
            repair::key(&c.p, &refined) <= repair::key(&c.p, &start),
            "8: {}",
            c.what
        );
        let mut simulator = Simulator::new(&c.p, LinkOrder::Urgent);
        assert_eq!(
            simulator.run(&device, &keys, start.makespan),
            None,
            "{}",
            c.what
        );
        assert_eq!(
            simulator.run(&device, &keys, start.makespan + Nanos(1)),
            Some(start.makespan),
            "{}",
            c.what
        );
    }
}

#[test]
fn delta_simulation_is_full_simulation() {
    for seed in 5_000..5_000 + rounds(150) {
        let mut rng = Rng(seed);
        let shape = Shape::any(&mut rng, 30, 4);
        let p = samples::random(&mut rng, shape);
        let links = rng.pick(&[LinkOrder::Urgent, LinkOrder::Fifo]);
        let mut device = random_devices(&mut rng, &p);
        let mut keys: Vec<u64> = (0..p.n_tasks()).map(|_| rng.number(50)).collect();
        let mut simulator = Simulator::new(&p, links);
        let mut afresh = Simulator::new(&p, links);
        let is_patient = rng.one_in(2);
        simulator.set_patient(is_patient);
        afresh.set_patient(is_patient);
        simulator.run(&device, &keys, Nanos::INFINITY);
        for step in 0..10 {
            let changed = random_change(&mut rng, &p, &mut device, &mut keys);
            let makespan =
                simulator.rerun(&device, &keys, &changed, &Limits::below(Nanos::INFINITY));
            afresh.run(&device, &keys, Nanos::INFINITY);
            let full = afresh.timeline();
            let found = (makespan, simulator.timeline());
            assert_eq!(
                found,
                (Some(full.makespan), full.clone()),
                "9: seed {seed}, step {step}"
            );
            expect_valid(&p, &full, &format!("5: seed {seed}, step {step}"));
        }
    }
}

#[test]
fn a_run_is_given_up_only_when_it_takes_too_long() {
    let (mut n_given_up, mut n_finished) = (0, 0);
    for seed in 5_500..5_500 + rounds(200) {
        let mut rng = Rng(seed);
        let shape = Shape::any(&mut rng, 20, 4);
        let p = samples::random(&mut rng, shape);
        let (device, other) = (random_devices(&mut rng, &p), random_devices(&mut rng, &p));
        let keys: Vec<u64> = (0..p.n_tasks()).map(|_| rng.number(50)).collect();
        let mut simulator = Simulator::new(&p, LinkOrder::Urgent);
        simulator.run(&device, &keys, Nanos::INFINITY);
        let mut tails = Vec::new();
        simulator.placed_tails(&mut tails);
        assert_eq!(tails, ranks::placed_tails(&p, &device), "seed {seed}");
        let members = p.members.row(rng.below(p.n_groups()));
        let mut changed = device.clone();
        members
            .iter()
            .for_each(|&t| changed[t as usize] = other[t as usize]);
        let full = simulate(&p, &changed, &keys, LinkOrder::Urgent).makespan;
        let makespan = Nanos(1 + rng.number(2 * full.0 + 1));
        let limits = Limits {
            makespan,
            latest: &[],
            tails: &tails,
        };
        let found = simulator.rerun(&changed, &keys, members, &limits);
        assert_eq!(found, Some(full).filter(|f| *f < makespan), "seed {seed}");
        *(if found.is_some() {
            &mut n_finished
        } else {
            &mut n_given_up
        }) += 1;
    }
    assert!(
        n_given_up > 50 && n_finished > 50,
        "{n_given_up} given up, {n_finished} finished"
    );
}

#[test]
fn no_single_move_that_is_shown_is_left_in_the_end() {
    let (mut n_improved, mut n_rounds) = (0, 0);
    for (c, mut rng) in cases(5_800, 60, any) {
        let p = &c.p;
        let device = random_devices(&mut rng, p);
        let keys = ranks::keys_of(p, &ranks::placed_tails(p, &device));
        let start = simulate(p, &device, &keys, LinkOrder::Urgent);
        let mut moves = refine::Moves::default();
        let end = singles::descend(p, &start, Nanos::ZERO, Budget::of(u64::MAX), &mut moves);
        expect_valid(p, &end, &c.what);
        let score = repair::key(p, &end);
        assert!(score <= repair::key(p, &start), "{}", c.what);
        n_improved += u32::from(score < repair::key(p, &start));
        n_rounds += 1;
        let home = |t: &Timeline, g: usize| t.device[p.members.row(g)[0] as usize];
        assert!(
            (0..p.n_groups()).all(|g| home(&end, g) == home(&start, g) || moves.last[g].is_some())
        );
        let mut all = singles::Singles::new(p, &end);
        for g in singles::looked_at(p, &end).into_iter().map(|g| g as usize) {
            let others = p
                .feasible(p.members.row(g)[0] as usize)
                .filter(|&d| d != home(&end, g) as usize);
            for d in others {
                let run = all.moved(g, d, Nanos::INFINITY).expect("no limit");
                assert!(
                    repair::key(p, run.last_run()) >= score,
                    "{}: group {g} to {d}",
                    c.what
                );
            }
        }
    }
    assert!(
        2 * n_improved > n_rounds,
        "{n_improved} of {n_rounds} were improved"
    );
}

/// Moves some groups and changes a key now and then; gives the tasks that changed.
fn random_change(rng: &mut Rng, p: &Problem, device: &mut [u32], keys: &mut [u64]) -> Vec<u32> {
    let other = random_devices(rng, p);
    let mut changed: Vec<u32> = Vec::new();
    for group in (0..p.n_groups()).filter(|_| rng.one_in(8)) {
        let members = p.members.row(group);
        members
            .iter()
            .for_each(|&t| device[t as usize] = other[t as usize]);
        changed.extend(members);
    }
    if rng.one_in(3) {
        let t = rng.below(p.n_tasks());
        keys[t] = rng.number(50);
        changed.push(t as u32);
    }
    changed
}

#[test]
fn late_transfers_only_save_memory() {
    let (mut n_late, mut n_lower) = (0, 0);
    for (c, mut rng) in cases(10_000, 60, any) {
        let device = random_devices(&mut rng, &c.p);
        let keys = ranks::keys_of(&c.p, &ranks::placed_tails(&c.p, &device));
        for before in [
            simulate(&c.p, &device, &keys, LinkOrder::Urgent),
            algorithms::heft(&c.p, list::Insertion::Gaps),
        ] {
            let after = receive::delay(&c.p, before.clone());
            expect_valid(&c.p, &after, &c.what);
            assert_eq!(
                (&before.device, &before.start, &before.end),
                (&after.device, &after.start, &after.end),
                "14: {}",
                c.what
            );
            let (old, new) = (before.peak_bytes(&c.p), after.peak_bytes(&c.p));
            assert!(
                new.iter().zip(&old).all(|(n, o)| n <= o),
                "14: {}: {new:?} {old:?}",
                c.what
            );
            n_late += u32::from(before != after);
            n_lower += u32::from(new != old);
            assert!(
                before == after || new != old,
                "14: {}: delayed for nothing",
                c.what
            );
            assert_eq!(
                repair::key(&c.p, &after).1,
                before.makespan,
                "14: {}",
                c.what
            );
        }
    }
    assert!(
        n_late > 5 && n_lower > 5,
        "{n_late} delayed, {n_lower} lowered"
    );
}

/// The answer on a changed machine, begun from the old one.
fn from_old(c: &Case, parts: Parts) -> (Problem, Solution) {
    let p = Problem::new(parts).expect("the changed problem is one too");
    let warm = Options {
        previous: Some(c.solution.timeline.clone()),
        ..options(&p)
    };
    let solution = answer(&p, &warm);
    expect_valid(&p, &solution.timeline, &c.what);
    (p, solution)
}

#[test]
fn a_better_machine_is_never_worse() {
    let mut n_better = 0;
    for (c, mut rng) in cases(6_000, 40, any) {
        let mut more = c.parts.clone();
        let n = more.devices.len();
        let memory = more.devices[0].memory.filter(|_| rng.one_in(2));
        more.devices.push(Device {
            memory,
            is_host: false,
        });
        for task in &mut more.tasks {
            let like = rng.below(n);
            task.cost.push(if rng.one_in(8) {
                Nanos::INFINITY
            } else {
                task.cost[like]
            });
        }
        more.links = Links::uniform(
            n + 1,
            LinkProfile {
                latency: Nanos(3),
                bytes_per_second: 500_000_000,
            },
        );
        (0..n * n).for_each(|i| {
            more.links
                .set(i / n, i % n, c.parts.links.get(i / n, i % n))
        });
        let wide = from_old(&c, more).1;
        assert!(
            wide.score <= c.solution.score,
            "15: {}: a device more: {:?} {:?}",
            c.what,
            wide.score,
            c.solution.score
        );
        let mut fast = c.parts.clone();
        let (times, divided) = (1 + rng.number(3), 1 + rng.number(3));
        fast.links = fast.links.map(|l| LinkProfile {
            latency: Nanos(l.latency.0 / divided),
            bytes_per_second: l.bytes_per_second * times,
        });
        let fast = from_old(&c, fast).1;
        assert!(
            fast.score <= c.solution.score,
            "15: {}: faster links: {:?} {:?}",
            c.what,
            fast.score,
            c.solution.score
        );
        n_better +=
            u32::from(wide.score < c.solution.score) + u32::from(fast.score < c.solution.score);
    }
    assert!(n_better > 8, "only {n_better} machines were better");
}

#[test]
fn an_answer_placed_again_is_that_answer() {
    for (c, _) in cases(7_000, 40, any) {
        let (_, again) = from_old(&c, c.parts.clone());
        assert_eq!(again.timeline, c.solution.timeline, "18, 19: {}", c.what);
        assert_eq!(again.score, c.solution.score, "18, 19: {}", c.what);
    }
}

/// All times `k` times as long.
fn scaled(parts: &Parts, k: u64) -> Parts {
    let mut parts = parts.clone();
    let costs = parts.tasks.iter_mut().flat_map(|t| t.cost.iter_mut());
    costs.for_each(|c| *c = c.times(k));
    for (tensor, _) in &mut parts.tensors {
        if let Payload::HostCopy(time) = tensor.payload {
            tensor.payload = Payload::HostCopy(time.times(k));
        }
    }
    parts.links = parts.links.map(|l| LinkProfile {
        latency: l.latency.times(k),
        bytes_per_second: l.bytes_per_second / k,
    });
    parts
}

#[test]
fn times_that_are_longer_by_a_factor_make_all_longer_by_that_factor() {
    for (c, mut rng) in cases(8_000, 50, any) {
        let k = rng.pick(&[2, 5, 10, 1_000]);
        let p = Problem::new(scaled(&c.parts, k)).expect("a problem at another scale");
        for (before, after) in bounds::all(&c.p).into_iter().zip(bounds::all(&p)) {
            // The shares of unlike devices are searched for in whole ns, and there are `k` times as
            // many.
            if !["area", "memory", "energetic"].contains(&after.name) {
                assert_eq!(
                    before.value.times(k),
                    after.value,
                    "16: {}: times {k}: bound {}",
                    c.what,
                    after.name
                );
            }
        }
        for (name, algorithm) in Algorithm::NAMES {
            let makespan =
                |p: &Problem| algorithm.run(p, &c.options.preference).map(|t| t.makespan);
            let (before, after) = (makespan(&c.p), makespan(&p));
            assert_eq!(
                before.map(|m| m.times(k)),
                after,
                "16: {}: times {k}: {name}",
                c.what
            );
        }
        let slow = answer(&p, &c.options);
        assert_eq!(
            slow.timeline.makespan,
            c.solution.timeline.makespan.times(k),
            "16: {}: times {k}",
            c.what
        );
    }
}

/// The same problem with its tasks, tensors, groups, constants and devices in another order; and
/// the new index of each device.
fn relabelled(parts: &Parts, rng: &mut Rng) -> (Parts, Vec<usize>) {
    let mut shuffled = |n: usize| {
        let mut place: Vec<usize> = (0..n).collect();
        (1..n).rev().for_each(|i| place.swap(i, rng.below(i + 1)));
        place
    };
    let n = parts.devices.len();
    let (device, task) = (shuffled(n), shuffled(parts.tasks.len()));
    let (tensor, constant, group) = (
        shuffled(parts.tensors.len()),
        shuffled(parts.constants.len()),
        shuffled(64),
    );
    fn moved<T>(old: &[T], place: &[usize], with: impl Fn(&T) -> T) -> Vec<T> {
        let mut from = vec![0; place.len()];
        place.iter().enumerate().for_each(|(i, &p)| from[p] = i);
        from.iter().map(|&i| with(&old[i])).collect()
    }
    let mut links = Links::uniform(
        n,
        LinkProfile {
            latency: Nanos(0),
            bytes_per_second: 1,
        },
    );
    (0..n * n).for_each(|i| links.set(device[i / n], device[i % n], parts.links.get(i / n, i % n)));
    let parts = Parts {
        devices: moved(&parts.devices, &device, Device::clone),
        links,
        tasks: moved(&parts.tasks, &task, |t| Task {
            cost: moved(&t.cost, &device, |c| *c),
            constants: t
                .constants
                .iter()
                .map(|&c| constant[c as usize] as u32)
                .collect(),
            group: t.group.map(|g| group[g as usize] as u32),
            ..t.clone()
        }),
        tensors: moved(&parts.tensors, &tensor, |(x, consumers)| {
            let producer = task[x.producer as usize] as u32;
            (
                Tensor { producer, ..*x },
                consumers.iter().map(|&c| task[c as usize] as u32).collect(),
            )
        }),
        constants: moved(&parts.constants, &constant, |c| *c),
    };
    (parts, device)
}

/// Where two choices are equal the first index decides, so an answer of a search that did not end
/// can depend on names. Bounds, optima and the best single device cannot, and bounds of one problem
/// are below the answers of the other.
#[test]
fn names_do_not_matter_but_in_ties() {
    let mut n_optimal = 0;
    for (c, mut rng) in cases(9_000, 60, any) {
        let (parts, device) = relabelled(&c.parts, &mut rng);
        let p = Problem::new(parts).expect("the same problem");
        for (a, b) in bounds::all(&c.p).into_iter().zip(bounds::all(&p)) {
            // The shares of unlike devices are searched for task by task.
            assert!(
                a == b || ["area", "memory", "energetic"].contains(&a.name),
                "17: {}: {a:?} {b:?}",
                c.what
            );
        }
        let mut preference = c.options.preference.clone();
        preference.iter_mut().for_each(|d| *d = device[*d]);
        let other = answer(
            &p,
            &Options {
                preference,
                ..c.options.clone()
            },
        );
        let is_optimal = |s: &Solution| s.score == (Bytes::ZERO, s.lower_bound);
        let fit = [&c.solution, &other]
            .iter()
            .all(|s| s.score.0 == Bytes::ZERO);
        assert!(
            !fit || c.solution.lower_bound <= other.timeline.makespan,
            "17: {}",
            c.what
        );
        assert!(
            !fit || other.lower_bound <= c.solution.timeline.makespan,
            "17: {}",
            c.what
        );
        if is_optimal(&c.solution) && is_optimal(&other) {
            assert_eq!(c.solution.score, other.score, "17: {}", c.what);
            n_optimal += 1;
        }
    }
    assert!(n_optimal > 20, "only {n_optimal} pairs are optimal");
}

/// Without ties list schedulers give the same makespan whatever the names. Tasks have one operand:
/// of several the first index goes over a link first. The white paper's greedy, Baechi's and slices
/// are left out: they take tasks that are ready at one time, as all are at the start, by index.
#[test]
fn names_do_not_matter_without_ties() {
    const LISTS: [&str; 6] = ["simple", "heft", "heft-append", "heft-vote", "peft", "etf"];
    for seed in 9_500..9_500 + rounds(60) {
        let mut rng = Rng(seed);
        let mut parts = samples::parts(
            &mut rng,
            Shape {
                most: 1 << 40,
                ..Shape::small(12, 3)
            },
        );
        parts
            .tasks
            .iter_mut()
            .flat_map(|t| t.cost.iter_mut())
            .for_each(|c| *c = Nanos(rng.number(1 << 40)));
        (0..9).for_each(|i| {
            let link = LinkProfile {
                latency: Nanos(rng.number(1 << 38)),
                bytes_per_second: 1 << 30,
            };
            parts.links.set(i / 3, i % 3, link);
        });
        let mut seen = BTreeSet::new();
        parts
            .tensors
            .iter_mut()
            .for_each(|(_, consumers)| consumers.retain(|&c| seen.insert(c)));
        let (other, device) = relabelled(&parts, &mut rng);
        let [p, other] = [parts, other].map(|parts| Problem::new(parts).expect("the same problem"));
        let preference: Vec<usize> = (0..3).collect();
        for (name, algorithm) in Algorithm::NAMES
            .into_iter()
            .filter(|(name, _)| LISTS.contains(name))
        {
            let makespan = |p: &Problem, preference: &[usize]| {
                algorithm.run(p, preference).map(|t| t.makespan)
            };
            let (a, b) = (makespan(&p, &preference), makespan(&other, &device));
            assert_eq!(a, b, "17: seed {seed}: {name}");
        }
    }
}
