//! Random updates of variables over several runs, some of which fail, beside the interpreter.

use super::setup;
use gristmill::ir::{Graph, GraphBuilder, Op, ReduceKind, ScalarOp, ScatterKind, ValueId};
use gristmill::testing::{Rng, nvrtc_or_left_out};
use gristmill::{DType, Resources, Tensor, interp};
use gristmill_runtime::program::{Program, StepKind};

const NAMES: [&str; 3] = ["u", "v", "w"];

/// Values of one shape, and the variables that they come from.
struct Updates<'r> {
    b: GraphBuilder,
    rng: &'r mut Rng,
    /// A device is drawn for each value that is computed, if there are several.
    devices: Rng,
    n_devices: usize,
    pool: Vec<ValueId>,
    rows: ValueId,
    at: ValueId,
    /// Results that outputs show, so that a scatter that fails is a run that does.
    shown: Vec<ValueId>,
}

impl Updates<'_> {
    fn any(&mut self) -> ValueId {
        self.pool[self.rng.below(self.pool.len())]
    }

    fn read(&mut self, name: &str) -> ValueId {
        let read = match self.rng.one_in(2) {
            true => self.b.variable(name, initial(name)),
            false => self.b.read_variable(name, DType::F32, [6usize, 4]),
        };
        read.unwrap()
    }

    /// A value by an op that keeps numbers small.
    fn combined(&mut self) -> ValueId {
        let (x, y) = (self.any(), self.any());
        let half = self.b.scalar(DType::F32, 0.5);
        match self.rng.below(5) {
            0 => self.b.map(ScalarOp::Max, &[x, y]).unwrap(),
            1 => self.b.map(ScalarOp::Tanh, &[x]).unwrap(),
            2 => {
                let sum = self.b.add_(x, y).unwrap();
                self.b.map(ScalarOp::Mul, &[sum, half]).unwrap()
            }
            3 => {
                let difference = self.b.map(ScalarOp::Sub, &[x, y]).unwrap();
                self.b.map(ScalarOp::Mul, &[difference, half]).unwrap()
            }
            _ => {
                let mean = self.b.reduce(ReduceKind::Mean, x, &[1], true).unwrap();
                self.b.map(ScalarOp::Min, &[mean, y]).unwrap()
            }
        }
    }

    fn scattered(&mut self, x: ValueId) -> ValueId {
        let kind = [ScatterKind::Set, ScatterKind::Max][self.rng.below(2)];
        let inputs = [x, self.at, self.rows];
        let y = self.b.add1(Op::ScatterNd { kind }, &inputs).unwrap();
        self.shown.push(y);
        y
    }

    /// A value that is computed on some device.
    fn somewhere(&mut self, compute: impl FnOnce(&mut Self) -> ValueId) -> ValueId {
        if self.n_devices == 1 {
            return compute(self);
        }
        let spec = format!("/cpu:{}", self.devices.below(self.n_devices));
        let scope = self.b.enter_device(spec.as_str()).unwrap();
        let value = compute(self);
        self.b.exit_scope(scope).unwrap();
        value
    }

    fn step(&mut self) {
        let name = NAMES[self.rng.below(NAMES.len())];
        let value = match self.rng.below(6) {
            0 | 1 => self.somewhere(Self::combined),
            2 => {
                let x = self.any();
                self.somewhere(|u| u.scattered(x))
            }
            3 => self.read(name),
            4 => {
                let (old, half) = (self.read(name), self.b.scalar(DType::F32, 0.5));
                let x = self.any();
                let moved = self.b.map(ScalarOp::Sub, &[x, old]).unwrap();
                let moved = self.b.map(ScalarOp::Mul, &[moved, half]).unwrap();
                let new = self.b.add_(old, moved).unwrap();
                self.b.assign_variable(name, new).unwrap()
            }
            _ => {
                let old = self.read(name);
                let new = self.scattered(old);
                self.b.assign_variable(name, new).unwrap()
            }
        };
        self.pool.push(value);
    }
}

fn initial(name: &str) -> Tensor {
    let from = name.len() + usize::from(name.as_bytes()[0]);
    let values: Vec<f32> = (0..24)
        .map(|i| ((i * from) % 13) as f32 / 6.5 - 1.0)
        .collect();
    Tensor::from_slice(&values, &[6, 4]).unwrap()
}

fn updates(rng: &mut Rng, n_devices: usize) -> Graph {
    let mut b = GraphBuilder::new("updates");
    let (x, rows, at) = (
        b.input("x", DType::F32, [6, 4]),
        b.input("rows", DType::F32, [2, 4]),
        b.input("at", DType::I64, [2, 1]),
    );
    let mut u = Updates {
        b,
        devices: Rng(rng.0 ^ 0x5eed),
        n_devices,
        rng,
        pool: vec![x],
        rows,
        at,
        shown: Vec::new(),
    };
    for _ in 0..4 + u.rng.below(9) {
        u.step();
    }
    u.shown.push(*u.pool.last().unwrap());
    for (i, &v) in u.shown.iter().enumerate() {
        u.b.output(&format!("y{i}"), v);
    }
    u.b.finish().unwrap()
}

fn inputs(rng: &mut Rng, is_bad: bool) -> Vec<Tensor> {
    let mut reals = |shape: &[usize]| {
        let n = shape.iter().product();
        let values: Vec<f32> = (0..n)
            .map(|_| rng.below(200) as f32 / 100.0 - 1.0)
            .collect();
        Tensor::from_slice(&values, shape).unwrap()
    };
    let (x, rows) = (reals(&[6, 4]), reals(&[2, 4]));
    let row = |rng: &mut Rng| rng.below(12) as i64 - 6;
    let at = [row(rng), if is_bad { 6 } else { row(rng) }];
    vec![x, rows, Tensor::from_slice(&at, &[2, 1]).unwrap()]
}

fn assert_close(want: &Tensor, got: &Tensor, context: &str) {
    let pairs = want.as_slice::<f32>().iter().zip(got.as_slice::<f32>());
    for (a, b) in pairs {
        assert!((a - b).abs() <= 1e-4, "{context}: {a} {b}");
    }
}

/// Runs of random graphs that failed, variables that were updated where they are, and tokens that said when they may be.
#[derive(Default)]
struct Counts {
    failed: usize,
    in_place: usize,
    tokens: usize,
}

/// One random graph on sets of devices at optimisation levels, four runs of each, beside the interpreter. Its nodes are on `n_devices`.
fn check_seed(seed: u64, n_devices: usize, configured: &[(&str, u8)], counts: &mut Counts) {
    let mut rng = Rng(seed);
    let graph = updates(&mut rng, n_devices);
    let mut store = interp::Store::new();
    NAMES
        .iter()
        .for_each(|name| store.set("", name, initial(name)));
    let models = configured.iter().map(|&(devices, level)| {
        let model = setup(devices, level).compile(&graph).unwrap();
        NAMES
            .iter()
            .for_each(|name| model.resources().set("", name, &initial(name)).unwrap());
        model
    });
    let models: Vec<_> = models.collect();
    for round in 0..4 {
        let is_bad = rng.one_in(3);
        let inputs = inputs(&mut rng, is_bad);
        let want = interp::run_with_state(&graph, &inputs, &mut store);
        counts.failed += usize::from(want.is_err());
        for (model, how) in models.iter().zip(configured) {
            let context = format!("seed {seed}, run {round}, {how:?}\n{graph}");
            let got = model.run(["x", "rows", "at"].into_iter().zip(inputs.iter().cloned()));
            match (&want, &got) {
                (Ok(want), Ok(got)) => {
                    let pairs = want.iter().zip(got.iter());
                    pairs.for_each(|(want, (_, got))| assert_close(want, got, &context));
                }
                (Err(_), Err(_)) => {}
                _ => panic!("{context}: {want:?}, {got:?}"),
            }
            check_state(&store, model.resources(), &context);
        }
    }
    for model in &models {
        let executable = model.for_inputs(&inputs(&mut rng, false)).unwrap();
        let variables = executable.lowered.program.variables.iter();
        counts.in_place += variables.filter(|v| v.in_place).count();
        counts.tokens += n_tokens(&executable.lowered.program);
    }
}

/// The number of transfers that say that nothing can fail any more.
fn n_tokens(program: &Program) -> usize {
    let steps = program.partitions.iter().flat_map(|p| &p.steps);
    let is_token = |kind: &StepKind| matches!(kind, StepKind::Recv { key, .. } if key.tensor == "nothing can fail");
    steps.filter(|step| is_token(&step.kind)).count()
}

#[test]
fn random_updates_are_those_of_the_interpreter() {
    let mut counts = Counts::default();
    let configured = [("cpu:1", 0), ("cpu:1", 2), ("cpu:2", 2), ("cpu:1", 3)];
    (0..60).for_each(|seed| check_seed(seed, 1, &configured, &mut counts));
    let Counts {
        failed, in_place, ..
    } = counts;
    assert!(failed > 20 && in_place > 60, "{failed} {in_place}");
}

/// Whatever may fail on one device comes before the updates on others.
#[test]
fn random_updates_beside_other_devices() {
    let mut counts = Counts::default();
    for seed in 0..90 {
        let n = 2 + seed as usize % 2;
        let devices = format!("cpu:{n}");
        let configured = [(devices.as_str(), 0), (devices.as_str(), 2)];
        check_seed(seed, n, &configured, &mut counts);
    }
    let Counts {
        failed,
        in_place,
        tokens,
    } = counts;
    assert!(
        failed > 30 && in_place > 60 && tokens > 20,
        "{failed} {in_place} {tokens}"
    );
}

#[test]
fn random_updates_on_devices_with_memory_of_their_own() {
    if nvrtc_or_left_out("updates of variables on emulated GPUs").is_none() {
        return;
    }
    let [mut alone, mut beside] = [Counts::default(), Counts::default()];
    for seed in 0..20 {
        check_seed(seed, 1, &[("emu:1", 2)], &mut alone);
        check_seed(seed, 1, &[("cpu:1,emu:1", 2)], &mut beside);
    }
    assert!(alone.failed > 5 && alone.in_place == 0 && beside.failed > 5);
}

fn check_state(store: &interp::Store, resources: &Resources, context: &str) {
    for name in NAMES {
        let (want, got) = (
            store.get("", name).unwrap(),
            resources.get("", name).unwrap().unwrap(),
        );
        assert_close(want, &got, &format!("{name}, {context}"));
    }
}
