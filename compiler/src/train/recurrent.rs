//! Recurrent layers.

use super::Init;
use super::model::{Model, last_extent};
use crate::error::{Error, Result};
use crate::ir::{Dim, Graph, GraphBuilder, Op, ScalarOp, ValueId};
use gristmill_runtime::DType;

/// Added to the forget gate before its sigmoid (Jozefowicz et al., 2015, section 4; `forget_bias` of TensorFlow's `BasicLSTMCell`).
const FORGET_BIAS: f64 = 1.0;

impl Model {
    /// Long short-term memory (Hochreiter and Schmidhuber, 1997; with forget gates, Gers et al., 2000): `[batch, length, width]` to the hidden state after
    /// each place, `[batch, length, units]`, and that after the last, `[batch, units]`. It begins with zeros. Variables `weights` `[width, 4 *
    /// units]`, `recurrent_weights` `[units, 4 * units]` and `bias` `[4 * units]`, with the gates in PyTorch's order: input, forget, cell, output. 1 is
    /// added to the forget gate.
    ///
    /// Errors with `InvalidInput` when the operand has another rank, or a last axis of unknown extent.
    pub fn lstm(&mut self, x: ValueId, units: usize) -> Result<[ValueId; 2]> {
        let shape = self.builder().operand(x)?.shape.clone();
        let width = last_extent("lstm", &shape)?;
        let [batch, length, _] = &shape[..] else {
            let message =
                format!("lstm: the operand has the shape {shape}, expected [batch, length, width]");
            return Err(Error::invalid(message));
        };
        let n = 4 * units;
        let weights = self.variable("weights", &[width, n], Init::GlorotUniform)?;
        let own = self.variable("recurrent_weights", &[units, n], Init::GlorotUniform)?;
        let bias = self.variable("bias", &[n], Init::Constant(0.0))?;
        let b = self.builder();
        let x = b.transpose(x, &[1, 0, 2])?;
        let gates = b.matmul(x, weights)?;
        let gates = b.add_(gates, bias)?;
        let zero = b.scalar(DType::F32, 0.0);
        let start = b.broadcast(zero, [batch.clone(), units.into()])?;
        let scan = Op::Scan {
            carried: 2,
            scanned: 1,
            length: length.clone(),
            reverse: false,
        };
        let operands = [start, start, gates, own];
        let results = b.add_with_regions(scan, &operands, vec![cell(batch, units)?])?;
        let all = b.transpose(results[2], &[1, 0, 2])?;
        Ok([all, results[0]])
    }
}

/// One step, from hidden state, cell, products of the input and recurrent weights to hidden state, cell, and the hidden state again.
fn cell(batch: &Dim, units: usize) -> Result<Graph> {
    let mut b = GraphBuilder::new("lstm");
    let n = 4 * units;
    let state = || [batch.clone(), units.into()];
    let (h, c) = (
        b.input("h", DType::F32, state()),
        b.input("c", DType::F32, state()),
    );
    let x = b.input("gates", DType::F32, [batch.clone(), n.into()]);
    let weights = b.input("weights", DType::F32, [units, n]);
    let product = b.matmul(h, weights)?;
    let gates = b.add_(product, x)?;
    let [input, forget, entering, shown] = activated(&mut b, gates, units)?;
    let (kept, entering) = (b.mul(forget, c)?, b.mul(input, entering)?);
    let c = b.add_(kept, entering)?;
    let bounded = b.map(ScalarOp::Tanh, &[c])?;
    let h = b.mul(shown, bounded)?;
    for (name, v) in [("h", h), ("c", c), ("all", h)] {
        b.output(name, v);
    }
    Ok(b.into_graph())
}

/// The four gates behind their functions.
fn activated(b: &mut GraphBuilder, gates: ValueId, units: usize) -> Result<[ValueId; 4]> {
    let mut own = [gates; 4];
    for (k, gate) in own.iter_mut().enumerate() {
        *gate = b.slice_axis(gates, 1, k * units, units)?;
    }
    let more = b.scalar(DType::F32, FORGET_BIAS);
    own[1] = b.add_(own[1], more)?;
    let functions = [
        ScalarOp::Sigmoid,
        ScalarOp::Sigmoid,
        ScalarOp::Tanh,
        ScalarOp::Sigmoid,
    ];
    for (gate, function) in own.iter_mut().zip(functions) {
        *gate = b.map(function, &[*gate])?;
    }
    Ok(own)
}
