//! Layers of transformers.

use super::Init;
use super::model::{Model, last_extent};
use crate::error::{Error, Result};
use crate::ir::{Op, Real, Shape, ValueId};

/// Epsilon of layer normalisation.
const EPSILON: f64 = 1e-5;

impl Model {
    /// The row of a table for each integer: `[..]` to `[.., width]`. Variable `table` `[rows, width]`. Negative integers count from the end, and
    /// those out of range are errors of the run.
    pub fn embedding(
        &mut self,
        ids: ValueId,
        [rows, width]: [usize; 2],
        init: Init,
    ) -> Result<ValueId> {
        let table = self.variable("table", &[rows, width], init)?;
        self.builder().add1(Op::Gather { axis: 0 }, &[table, ids])
    }

    /// Layer normalisation over the last axis (Ba et al., arXiv:1607.06450, equation 4), epsilon 1e-5. Variables `scale` and `shift`
    /// `[width]`.
    pub fn layer_norm(&mut self, x: ValueId) -> Result<ValueId> {
        let shape = self.builder().operand(x)?.shape.clone();
        let width = last_extent("layer_norm", &shape)?;
        let scale = self.variable("scale", &[width], Init::Constant(1.0))?;
        let shift = self.variable("shift", &[width], Init::Constant(0.0))?;
        let op = Op::LayerNorm {
            axis: shape.len() - 1,
            epsilon: Real(EPSILON),
        };
        self.builder().add1(op, &[x, scale, shift])
    }

    /// Attention of a sequence to itself by several heads (Vaswani et al., arXiv:1706.03762, section 3.2.2): `[batch, length, width]` to the
    /// same; `causal` lets each place see itself and earlier ones only. [`dense`](Model::dense) layers in the scopes `query`, `key`, `value` and
    /// `output`.
    ///
    /// Errors with `InvalidInput` when the width is no multiple of the number of heads.
    pub fn self_attention(&mut self, x: ValueId, heads: usize, causal: bool) -> Result<ValueId> {
        let shape = self.builder().operand(x)?.shape.clone();
        let width = last_extent("self_attention", &shape)?;
        if shape.len() != 3 || heads == 0 || width % heads != 0 {
            return Err(Error::invalid(format!(
                "self_attention by {heads} heads: the operand has the shape {shape}, expected [batch, length, width] with a multiple of the heads as width"
            )));
        }
        let mut parts = Vec::new();
        for name in ["query", "key", "value"] {
            let part = self.scope(name, |m| m.dense(x, width))?;
            parts.push(self.split_heads(part, &shape, heads)?);
        }
        let op = Op::Attention {
            scale: Real(1.0 / ((width / heads) as f64).sqrt()),
            causal,
        };
        let b = self.builder();
        let seen = b.add1(op, &parts)?;
        let seen = b.transpose(seen, &[0, 2, 1, 3])?;
        let seen = b.reshape(seen, shape.to_vec())?;
        self.scope("output", |m| m.dense(seen, width))
    }

    /// `[batch, length, width]` as `[batch, heads, length, width / heads]`.
    fn split_heads(&mut self, x: ValueId, shape: &Shape, heads: usize) -> Result<ValueId> {
        let width = last_extent("self_attention", shape)?;
        let split = [
            shape[0].clone(),
            shape[1].clone(),
            heads.into(),
            (width / heads).into(),
        ];
        let x = self.builder().reshape(x, split)?;
        self.builder().transpose(x, &[0, 2, 1, 3])
    }
}
