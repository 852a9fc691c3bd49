//! Dropout, in its form for inference and in that for training.

use super::super::import::{Ctx, OpDef, Out, Outs, TrainingNode};
use super::super::load::Form;
use crate::error::{Error, Result};
use crate::ir::random::key;
use crate::ir::{Node, Op, ValueId};
use gristmill_runtime::DType;

pub(super) const OPS: &[OpDef] = &[OpDef {
    // A constant has another result in each step.
    fold: false,
    ..OpDef::new("Dropout", (1, 3), dropout)
}];

/// Without `training_mode`, in evaluations of a training, and at a rate of 0, the operand itself and a mask of ones.
fn dropout(cx: &mut Ctx) -> Result<Outs> {
    cx.ignore(&["ratio", "seed"]);
    if is_training(cx)? {
        let rate = rate(cx)?;
        if rate != 0.0 && cx.form() != Form::Evaluation {
            cx.note_training(TrainingNode::Dropout);
            return drawn(cx, rate);
        }
    }
    let shape = cx.ty(0)?.shape;
    let yes = cx.scalar(DType::Bool, 1.0);
    let mask = cx.broadcast(yes, shape.0)?;
    let mask = mask_of(cx, mask)?;
    Ok(vec![Out::Same(cx.v(0)?), Out::Value(mask)])
}

/// True for a node in its form for training.
fn is_training(cx: &mut Ctx) -> Result<bool> {
    if cx.opset < 7 {
        return Ok(!cx.flag("is_test", false)?);
    }
    if cx.has(2) && cx.constant(2)?.is_none() {
        cx.require(&[1, 2])?;
    }
    Ok(cx.has(2) && cx.tensor(2)?.as_bytes() != [0])
}

fn rate(cx: &mut Ctx) -> Result<f64> {
    match cx.opset < 12 {
        true => cx.f("ratio", 0.5),
        false => cx.real_in(1, 0.5),
    }
}

/// The mask in the dtype that the operator set says.
fn mask_of(cx: &mut Ctx, mask: ValueId) -> Result<ValueId> {
    match cx.opset < 10 {
        true => {
            let dtype = cx.ty(0)?.dtype;
            cx.cast(mask, dtype)
        }
        false => Ok(mask),
    }
}

/// Elements chosen by the attribute `seed`, the node's path and result, and the number of dropouts before; in training also by the step, and
/// elsewhere by the seed of the options.
fn drawn(cx: &mut Ctx, rate: f64) -> Result<Outs> {
    if cx.is_in_subgraph() {
        let e = Error::unsupported("training_mode is not supported in a subgraph");
        return Err(e);
    }
    let result = cx.node.output.first().map_or("", String::as_str);
    let is_random = |(_, node): &(_, &Node)| matches!(node.op, Op::RandomBits { .. });
    let n = cx.b().graph().nodes().filter(is_random).count();
    // A zero byte keeps the name apart from those of variables, which seed initial values.
    let name = format!("{}\0{result}\0{n}", cx.path());
    let seed = key(cx.i("seed", 0)? as u64, &name);
    let x = cx.val(0)?;
    let [y, mask] = match cx.form() {
        Form::Step => cx.b().dropout(x, rate, seed)?,
        Form::Inference | Form::Evaluation => {
            let seed = seed ^ cx.seed();
            let step = cx.scalar(DType::I64, 0.0);
            cx.b().dropout_at(x, rate, seed, step)?
        }
    };
    let mask = mask_of(cx, mask)?;
    Ok(vec![Out::Value(y), Out::Value(mask)])
}
