//! Ops with regions, and ops that give symbols their values.

use super::Op;
use crate::error::Result;
use crate::ir::dim::Dim;
use crate::ir::graph::Graph;
use crate::ir::infer;
use crate::ir::infer::Inferred;
use crate::ir::types::{Shape, Type};
use gristmill_runtime::DType;

pub(super) fn check_region(what: &str, region: &Graph, expected: &[Type]) -> Result<(), String> {
    let found: Vec<Type> = region
        .inputs
        .iter()
        .map(|&v| region.ty(v).clone())
        .collect();
    if found != expected {
        let show = |ts: &[Type]| {
            ts.iter()
                .map(Type::to_string)
                .collect::<Vec<_>>()
                .join(", ")
        };
        return Err(format!(
            "{what} takes ({}), is given ({})",
            show(&found),
            show(expected)
        ));
    }
    Ok(())
}

pub(super) fn region_results(region: &Graph) -> Vec<Type> {
    region
        .outputs
        .iter()
        .map(|o| region.ty(o.value).clone())
        .collect()
}

pub(super) fn if_infer(_: &Op, args: &[Type], regions: &[Graph]) -> Inferred {
    let [then, other] = regions else {
        return Err(format!("expected 2 regions, got {}", regions.len()));
    };
    if args[0].dtype != DType::Bool || !args[0].shape.n_elements().is(1) {
        return Err(format!("condition must be one bool, got {}", args[0]));
    }
    check_region("then region", then, &args[1..])?;
    check_region("else region", other, &args[1..])?;
    let (a, b) = (region_results(then), region_results(other));
    if a != b {
        return Err("the regions give different types".into());
    }
    Ok(a)
}

pub(super) fn loop_infer(op: &Op, args: &[Type], regions: &[Graph]) -> Inferred {
    attrs!(op, Loop { carried, trip });
    let [body] = regions else {
        return Err(format!("expected 1 region, got {}", regions.len()));
    };
    if args.len() < 2 + carried || args[0].dtype != DType::I64 || args[1].dtype != DType::Bool {
        return Err(
            "operands must begin with trip count i64[], condition bool[] and the carried values"
                .into(),
        );
    }
    let scalar = |dtype| Type::new(dtype, Vec::<Dim>::new());
    let mut formals = vec![scalar(DType::I64), scalar(DType::Bool)];
    for (i, given) in args[2..].iter().enumerate() {
        let formal = body.inputs.get(2 + i).map(|&v| body.ty(v));
        let formal = formal.filter(|f| i < *carried && f.is_but_for(given, &open_axes(given, f)));
        formals.push(formal.unwrap_or(given).clone());
    }
    check_region("body", body, &formals)?;
    let results = region_results(body);
    if results.len() < 1 + carried || results[0].dtype != DType::Bool {
        return Err("the body must give the condition, then carried values".into());
    }
    let (kept, rows) = results[1..].split_at(*carried);
    let formals = &formals[2..2 + carried];
    for ((given, formal), result) in args[2..].iter().zip(formals).zip(kept) {
        if !result.is_but_for(formal, &open_axes(given, formal)) {
            let rule = "carried values keep their types";
            return Err(format!(
                "the body takes {formal} and gives {result}: {rule}"
            ));
        }
    }
    let stacks = rows.iter().map(|t| stacked(t, trip));
    Ok(formals.iter().cloned().chain(stacks).collect())
}

fn stacked(t: &Type, n: &Dim) -> Type {
    Type {
        dtype: t.dtype,
        shape: std::iter::once(n.clone())
            .chain(t.shape.iter().cloned())
            .collect(),
    }
}

/// Axes of a carried value whose extent may change: those where the formal of the body has a symbol
/// of its own.
fn open_axes(given: &Type, formal: &Type) -> Vec<bool> {
    let extents = given.shape.iter().zip(formal.shape.iter());
    extents
        .map(|(g, f)| g != f && f.as_symbol().is_some())
        .collect()
}

impl Type {
    /// True when the types differ at most in the extents of these axes.
    fn is_but_for(&self, other: &Type, axes: &[bool]) -> bool {
        let mut extents = self.shape.iter().zip(other.shape.iter()).zip(axes);
        self.dtype == other.dtype
            && self.rank() == other.rank()
            && extents.all(|((a, b), is_open)| *is_open || a == b)
    }
}

pub(super) fn scan_infer(op: &Op, args: &[Type], regions: &[Graph]) -> Inferred {
    attrs!(
        op,
        Scan {
            carried,
            scanned,
            length
        }
    );
    let [body] = regions else {
        return Err(format!("expected 1 region, got {}", regions.len()));
    };
    if args.len() < carried + scanned {
        return Err(format!(
            "expected {carried} carried and {scanned} scanned operands, got {}",
            args.len()
        ));
    }
    let mut expected = args[..*carried].to_vec();
    for t in &args[*carried..carried + scanned] {
        if t.shape.first() != Some(length) {
            return Err(format!(
                "scanned operand {t} must have {length} elements along axis 0"
            ));
        }
        expected.push(Type {
            dtype: t.dtype,
            shape: Shape(t.shape[1..].to_vec()),
        });
    }
    expected.extend_from_slice(&args[carried + scanned..]);
    check_region("body", body, &expected)?;
    let results = region_results(body);
    if results.len() < *carried || results[..*carried] != args[..*carried] {
        return Err("the body must give carried values of unchanged types first".into());
    }
    Ok(results[..*carried]
        .iter()
        .cloned()
        .chain(results[*carried..].iter().map(|t| stacked(t, length)))
        .collect())
}

pub(super) fn extent_infer(_: &Op, args: &[Type], _: &[Graph]) -> Inferred {
    if args[0].dtype == DType::I64 && args[0].rank() == 0 {
        return Ok(args.to_vec());
    }
    Err(format!("operand must be i64[], got {}", args[0]))
}

pub(super) fn shaped_infer(op: &Op, args: &[Type], _: &[Graph]) -> Inferred {
    attrs!(op, Shaped { shape });
    let ty = &args[0];
    let mut extents = ty.shape.iter().zip(shape);
    let differ = |(a, b): (&Dim, &Dim)| (a.clone() - b.clone()).as_const().is_some_and(|d| d != 0);
    if ty.rank() != shape.len() || extents.any(differ) {
        return Err(format!("{ty} is not of shape {}", Shape(shape.clone())));
    }
    infer::one(ty.dtype, shape.clone())
}

pub(super) fn segment_infer(_: &Op, args: &[Type], regions: &[Graph]) -> Inferred {
    let [body] = regions else {
        return Err(format!("expected 1 region, got {}", regions.len()));
    };
    check_region("body", body, args)?;
    Ok(region_results(body))
}

pub(super) fn cluster_infer(op: &Op, args: &[Type], regions: &[Graph]) -> Inferred {
    attrs!(op, Cluster { anchor, root });
    let [body] = regions else {
        return Err(format!("expected 1 region, got {}", regions.len()));
    };
    check_region("body", body, args)?;
    for (name, node) in [("anchor", *anchor), ("root", *root)] {
        if node >= body.n_nodes().max(1) {
            let n = body.n_nodes();
            return Err(format!("the {name} is node {node} of a body of {n} nodes"));
        }
    }
    Ok(region_results(body))
}
