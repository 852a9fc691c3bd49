//! Dropout, in its form for training in steps.

use super::super::import::{Ctx, OpDef, Out, Outs};
use super::super::load::Form;
use crate::error::{Error, Result};
use crate::ir::random::key;
use gristmill_runtime::DType;

pub(super) const OPS: &[OpDef] = &[OpDef {
    // What it makes of a constant is another in each step.
    fold: false,
    ..OpDef::new("Dropout", (1, 3), dropout)
}];

fn dropout(cx: &mut Ctx) -> Result<Outs> {
    let seed = cx.i("seed", 0)? as u64;
    let rate = match cx.opset < 12 {
        true => cx.f("ratio", 0.5)?,
        false => cx.real_in(1, 0.5)?,
    };
    if rate != 0.0 && is_training(cx)? {
        return in_step(cx, rate, seed);
    }
    let shape = cx.ty(0)?.shape;
    let yes = cx.scalar(DType::Bool, 1.0);
    let mask = cx.broadcast(yes, shape.0)?;
    Ok(vec![Out::Same(cx.v(0)?), Out::Value(mask)])
}

/// True for a node in its form for training, in a step of it.
fn is_training(cx: &mut Ctx) -> Result<bool> {
    let is_training = match cx.opset < 7 {
        true => !cx.flag("is_test", false)?,
        false => cx.has(2) && cx.tensor(2)?.as_bytes() != [0],
    };
    if is_training {
        cx.check_trains()?;
    }
    Ok(is_training && cx.form() == Form::Step)
}

/// Elements chosen by the attribute `seed`, the node's path and result, and the number of the step.
fn in_step(cx: &mut Ctx, rate: f64, seed: u64) -> Result<Outs> {
    if cx.is_in_subgraph() {
        let e = Error::unsupported("training_mode is not supported in a subgraph");
        return Err(e);
    }
    let result = cx.node.output.first().map_or("", String::as_str);
    // A zero byte keeps the name apart from those of variables, which seed initial values.
    let name = format!("{}\0{result}", cx.path());
    let x = cx.val(0)?;
    let [y, mask] = cx.b().dropout(x, rate, key(seed, &name))?;
    Ok(vec![Out::Value(y), Out::Value(mask)])
}
