//! Runs a cluster's plan directly, its items cut into random ranges, and compares with the interpreter.

use crate::codegen::cpu::{Options, compile_clusters};
use crate::codegen::plan::{Arg, CompiledKernels};
use crate::interp;
use crate::ir::{ClusterKind, Graph, NodeId, Op, Origin, Type};
use gristmill_runtime::tensor::AlignedBytes;
use gristmill_runtime::{DType, Tensor, with_dtype};

/// A small deterministic generator (the constants are Knuth's MMIX).
pub struct Rng(pub u64);

impl Rng {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        self.0 >> 33
    }

    pub fn below(&mut self, n: usize) -> usize {
        (self.next() % n.max(1) as u64) as usize
    }

    /// Uniform in `lo..hi`.
    pub fn real(&mut self, lo: f64, hi: f64) -> f64 {
        lo + (hi - lo) * (self.next() % 65_536) as f64 / 65_536.0
    }

    /// A tensor whose elements are reals in `lo..hi`, converted.
    pub fn tensor(&mut self, dtype: DType, shape: &[usize], lo: f64, hi: f64) -> Tensor {
        let mut t = Tensor::zeros(dtype, shape).unwrap();
        let size = dtype.size_bytes();
        let lo = if dtype.is_unsigned_int() { lo.max(0.0) } else { lo };
        for bytes in t.as_bytes_mut().chunks_exact_mut(size) {
            let bits = crate::vecprog::real_bits(dtype, self.real(lo, hi));
            bytes.copy_from_slice(&bits.to_le_bytes()[..size]);
        }
        if dtype == DType::Bool {
            t.as_bytes_mut().iter_mut().for_each(|b| *b = (self.next() & 1) as u8);
        }
        t
    }
}

/// A graph with one node of `op` on inputs like `operands`.
pub fn graph_of(op: &Op, operands: &[Tensor]) -> Graph {
    let mut g = Graph::new("case");
    let inputs: Vec<_> = (operands.iter().enumerate())
        .map(|(i, t)| g.add_input(&format!("x{i}"), Type::new(t.dtype(), t.shape().iter().copied())))
        .collect();
    let outputs = g.add(op.clone(), &inputs, &Origin::new("/case")).unwrap_or_else(|e| panic!("{op:?}: {e}"));
    for (i, v) in outputs.into_iter().enumerate() {
        g.add_output(&format!("y{i}"), v);
    }
    g
}

/// `body` as the only cluster of a graph.
pub fn as_cluster(body: &Graph) -> Graph {
    let mut g = Graph::new("test");
    let inputs: Vec<_> =
        (body.inputs.iter().zip(&body.input_names)).map(|(&v, name)| g.add_input(name, body.ty(v).clone())).collect();
    let op = Op::Cluster { kind: ClusterKind::Map };
    let outputs = g.add_with_regions(op, &inputs, vec![body.clone()], &Origin::new("/cluster")).unwrap();
    for (o, v) in body.outputs.iter().zip(outputs) {
        g.add_output(&o.name, v);
    }
    g
}

/// Runs the plan of node 0 once; the error is a kernel's status.
pub fn run(graph: &Graph, compiled: &CompiledKernels, inputs: &[Tensor], rng: &mut Rng) -> Result<Vec<Tensor>, u32> {
    let plan = &compiled.plans[&NodeId(0)];
    let mut results: Vec<Tensor> = (graph.outputs.iter())
        .map(|o| Tensor::zeros(graph.ty(o.value).dtype, &graph.ty(o.value).static_shape().unwrap()).unwrap())
        .collect();
    results.iter_mut().for_each(|t| t.as_bytes_mut().fill(1));
    let scratch: Vec<AlignedBytes> = plan.scratch.iter().map(|&n| AlignedBytes::zeroed(n).unwrap()).collect();
    for step in &plan.steps {
        let kernel = &compiled.kernels[step.kernel];
        let workspace = AlignedBytes::zeroed(kernel.workspace_bytes_per_thread).unwrap();
        let mut args: Vec<*mut u8> = (step.args.iter())
            .map(|arg| match *arg {
                Arg::Operand(i) => inputs[i as usize].as_ptr().cast_mut(),
                Arg::Result(i) => results[i as usize].as_mut_ptr(),
                Arg::Scratch(i) => scratch[i as usize].as_ptr(),
                Arg::Packed(i) => plan.packed[i as usize].as_ptr().cast_mut(),
            })
            .collect();
        args.push(workspace.as_ptr());
        let mut begin = 0;
        while begin < step.items {
            let end =
                if step.grain == 0 { step.items } else { begin + 1 + rng.below((step.items - begin) as usize) as u64 };
            // SAFETY: the buffers have the sizes of the plan, and all outlive the call.
            let status = unsafe { (kernel.entry.get())(args.as_ptr(), begin, end) };
            if status != 0 {
                return Err(status);
            }
            begin = end;
        }
    }
    Ok(results)
}

/// Compiles `body`, runs it, and compares with the interpreter. `tolerance` is relative to the greatest finite magnitude, on top of
/// what the dtype can resolve.
pub fn check(body: &Graph, inputs: &[Tensor], tolerance: f64, rng: &mut Rng) {
    let graph = as_cluster(body);
    let expected = interp::run(body, inputs).unwrap_or_else(|e| panic!("{body}\ninterpreter: {e}"));
    let compiled = compile_clusters(&mut graph.clone(), &Options { n_threads: 2, ..Options::default() })
        .unwrap_or_else(|e| panic!("{body}\ncompiler: {e}"));
    let found = run(&graph, &compiled, inputs, rng).unwrap_or_else(|s| panic!("{body}\nkernel status {s}"));
    for (i, (want, have)) in expected.iter().zip(&found).enumerate() {
        if let Err(m) = compare(want, have, tolerance) {
            panic!("{body}\noutput {i}: {m}\ninputs {inputs:?}\nexpected {want:?}\nfound {have:?}");
        }
    }
}

/// Says where `have` differs from `want`.
pub fn compare(want: &Tensor, have: &Tensor, tolerance: f64) -> Result<(), String> {
    assert_eq!((want.dtype(), want.shape()), (have.dtype(), have.shape()));
    if !want.dtype().is_float() {
        return if want == have { Ok(()) } else { Err("differs".into()) };
    }
    let resolution = match want.dtype() {
        DType::F16 => 2e-3,
        DType::BF16 => 1.6e-2,
        DType::F32 => 1e-6,
        _ => 1e-13,
    };
    let (want, have) = (reals(want), reals(have));
    let scale = want.iter().filter(|v| v.is_finite()).fold(0f64, |m, v| m.max(v.abs()));
    for (i, (&w, &h)) in want.iter().zip(&have).enumerate() {
        let same = w == h || w.is_nan() && h.is_nan();
        if !same
            && (w - h).abs().partial_cmp(&(w.abs() * resolution + scale * tolerance)) != Some(std::cmp::Ordering::Less)
        {
            return Err(format!("element {i}: expected {w:e}, found {h:e}"));
        }
    }
    Ok(())
}

fn reals(t: &Tensor) -> Vec<f64> {
    macro_rules! as_f64 {
        ($v:expr) => {
            $v.to_string().parse::<f64>().unwrap()
        };
    }
    with_dtype!(t.dtype(), T => t.as_slice::<T>().iter().map(|v| as_f64!(v)).collect())
}

/// Names of the kernels that a body's plan calls.
pub fn steps(body: &Graph) -> Vec<String> {
    let compiled = compile_clusters(&mut as_cluster(body), &Options::default()).unwrap();
    compiled.plans[&NodeId(0)].steps.iter().map(|s| compiled.kernels[s.kernel].name.clone()).collect()
}
