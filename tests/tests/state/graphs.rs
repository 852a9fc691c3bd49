//! Random graphs with variables, in loops and branches too, over several runs: beside the interpreter, from images, and by many callers.

use super::setup;
use crate::images;
use gristmill::interp::{self, Store, compare::allclose};
use gristmill::ir::Graph;
use gristmill::testing::{RandomOptions, nvrtc_or_left_out, random_graph};
use gristmill::{Compiled, Resources, Tensor, aot};
use gristmill_runtime::exec::{ExecOptions, Executor};

fn stateful(seed: u64) -> (Graph, Vec<Tensor>) {
    let sizes = RandomOptions {
        n_nodes: 4 + seed as usize % 16,
        allow_empty_axes: seed.is_multiple_of(7),
        n_variables: 1 + seed as usize % 3,
        initial_values: true,
        ..RandomOptions::default()
    };
    random_graph(seed, &sizes)
}

/// Bytes of all variables that were assigned, by name.
fn state(resources: &Resources) -> Vec<(String, Vec<u8>)> {
    let names = resources.names().into_iter();
    let values = names.filter_map(|(container, name)| {
        let value = resources.get(&container, &name).unwrap()?;
        Some((name, value.as_bytes().to_vec()))
    });
    values.collect()
}

/// True when all values are small enough to be compared after a few roundings.
fn are_moderate(tensors: &[Tensor]) -> bool {
    let mut values = tensors.iter().flat_map(Tensor::to_f64s);
    values.all(|x| x.abs() < 1e6)
}

fn assert_close(want: &Tensor, got: &Tensor, context: &str) {
    let close = allclose(want, got, 0.0, 0.0);
    assert!(close.scaled_err() < 1e-4, "{close} {context}");
}

/// Runs a model beside the interpreter, on the same inputs each time, until numbers grow too large. Gives the number of runs.
fn check(graph: &Graph, inputs: &[Tensor], model: &Compiled, how: &str) -> usize {
    let mut store = Store::new();
    for round in 0..4 {
        let context = format!("in run {round}, {how}\n{graph}");
        let want = interp::run_with_state(graph, inputs, &mut store).unwrap();
        if !are_moderate(&want) {
            return round;
        }
        let got = model.run_ordered(inputs).unwrap().into_tensors();
        want.iter()
            .zip(&got)
            .for_each(|(want, got)| assert_close(want, got, &context));
        for (container, name) in model.resources().names() {
            let got = model.resources().get(&container, &name).unwrap();
            if let (Some(want), Some(got)) = (store.get(&container, &name), got) {
                assert_close(want, &got, &format!("{name} {context}"));
            }
        }
    }
    4
}

/// Checks seeds on devices and at optimisation levels; gives the number of runs.
fn check_all(seeds: std::ops::Range<u64>, configured: &[(&str, u8)]) -> usize {
    let mut n_runs = 0;
    for seed in seeds {
        let (graph, inputs) = stateful(seed);
        for &(devices, level) in configured {
            let model = setup(devices, level).compile(&graph).unwrap();
            let how = format!("seed {seed} on {devices} at level {level}");
            n_runs += check(&graph, &inputs, &model, &how);
        }
    }
    n_runs
}

#[test]
fn runs_are_those_of_the_interpreter() {
    let n_runs = check_all(0..60, &[("cpu:1", 0), ("cpu:1", 2), ("cpu:2", 2)]);
    assert!(n_runs > 400, "{n_runs}");
}

#[test]
fn so_are_those_on_devices_with_memory_of_their_own() {
    if nvrtc_or_left_out("variables of random graphs on emulated GPUs").is_some() {
        let n_runs = check_all(0..16, &[("emu:1", 2), ("cpu:1,emu:1", 2)]);
        assert!(n_runs > 60, "{n_runs}");
    }
}

#[test]
fn an_image_gives_the_bits_of_the_compiler() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("model.gmx");
    for seed in 0..40 {
        let (graph, inputs) = stateful(seed);
        let setup = setup("cpu:1", 2);
        let model = setup.compile(&graph).unwrap();
        aot::write(&graph, &setup.options, &aot::Sizes::new(), &file).unwrap();
        let image = images::open(&file).unwrap();
        let own = ExecOptions::validated();
        let shapes: Vec<&[usize]> = inputs.iter().map(Tensor::shape).collect();
        let executor = Executor::new(image.program_for(&shapes).unwrap().clone(), &own).unwrap();
        for round in 0..3 {
            let want = model.run_ordered(&inputs).unwrap().into_tensors();
            let got = executor.run(&inputs).unwrap();
            let pairs = want.iter().zip(&got);
            let context = format!("seed {seed}, run {round}\n{graph}");
            for (want, got) in pairs {
                assert!(want.as_bytes() == got.as_bytes(), "{context}");
            }
            assert!(
                state(model.resources()) == state(&own.resources),
                "{context}"
            );
        }
    }
}

#[test]
fn eight_callers_leave_what_eight_runs_leave() {
    for seed in 0..20 {
        let (graph, inputs) = stateful(seed);
        let model = || setup("cpu:1", 2).compile(&graph).unwrap();
        let (alone, shared) = (model(), model());
        (0..8).for_each(|_| drop(alone.run_ordered(&inputs).unwrap()));
        std::thread::scope(|s| {
            for _ in 0..8 {
                s.spawn(|| drop(shared.run_ordered(&inputs).unwrap()));
            }
        });
        let (alone, shared) = (state(alone.resources()), state(shared.resources()));
        assert!(alone == shared, "seed {seed}\n{graph}");
    }
}
