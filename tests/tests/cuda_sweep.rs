//! Every form of a kernel by itself, on an emulated GPU: all are right, not only the chosen one.

use crate::cuda::{tuned, with_driver_of};
use gristmill::ir::{GraphBuilder, ReduceKind};
use gristmill::testing::{Rng, random_tensor};
use gristmill::tune::{FormTime, each_form};
use gristmill::{DType, Error, Tuning};

#[test]
fn every_form_of_each_cluster_is_run_and_checked() {
    let name = "every_form_of_each_cluster_is_run_and_checked";
    with_driver_of("cuda_sweep", name, "clock=threads", || {
        let mut b = GraphBuilder::new("g");
        let x = b.input("x", DType::F32, [64usize, 600]);
        let w = b.input("w", DType::F32, [600usize, 96]);
        let sums = b.reduce(ReduceKind::Sum, x, &[1], false).unwrap();
        let y = b.matmul(x, w).unwrap();
        b.output("sums", sums);
        b.output("y", y);
        let graph = b.finish().unwrap();
        let setup = tuned(Tuning::default());
        let mut all: Vec<FormTime> = Vec::new();
        let inputs = |g: &gristmill::ir::Graph| {
            let shapes = g.inputs.iter().map(|&v| g.ty(v).static_shape());
            let tensor = |shape: Option<Vec<usize>>| {
                let shape = shape.ok_or_else(|| Error::internal("shapes are static"))?;
                Ok(random_tensor(&mut Rng(3), DType::F32, &shape, false))
            };
            shapes.map(tensor).collect()
        };
        each_form(graph, setup.config(), &inputs, &mut |form| all.push(form)).unwrap();
        for cluster in 0..2 {
            let forms: Vec<&FormTime> = all.iter().filter(|f| f.cluster == cluster).collect();
            let numbers: Vec<u8> = forms.iter().map(|f| f.form).collect();
            let n = forms[0].n;
            assert!(n > 1 && numbers == (0..n).collect::<Vec<u8>>(), "{forms:?}");
            let is_right = |f: &&FormTime| matches!(f.ns, Ok(1..)) && !f.words.is_empty();
            assert!(forms.iter().all(is_right), "{forms:?}");
        }
    });
}
