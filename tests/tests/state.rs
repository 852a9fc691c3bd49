//! Variables: their types, initial values, growth, and runs that fail.

mod graphs;
mod updates;

use super::multi_device::setup;
use crate::process::gristmill;
use gristmill::ir::{Dim, Graph, GraphBuilder, Op, ScalarOp};
use gristmill::testing::nvrtc_or_left_out;
use gristmill::{Compiled, DType, Tensor};
use gristmill_runtime::program::StepKind;

fn reals(values: &[f32]) -> Tensor {
    Tensor::from_slice(values, &[values.len()]).unwrap()
}

fn value(model: &Compiled, name: &str) -> Vec<f32> {
    let value = model
        .resources()
        .get("", name)
        .unwrap()
        .expect("it was assigned");
    value.as_slice::<f32>().to_vec()
}

/// A sum over all runs. The element at `at` of `x` is picked after the assignment; where `in_segments`, the number of elements of
/// `x` that are not zero is between the two.
fn counter(in_segments: bool) -> Graph {
    let mut b = GraphBuilder::new("counter");
    let x = b.input("x", DType::F32, [Dim::from("n")]);
    let at = b.input("at", DType::I64, [1]);
    let old = b.variable("sum", reals(&[10.0])).unwrap();
    let total = b
        .reduce(gristmill::ir::ReduceKind::Sum, x, &[0], true)
        .unwrap();
    let new = b.add_(old, total).unwrap();
    let mut picked = x;
    if in_segments {
        let count = Dim::from("count");
        let places = b
            .add1(
                Op::NonZero {
                    count: count.clone(),
                },
                &[x],
            )
            .unwrap();
        let places = b.reshape(places, [count]).unwrap();
        picked = b.add1(Op::Gather { axis: 0 }, &[x, places]).unwrap();
    }
    let new = b.assign_variable("sum", new).unwrap();
    let y = b.add1(Op::Gather { axis: 0 }, &[picked, at]).unwrap();
    b.output("y", y);
    b.output("sum", new);
    b.finish().unwrap()
}

fn run(model: &Compiled, x: &[f32], at: i64) -> gristmill::Result<Vec<f32>> {
    let at = Tensor::from_slice(&[at], &[1]).unwrap();
    let outputs = model.run([("x", reals(x)), ("at", at)])?;
    Ok(outputs["sum"].as_slice::<f32>().to_vec())
}

#[test]
fn a_run_that_fails_assigns_nothing() {
    let hosts = [(false, "cpu:1"), (true, "cpu:1"), (false, "cpu:2")];
    let emulated = [(false, "emu:1"), (true, "emu:1"), (false, "cpu:1,emu:1")];
    let has_compiler = nvrtc_or_left_out("variables of emulated GPUs").is_some();
    let emulated = emulated.into_iter().filter(|_| has_compiler);
    for (in_segments, devices) in hosts.into_iter().chain(emulated) {
        let graph = counter(in_segments);
        let parsed = Graph::parse(&graph.to_string()).unwrap();
        for graph in [graph, parsed] {
            let model = setup(devices, 2).compile(&graph).unwrap();
            assert_eq!(model.is_whole(), !in_segments);
            assert_eq!(
                run(&model, &[1.0, 2.0], 0).unwrap(),
                [13.0],
                "from the initial value"
            );
            run(&model, &[1.0, 2.0, 3.0], 7).unwrap_err();
            assert_eq!(value(&model, "sum"), [13.0], "in segments: {in_segments}");
            assert_eq!(run(&model, &[5.0], 0).unwrap(), [18.0]);
            assert_eq!(value(&model, "sum"), [18.0]);
            model.resources().reset("");
            assert_eq!(run(&model, &[1.0], 0).unwrap(), [11.0]);
        }
    }
}

#[test]
fn concurrent_runs_in_segments_lose_no_assignment() {
    let model = setup("cpu:1", 2).compile(&counter(true)).unwrap();
    std::thread::scope(|s| {
        for _ in 0..4 {
            s.spawn(|| (0..50).for_each(|_| drop(run(&model, &[1.0, 1.0], 0).unwrap())));
        }
    });
    assert_eq!(value(&model, "sum"), [410.0]);
}

#[test]
fn a_variable_may_grow_from_run_to_run() {
    let mut b = GraphBuilder::new("cache");
    let past = b.input("past", DType::Bool, [Dim::from("p")]);
    let x = b.input("x", DType::F32, [Dim::from(1), Dim::from(2)]);
    let cache = b
        .read_variable("cache", DType::F32, [Dim::from("p"), Dim::from(2)])
        .unwrap();
    let grown = b.concat(&[cache, x], 0).unwrap();
    let grown = b.assign_variable("cache", grown).unwrap();
    let y = b.map(ScalarOp::Neg, &[grown]).unwrap();
    b.output("y", y);
    b.output("past", past);
    let graph = b.finish().unwrap();
    let has_compiler = nvrtc_or_left_out("variables of emulated GPUs").is_some();
    for devices in ["cpu:1", "emu:1"]
        .iter()
        .take(1 + usize::from(has_compiler))
    {
        grow(&setup(devices, 2).compile(&graph).unwrap());
    }
}

fn grow(model: &Compiled) {
    let step = |p: usize, x: f32| {
        let past = Tensor::zeros(DType::Bool, &[p]).unwrap();
        let x = Tensor::from_slice(&[x, x], &[1, 2]).unwrap();
        model.run([("past", past), ("x", x)])
    };
    let empty = Tensor::zeros(DType::F32, &[0, 2]).unwrap();
    model.resources().set("", "cache", &empty).unwrap();
    for p in 0..6 {
        let y = step(p, p as f32).unwrap()["y"].clone();
        assert_eq!(y.shape(), [p + 1, 2]);
    }
    let error = step(3, 0.0).unwrap_err().to_string();
    assert!(
        error.contains("has the shape [6, 2], and is read as [3, 2]"),
        "{error}"
    );
    assert_eq!(value(model, "cache")[10..], [5.0, 5.0]);
}

#[test]
fn types_of_a_variable_that_cannot_meet_are_errors() {
    let error = |assigned: &[usize], dtype: DType, read: Vec<Dim>| {
        let mut b = GraphBuilder::new("types");
        let x = b.input("x", DType::F32, assigned.iter().copied());
        let old = b.read_variable("v", dtype, read).unwrap();
        let new = b.assign_variable("v", x).unwrap();
        b.output("old", old);
        b.output("new", new);
        let compiled = setup("cpu:1", 2).compile(&b.finish().unwrap());
        compiled.err().map(|e| e.to_string())
    };
    let other_dtype = error(&[4], DType::I64, vec![4.into()]).unwrap();
    assert!(
        other_dtype.contains("is f32[4] here, and i64[4] in node"),
        "{other_dtype}"
    );
    assert!(error(&[4], DType::F32, vec![5.into()]).is_some());
    assert!(error(&[4], DType::F32, vec![1.into(), 4.into()]).is_some());
    assert_eq!(error(&[4], DType::F32, vec![4.into()]), None);
}

#[test]
fn variables_are_set_on_the_command_line() {
    let folder = tempfile::tempdir().unwrap();
    let text = r#"graph "sum" {
  %0 = input "x": f32[2]
  %1: f32[2] = read_variable() {container = "", name = "sum", dtype = f32, shape = [2]} @ "/read"
  %2: f32[2] = add(%0, %1) @ "/add"
  %3: f32[2] = assign_variable(%2) {container = "", name = "sum"} @ "/assign"
  output "y" %3
}
"#;
    std::fs::write(folder.path().join("sum.ir"), text).unwrap();
    reals(&[1.0, 2.0])
        .to_npy(folder.path().join("x.npy"))
        .unwrap();
    reals(&[10.0, 20.0])
        .to_npy(folder.path().join("v.npy"))
        .unwrap();
    reals(&[10.0])
        .to_npy(folder.path().join("short.npy"))
        .unwrap();
    let run = |variable: &[&str]| {
        let args = ["run", "sum.ir", "--input", "x=x.npy"];
        gristmill(folder.path(), &[&args[..], variable].concat())
    };
    let set = run(&["--variable", "sum=v.npy"]);
    assert!(
        set.stdout.contains("[11.000000, 22.000000]"),
        "{}{}",
        set.stdout,
        set.stderr
    );
    let unset = run(&[]);
    assert_eq!(unset.code, Some(2));
    let hint = "(try: --variable NAME=FILE.npy or --state FILE.safetensors gives it a value)";
    assert!(unset.stderr.contains(hint), "{}", unset.stderr);
    for (flag, said) in [
        ("sun=v.npy", "\"sum\""),
        ("sum=short.npy", "expected f32[2], got f32[1]"),
        ("sum", "expected NAME=FILE.npy"),
    ] {
        let ended = run(&["--variable", flag]);
        assert_eq!(ended.code, Some(2), "{flag}");
        assert!(ended.stderr.contains(said), "{flag}: {}", ended.stderr);
    }
}

#[test]
fn variables_are_saved_and_come_back() {
    let folder = tempfile::tempdir().unwrap();
    let mut b = GraphBuilder::new("scoped");
    let x = b.input("x", DType::F32, [2]);
    let sum = b.variable("sum", reals(&[0.0, 0.0])).unwrap();
    let sum = b.add_(sum, x).unwrap();
    let sum = b.assign_variable("sum", sum).unwrap();
    b.output("y", sum);
    let graph = b.finish().unwrap();
    let scoped = graph.to_string().replace(
        "container = \"\", name = \"sum\"",
        "container = \"a\", name = \"b/sum\"",
    );
    std::fs::write(folder.path().join("sum.ir"), graph.to_string()).unwrap();
    std::fs::write(folder.path().join("scoped.ir"), scoped).unwrap();
    reals(&[1.0, 2.0])
        .to_npy(folder.path().join("x.npy"))
        .unwrap();
    let run = |model: &str, flags: &[&str]| {
        let args = ["run", model, "--input", "x=x.npy"];
        gristmill(folder.path(), &[&args[..], flags].concat())
    };
    let twice = ["--state", "s", "--save-state", "s"];
    for model in ["sum.ir", "scoped.ir"] {
        let first = run(model, &["--save-state", "s"]);
        assert_eq!(first.code, Some(0), "{}", first.stderr);
        let second = run(model, &twice);
        assert!(
            second.stdout.contains("[2.000000, 4.000000]"),
            "{}",
            second.stdout
        );
        assert_eq!(second.stderr, "");
        let third = run(model, &twice);
        assert!(
            third.stdout.contains("[3.000000, 6.000000]"),
            "{}",
            third.stdout
        );
    }
    // The file is that of the other model now.
    let other = run("sum.ir", &twice);
    assert_eq!(other.code, Some(2));
    let said = "s: unknown variable \"a/b/sum\"; known: sum";
    assert!(other.stderr.contains(said), "{}", other.stderr);

    let resources = gristmill::Resources::default();
    resources.load(folder.path().join("s")).unwrap();
    let value = resources.get("a", "b/sum").unwrap().unwrap();
    assert_eq!(value.as_slice::<f32>(), [3.0, 6.0]);
    resources.set("", "sum", &reals(&[1.0])).unwrap();
    resources.save(folder.path().join("s")).unwrap();
    let short = run("sum.ir", &twice);
    assert_eq!(short.code, Some(2));
    let nothing = gristmill::Resources::default();
    nothing.save(folder.path().join("s")).unwrap();
    let fresh = run("sum.ir", &twice);
    assert!(
        fresh.stdout.contains("[1.000000, 2.000000]"),
        "{}",
        fresh.stdout
    );
    assert_eq!(
        fresh.stderr,
        "s has no value for: sum; they keep their initial ones\n"
    );
    let wrong = gristmill::Resources::default();
    wrong.set("a", "b/sum", &Tensor::scalar(1i64)).unwrap();
    wrong.save(folder.path().join("s")).unwrap();
    let before = resources.get("a", "b/sum").unwrap();
    let e = resources.load(folder.path().join("s")).unwrap_err();
    assert!(e.to_string().contains("is f32, expected i64"), "{e}");
    assert_eq!(resources.get("a", "b/sum").unwrap(), before);
}

/// The sum of `x` and of `past`, the latter of `c` elements.
fn carrying() -> Graph {
    let mut b = GraphBuilder::new("carrying");
    let x = b.input("x", DType::F32, [1]);
    let past = b.input("past", DType::F32, [Dim::from("c")]);
    let present = b.add_(past, x).unwrap();
    let doubled = b.add_(present, present).unwrap();
    b.output("present", present);
    b.output("doubled", doubled);
    b.finish().unwrap()
}

#[test]
fn an_input_takes_what_an_output_gave() {
    let source = gristmill::Source::from(&carrying());
    let mut two = setup("cpu:1", 2);
    two.options.dims = [("c".to_owned(), 2)].into();
    let pair = |input: &str, output: &str| (input.to_owned(), output.to_owned());
    let kept = source
        .keeping(&[pair("past", "present")], &two.options.dims)
        .unwrap();
    let model = two.compile(kept).unwrap();
    for round in 1..4 {
        let outputs = model.run([("x", reals(&[3.0]))]).unwrap();
        let names: Vec<&str> = outputs.iter().map(|(name, _)| name).collect();
        assert_eq!(names, ["doubled"]);
        assert_eq!(
            outputs["doubled"].as_slice::<f32>(),
            [6.0 * round as f32; 2]
        );
        assert_eq!(value(&model, "past"), [3.0 * round as f32; 2]);
    }
    model.resources().reset("");
    assert_eq!(value(&model, "past"), [0.0; 2]);

    let again = source.keeping(&[pair("past", "present")], &two.options.dims);
    let text = match again.unwrap() {
        gristmill::Source::Graph(g) => g.to_string(),
        gristmill::Source::Onnx(_) => unreachable!("it is a graph"),
    };
    let clash = text.replace("input \"x\"", "input \"past\"");
    let clash = gristmill::Source::from(&Graph::parse(&clash).unwrap());
    let e = clash.keeping(&[pair("past", "doubled")], &two.options.dims);
    let e = e.err().expect("the name is taken").to_string();
    assert!(e.contains("the graph has a variable of that name"), "{e}");

    let error = |pairs: &[(String, String)], dims| {
        let kept = source.keeping(pairs, dims);
        kept.err().expect("it is refused").to_string()
    };
    let none = Default::default();
    for (pairs, dims, said) in [
        (
            vec![pair("pasd", "present")],
            &two.options.dims,
            "did you mean \"past\"?",
        ),
        (
            vec![pair("past", "y")],
            &two.options.dims,
            "unknown output \"y\"",
        ),
        (
            vec![pair("x", "present")],
            &two.options.dims,
            "input \"x\" is f32[1], output \"present\" is f32[c]",
        ),
        (
            vec![pair("past", "present")],
            &none,
            "(try: --set gives symbols a size)",
        ),
        (
            vec![pair("past", "present"), pair("past", "doubled")],
            &two.options.dims,
            "past=doubled: each is kept once",
        ),
    ] {
        let found = error(&pairs, dims);
        assert!(found.contains(said), "{found}");
    }
}

#[test]
fn kept_inputs_are_state_on_the_command_line() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("c.ir"), carrying().to_string()).unwrap();
    reals(&[1.0]).to_npy(folder.path().join("x.npy")).unwrap();
    let state = ["--state", "s", "--save-state", "s"];
    let model = ["--set", "c=2", "--keep", "past=present"];
    let run = |file: &str, flags: &[&[&str]]| {
        let words = [&["run", file, "--input", "x=x.npy"][..], &flags.concat()].concat();
        let ended = gristmill(folder.path(), &words);
        assert_eq!(ended.code, Some(0), "{}", ended.stderr);
        ended.stdout
    };
    run("c.ir", &[&model, &state[2..]]);
    let said = run("c.ir", &[&model, &state]);
    assert!(said.contains("[4.000000, 4.000000]"), "{said}");
    let image = ["compile", "c.ir", "-o", "c.gmx"];
    let made = gristmill(folder.path(), &[&image[..], &model].concat());
    assert_eq!(made.code, Some(0), "{}", made.stderr);
    let said = run("c.gmx", &[&state]);
    assert!(said.contains("[6.000000, 6.000000]"), "{said}");
    let wrong = ["run", "c.ir", "--keep", "past"];
    let ended = gristmill(folder.path(), &wrong);
    assert!(
        ended.stderr.contains("expected INPUT=OUTPUT"),
        "{}",
        ended.stderr
    );
}

#[test]
fn a_timeout_ends_runs_that_never_would() {
    let hostile = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("data/hostile");
    for verb in ["run", "bench"] {
        let args = [verb, "loop_without_end.onnx", "--timeout", "300ms"];
        let ended = gristmill(&hostile, &args);
        assert_eq!(ended.code, Some(5), "{verb}: {}", ended.stderr);
        assert!(ended.stderr.contains("--timeout"), "{}", ended.stderr);
    }
    let args = ["run", "loop_without_end.onnx", "--timeout", "soon"];
    assert_eq!(gristmill(&hostile, &args).code, Some(2));
}

/// Two averages of x, the second of the first, and an element of x that is picked by `at`; the pick reads `at` plus 0 times the first
/// average where `pick_is_last`. The second one's old value is an output where `shows_old`.
fn averages(pick_is_last: bool, shows_old: bool) -> Graph {
    let mut b = GraphBuilder::new("averages");
    let x = b.input("x", DType::F32, [4]);
    let at = b.input("at", DType::I64, [1]);
    let half = b.scalar(DType::F32, 0.5);
    let mut averaged = x;
    for name in ["first", "second"] {
        let old = b.variable(name, reals(&[1.0, 2.0, 3.0, 4.0])).unwrap();
        let difference = b.map(ScalarOp::Sub, &[averaged, old]).unwrap();
        let step = b.map(ScalarOp::Mul, &[difference, half]).unwrap();
        averaged = b.add_(old, step).unwrap();
        b.assign_variable(name, averaged).unwrap();
        if shows_old && name == "second" {
            b.output("old", old);
        }
    }
    let from = if pick_is_last { averaged } else { x };
    let y = b.add1(Op::Gather { axis: 0 }, &[from, at]).unwrap();
    b.output("y", y);
    b.finish().unwrap()
}

/// Names of the variables that are changed where they are.
fn changed_in_place(model: &Compiled) -> Vec<String> {
    let at = Tensor::from_slice(&[0i64], &[1]).unwrap();
    let executable = model.for_inputs(&[reals(&[0.0; 4]), at]).unwrap();
    let variables = executable.lowered.program.variables.iter();
    let changed = variables.filter(|v| v.in_place);
    changed.map(|v| v.name.clone()).collect()
}

#[test]
fn updates_are_written_over_old_values_when_nothing_can_fail_any_more() {
    for (pick_is_last, shows_old, expected) in [
        (false, false, vec!["first", "second"]),
        (false, true, vec!["first"]),
        // A pick from the second average, which the first one decides: both stay until the run has ended.
        (true, false, vec![]),
    ] {
        let graph = averages(pick_is_last, shows_old);
        let in_place = setup("cpu:1", 2).compile(&graph).unwrap();
        assert_eq!(changed_in_place(&in_place), expected, "{graph}");
        let mut apart = setup("cpu:1", 2);
        apart.options.updates_in_place = false;
        let apart = apart.compile(&graph).unwrap();
        assert_eq!(changed_in_place(&apart), [""; 0]);
        let run = |model: &Compiled, at: i64| {
            let at = Tensor::from_slice(&[at], &[1]).unwrap();
            let outputs = model.run([("x", reals(&[5.0, 6.0, 7.0, 8.0])), ("at", at)]);
            outputs.map(|o| o["y"].as_slice::<f32>().to_vec())
        };
        for round in 0..4 {
            let y = [&in_place, &apart].map(|model| run(model, round).unwrap());
            assert_eq!(y[0], y[1]);
            let held = ["first", "second"].map(|name| value(&in_place, name));
            let wanted = ["first", "second"].map(|name| value(&apart, name));
            assert_eq!(held, wanted);
            for model in [&in_place, &apart] {
                let error = run(model, 9).unwrap_err().to_string();
                assert!(error.contains("out of range"), "{error}");
            }
            let after = ["first", "second"].map(|name| value(&in_place, name));
            assert_eq!(after, held, "a run that fails has changed nothing");
        }
        assert_eq!(value(&in_place, "first"), [4.75, 5.75, 6.75, 7.75]);
    }
}

/// A step of an optimiser on one device, and a pick on another, which may fail after all else has ended: from the step's input, or from a
/// value of the first device.
fn update_beside_a_pick(is_joined: bool) -> Graph {
    let mut b = GraphBuilder::new("beside");
    let x = b.input("x", DType::F32, [4]);
    let at = b.input("at", DType::I64, [1]);
    let old = b.variable("v", reals(&[1.0, 2.0, 3.0, 4.0])).unwrap();
    let new = b.with_device("/cpu:0", |b| b.add_(old, x)).unwrap();
    b.assign_variable("v", new).unwrap();
    let from = match is_joined {
        true => b
            .with_device("/cpu:0", |b| b.map(ScalarOp::Neg, &[x]))
            .unwrap(),
        false => x,
    };
    let y = b.with_device("/cpu:1", |b| b.add1(Op::Gather { axis: 0 }, &[from, at]));
    b.output("y", y.unwrap());
    b.finish().unwrap()
}

/// The update waits for the pick, in place where the devices exchange values anyway.
#[test]
fn updates_wait_for_what_may_fail_on_another_device() {
    for (level, is_joined) in [(0, true), (2, true), (0, false), (2, false)] {
        let graph = update_beside_a_pick(is_joined);
        let model = setup("cpu:2", level).compile(&graph).unwrap();
        let expected: &[&str] = if is_joined { &["v"] } else { &[] };
        assert_eq!(changed_in_place(&model), expected);
        for (at, is_good) in [(3i64, true), (9, false), (0, true), (-9, false)] {
            let before = value(&model, "v");
            let at = Tensor::from_slice(&[at], &[1]).unwrap();
            let ran = model.run([("x", reals(&[1.0; 4])), ("at", at)]);
            assert_eq!(ran.is_ok(), is_good);
            let moved = f32::from(u8::from(is_good));
            let after: Vec<f32> = before.iter().map(|v| v + moved).collect();
            assert_eq!(value(&model, "v"), after);
        }
    }
}

/// A run that fails before its first step leaves values whole.
#[test]
fn a_run_that_cannot_begin_changes_nothing() {
    let mut b = GraphBuilder::new("two");
    let x = b.input("x", DType::F32, [4]);
    let v = b.variable("v", reals(&[1.0, 2.0, 3.0, 4.0])).unwrap();
    let w = b.read_variable("w", DType::F32, [4usize]).unwrap();
    let new = b.add_(v, x).unwrap();
    b.assign_variable("v", new).unwrap();
    b.output("w", w);
    let graph = b.finish().unwrap();
    for devices in ["cpu:1", "cpu:2"] {
        let model = setup(devices, 2).compile(&graph).unwrap();
        let run = || model.run([("x", reals(&[1.0; 4]))]);
        let set = |n: usize| {
            model
                .resources()
                .set("", "w", &reals(&vec![0.0; n]))
                .unwrap()
        };
        set(4);
        run().unwrap();
        set(2);
        run().unwrap_err();
        set(4);
        run().unwrap();
        assert_eq!(value(&model, "v"), [3.0, 4.0, 5.0, 6.0]);
    }
}

/// Two caches of six rows, into which rows of `x` are written at the same positions; and what a query sees of the first.
fn caches(is_nd: bool) -> Graph {
    let mut b = GraphBuilder::new("caches");
    let x = b.input("x", DType::F32, [2, 4]);
    let at = b.input("at", DType::I64, [2, 1]);
    for (name, factor) in [("keys", 1.0), ("values", 2.0)] {
        let cache = b
            .variable(name, Tensor::zeros(DType::F32, &[6, 4]).unwrap())
            .unwrap();
        let factor = b.scalar(DType::F32, factor);
        let rows = b.map(ScalarOp::Mul, &[x, factor]).unwrap();
        let kind = gristmill::ir::ScatterKind::Set;
        let (op, at) = match is_nd {
            true => (Op::ScatterNd { kind }, at),
            false => (
                Op::ScatterElements { axis: 0, kind },
                b.broadcast(at, [2, 4]).unwrap(),
            ),
        };
        let cache = b.add1(op, &[cache, at, rows]).unwrap();
        let cache = b.assign_variable(name, cache).unwrap();
        let seen = b
            .reduce(gristmill::ir::ReduceKind::Sum, cache, &[0], false)
            .unwrap();
        b.output(name, seen);
    }
    b.finish().unwrap()
}

/// The number of caches that a run copies.
fn copied(model: &Compiled) -> usize {
    let x = Tensor::zeros(DType::F32, &[2, 4]).unwrap();
    let at = Tensor::zeros(DType::I64, &[2, 1]).unwrap();
    let executable = model.for_inputs(&[x, at]).unwrap();
    let partition = &executable.lowered.program.partitions[0];
    let called = partition.steps.iter().filter_map(|step| match step.kind {
        StepKind::Kernel { kernel, .. } => Some(partition.kernels[kernel.0 as usize].name()),
        _ => None,
    });
    // The step before a scatter.
    called.filter(|name| name.ends_with("_0_copy")).count()
}

#[test]
fn rows_are_written_where_the_cache_is() {
    for (is_nd, level) in [(true, 2), (false, 2), (true, 0), (false, 0)] {
        let graph = caches(is_nd);
        let in_place = setup("cpu:1", level).compile(&graph).unwrap();
        let run = |model: &Compiled, x: f32, at: [i64; 2]| {
            let x = Tensor::from_slice(&[x; 8], &[2, 4]).unwrap();
            let at = Tensor::from_slice(&at, &[2, 1]).unwrap();
            let outputs = model.run([("x", x), ("at", at)])?;
            Ok::<_, gristmill::Error>(outputs["values"].as_slice::<f32>().to_vec())
        };
        let mut apart = setup("cpu:1", level);
        apart.options.updates_in_place = false;
        let apart = apart.compile(&graph).unwrap();
        assert_eq!((copied(&in_place), copied(&apart)), (0, 2), "{graph}");
        for (x, at) in [(1.0, [0, 1]), (2.0, [-1, 2]), (3.0, [3, 3]), (4.0, [1, 4])] {
            assert_eq!(run(&in_place, x, at).unwrap(), run(&apart, x, at).unwrap());
            for bad in [[0, 6], [-7, 0]] {
                let e = run(&in_place, 9.0, bad).unwrap_err().to_string();
                assert!(e.contains("out of range"), "{e}");
            }
            for name in ["keys", "values"] {
                assert_eq!(value(&in_place, name), value(&apart, name), "{is_nd}");
            }
        }
    }
}

/// Assignments that later ones replace, reads after them, and a swap: each variable gets the old value of the other.
#[test]
fn values_are_forwarded_and_old_ones_stay_until_the_end() {
    let mut b = GraphBuilder::new("swap");
    let x = b.input("x", DType::F32, [2]);
    let (v, w) = (
        b.variable("v", reals(&[1.0, 2.0])).unwrap(),
        b.variable("w", reals(&[3.0, 4.0])).unwrap(),
    );
    b.assign_variable("v", x).unwrap();
    let seen = b.read_variable("v", DType::F32, [2usize]).unwrap();
    b.output("seen", seen);
    b.assign_variable("v", w).unwrap();
    b.assign_variable("w", v).unwrap();
    let graph = b.finish().unwrap();
    for level in [0, 2] {
        for devices in ["cpu:1", "cpu:2"] {
            let model = setup(devices, level).compile(&graph).unwrap();
            for round in 0..3 {
                let outputs = model.run([("x", reals(&[7.0, 8.0]))]).unwrap();
                assert_eq!(outputs["seen"].as_slice::<f32>(), [7.0, 8.0]);
                let swapped = [vec![3.0, 4.0], vec![1.0, 2.0]];
                let [v, w] = ["v", "w"].map(|name| value(&model, name));
                assert_eq!([&v, &w], [&swapped[round % 2], &swapped[1 - round % 2]]);
            }
        }
    }
}

/// Adam's step (Kingma and Ba, arXiv:1412.6980, without the correction of bias) over a weight matrix, and one of a scaled gradient.
fn adam() -> Graph {
    let mut b = GraphBuilder::new("adam");
    let g = b.input("g", DType::F32, [8, 5]);
    let start = |x: f32| Tensor::from_slice(&[x; 40], &[8, 5]).unwrap();
    let map = |b: &mut GraphBuilder, op, x, y| b.map(op, &[x, y]).unwrap();
    let moved = |b: &mut GraphBuilder, from, to, by| {
        let by = b.scalar(DType::F32, by);
        let distance = map(b, ScalarOp::Sub, to, from);
        let step = map(b, ScalarOp::Mul, distance, by);
        b.add_(from, step).unwrap()
    };
    let [w, m, v] =
        [("w", 0.5), ("m", 0.0), ("v", 1.0)].map(|(name, x)| b.variable(name, start(x)).unwrap());
    let m = moved(&mut b, m, g, 0.1);
    let square = map(&mut b, ScalarOp::Mul, g, g);
    let v = moved(&mut b, v, square, 0.001);
    let root = b.map(ScalarOp::Sqrt, &[v]).unwrap();
    let direction = map(&mut b, ScalarOp::Div, m, root);
    let rate = b.scalar(DType::F32, 0.01);
    let step = map(&mut b, ScalarOp::Mul, direction, rate);
    let w = map(&mut b, ScalarOp::Sub, w, step);
    for (name, value) in [("w", w), ("m", m), ("v", v)] {
        b.assign_variable(name, value).unwrap();
    }
    b.output("w", w);
    b.finish().unwrap()
}

#[test]
fn a_step_of_an_optimiser_is_one_kernel() {
    let graph = adam();
    let one = setup("cpu:1", 2).compile(&graph).unwrap();
    let apart = setup("cpu:1", 0).compile(&graph).unwrap();
    let gradient = |round: i32| {
        let values: Vec<f32> = (0..40)
            .map(|i| ((i * 7 + round) % 11) as f32 - 5.0)
            .collect();
        Tensor::from_slice(&values, &[8, 5]).unwrap()
    };
    let executable = one.for_inputs(&[gradient(0)]).unwrap();
    let program = &executable.lowered.program;
    assert_eq!(program.partitions[0].kernels.len(), 1);
    assert!(program.variables.iter().all(|v| v.in_place));
    for round in 0..5 {
        let [a, b] = [&one, &apart].map(|model| {
            model.run([("g", gradient(round))]).unwrap();
            ["w", "m", "v"].map(|name| value(model, name))
        });
        for (x, y) in a.iter().flatten().zip(b.iter().flatten()) {
            assert!((x - y).abs() <= 1e-6 * y.abs().max(1.0), "{x} {y}");
        }
    }
}

#[test]
fn a_cache_without_rows_takes_none() {
    let mut b = GraphBuilder::new("empty");
    let x = b.input("x", DType::F32, [1, 4]);
    let at = b.input("at", DType::I64, [1, 1]);
    let empty = Tensor::zeros(DType::F32, &[0, 4]).unwrap();
    let cache = b.variable("cache", empty).unwrap();
    let kind = gristmill::ir::ScatterKind::Set;
    let cache = b.add1(Op::ScatterNd { kind }, &[cache, at, x]).unwrap();
    b.assign_variable("cache", cache).unwrap();
    b.output("x", x);
    let graph = b.finish().unwrap();
    let model = setup("cpu:1", 2).compile(&graph).unwrap();
    let x = Tensor::zeros(DType::F32, &[1, 4]).unwrap();
    let at = Tensor::zeros(DType::I64, &[1, 1]).unwrap();
    let e = model.run([("x", x), ("at", at)]).unwrap_err().to_string();
    assert!(e.contains("out of range"), "{e}");
}
