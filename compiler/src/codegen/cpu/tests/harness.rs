//! Runs a cluster's plan directly, its items cut into random ranges, and compares with the interpreter.

use crate::codegen::cpu::{self, Collector, Listing, Options};
use crate::codegen::plan::{Arg, CompiledKernels};
use crate::codegen::testing::{Case, Rng, as_cluster};
use crate::error::Result;
use crate::ir::{Graph, GraphBuilder, NodeId, Op};
use gristmill_runtime::Tensor;
use gristmill_runtime::tensor::AlignedBytes;

/// The kernels of a graph's clusters, linked.
pub fn compile_clusters(graph: &mut Graph, options: &Options) -> Result<CompiledKernels> {
    Ok(compile_listed(graph, options)?.0)
}

/// The same with listings of the code.
pub fn compile_listed(graph: &mut Graph, options: &Options) -> Result<(CompiledKernels, Listing)> {
    let mut code = Collector::new(options)?;
    let compiled = cpu::compile_clusters(graph, options, &mut code)?;
    Ok((compiled, code.finish()?))
}

/// Runs the plan of node 0 once; the error is a kernel's status.
pub fn run(
    graph: &Graph,
    compiled: &CompiledKernels,
    inputs: &[Tensor],
    rng: &mut Rng,
) -> Result<Vec<Tensor>, u32> {
    let plan = &compiled.plans[&NodeId(0)];
    let mut results: Vec<Tensor> = (graph.outputs.iter())
        .map(|o| {
            Tensor::zeros(
                graph.ty(o.value).dtype,
                &graph.ty(o.value).static_shape().unwrap(),
            )
            .unwrap()
        })
        .collect();
    results.iter_mut().for_each(|t| t.as_bytes_mut().fill(1));
    let scratch: Vec<AlignedBytes> = plan
        .scratch
        .iter()
        .map(|&n| AlignedBytes::zeroed(n).unwrap())
        .collect();
    for step in &plan.steps {
        let kernel = &compiled.kernels[step.kernel];
        let workspace = AlignedBytes::zeroed(kernel.workspace_bytes_per_thread).unwrap();
        let mut args: Vec<*mut u8> = (step.args.iter())
            .map(|arg| match *arg {
                Arg::Operand(i) => inputs[i as usize].as_ptr().cast_mut(),
                Arg::Result(i) => results[i as usize].as_mut_ptr(),
                Arg::Scratch(i) => scratch[i as usize].as_ptr(),
                Arg::Packed(i) => plan.packed[i as usize]
                    .elements
                    .tensor()
                    .as_ptr()
                    .cast_mut(),
            })
            .collect();
        args.push(workspace.as_ptr());
        let mut begin = 0;
        while begin < step.items {
            let end = if step.grain == 0 {
                step.items
            } else {
                begin + 1 + rng.below((step.items - begin) as usize) as u64
            };
            // SAFETY: the buffers have the sizes of the plan, and all outlive the call.
            let status = unsafe { (kernel.function.entry().unwrap())(args.as_ptr(), begin, end) };
            if status != 0 {
                return Err(status);
            }
            begin = end;
        }
    }
    Ok(results)
}

/// Compiles `body`, runs it, and compares with the interpreter.
pub fn check(body: &Graph, inputs: &[Tensor], tolerance: f64, rng: &mut Rng) {
    let case = Case {
        body: body.clone(),
        inputs: inputs.to_vec(),
        tolerance,
    };
    case.check(|graph, inputs| {
        let compiled = compile_clusters(&mut graph.clone(), &Options::default())
            .map_err(|e| format!("compiler: {e}"))?;
        run(graph, &compiled, inputs, rng).map_err(|s| format!("kernel status {s}"))
    });
}

/// Names of the kernels that a body's plan calls.
pub fn steps(body: &Graph) -> Vec<String> {
    let compiled = compile_clusters(&mut as_cluster(body), &Options::default()).unwrap();
    compiled.plans[&NodeId(0)]
        .steps
        .iter()
        .map(|s| compiled.kernels[s.kernel].name.clone())
        .collect()
}

/// An op on an image whose channels come first, or last and are transposed.
pub fn image_graph(op: &Op, is_last: bool, operands: &[Tensor]) -> Graph {
    let mut b = GraphBuilder::new("g");
    let mut inputs = Vec::new();
    for (i, t) in operands.iter().enumerate() {
        inputs.push(b.input(&format!("x{i}"), t.dtype(), t.shape().iter().copied()));
    }
    if is_last {
        let perm = vec![0, 3, 1, 2];
        inputs[0] = b.add1(Op::Transpose { perm }, &inputs[..1]).unwrap();
    }
    let y = b.add1(op.clone(), &inputs).unwrap();
    b.output("y", y);
    b.finish().unwrap()
}
