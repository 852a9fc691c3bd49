//! Activations by name.

use super::Model;
use crate::error::{Error, Result};
use crate::ir::{Real, ScalarOp, ValueId};
use gristmill_runtime::nearest::unknown;
use std::str::FromStr;

/// An element-wise function after a layer, with PyTorch's definition and defaults.
///
/// It is parsed from PyTorch's name, such as `"relu"` or `"leaky_relu"`; `"linear"` is `Identity`, `"swish"` is `Silu`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Activation {
    /// `x`.
    Identity,
    /// `max(x, 0)`.
    Relu,
    /// `min(max(x, 0), 6)`.
    Relu6,
    /// `x`, times the slope below 0. `"leaky_relu"` has 0.01; Keras' default is 0.2 (0.3 before version 3).
    LeakyRelu(f64),
    /// `x`, below 0 `alpha * (exp(x) - 1)`. `"elu"` has 1.
    Elu(f64),
    /// Scaled ELU (Klambauer et al., arXiv:1706.02515).
    Selu,
    /// `x * (1 + erf(x / sqrt(2))) / 2`.
    Gelu,
    /// The approximation of `Gelu` by `tanh`: PyTorch's `approximate="tanh"`.
    GeluTanh,
    /// `x * sigmoid(x)`.
    Silu,
    /// `x * tanh(softplus(x))`.
    Mish,
    /// `tanh(x)`.
    Tanh,
    /// `1 / (1 + exp(-x))`.
    Sigmoid,
    /// `log(1 + exp(x))`.
    Softplus,
    /// `x / (1 + |x|)`.
    Softsign,
    /// `x * min(max(x + 3, 0), 6) / 6`.
    HardSwish,
    /// `min(max(x + 3, 0), 6) / 6`, as in Keras 3; Keras 2 has slope 0.2.
    HardSigmoid,
}

/// Names, synonyms after the first.
const NAMES: [(&str, Activation); 18] = [
    ("identity", Activation::Identity),
    ("linear", Activation::Identity),
    ("relu", Activation::Relu),
    ("relu6", Activation::Relu6),
    ("leaky_relu", Activation::LeakyRelu(0.01)),
    ("elu", Activation::Elu(1.0)),
    ("selu", Activation::Selu),
    ("gelu", Activation::Gelu),
    ("gelu_tanh", Activation::GeluTanh),
    ("silu", Activation::Silu),
    ("swish", Activation::Silu),
    ("mish", Activation::Mish),
    ("tanh", Activation::Tanh),
    ("sigmoid", Activation::Sigmoid),
    ("softplus", Activation::Softplus),
    ("softsign", Activation::Softsign),
    ("hardswish", Activation::HardSwish),
    ("hardsigmoid", Activation::HardSigmoid),
];

impl FromStr for Activation {
    type Err = Error;

    /// Errors with `InvalidInput` on an unknown name, with the known ones.
    fn from_str(name: &str) -> Result<Activation> {
        let found = NAMES.iter().find(|(known, _)| *known == name);
        found.map(|(_, activation)| *activation).ok_or_else(|| {
            let known = NAMES.iter().map(|(known, _)| *known);
            Error::invalid(unknown("activation", name, known))
        })
    }
}

impl Activation {
    /// The op; `None` for the identity.
    fn op(self) -> Option<ScalarOp> {
        Some(match self {
            Activation::Identity => return None,
            Activation::Relu => ScalarOp::Relu,
            Activation::Relu6 => ScalarOp::ClampTo {
                lo: Real(0.0),
                hi: Real(6.0),
            },
            Activation::LeakyRelu(slope) => ScalarOp::LeakyRelu { alpha: Real(slope) },
            Activation::Elu(alpha) => ScalarOp::Elu { alpha: Real(alpha) },
            // The constants of the paper's appendix.
            Activation::Selu => ScalarOp::Selu {
                alpha: Real(1.6732632423543772),
                gamma: Real(1.0507009873554805),
            },
            Activation::Gelu => ScalarOp::Gelu,
            Activation::GeluTanh => ScalarOp::GeluTanh,
            Activation::Silu => ScalarOp::Silu,
            Activation::Mish => ScalarOp::Mish,
            Activation::Tanh => ScalarOp::Tanh,
            Activation::Sigmoid => ScalarOp::Sigmoid,
            Activation::Softplus => ScalarOp::Softplus,
            Activation::Softsign => ScalarOp::Softsign,
            Activation::HardSwish => ScalarOp::HardSwish,
            Activation::HardSigmoid => ScalarOp::HardSigmoid {
                alpha: Real(1.0 / 6.0),
                beta: Real(0.5),
            },
        })
    }
}

impl Model {
    /// Each element by an activation. To choose it by name, pass `"relu".parse()?`.
    ///
    /// Errors with `InvalidInput` on a slope or `alpha` of infinity or NaN.
    pub fn activation(&mut self, x: ValueId, activation: Activation) -> Result<ValueId> {
        if let Activation::LeakyRelu(number) | Activation::Elu(number) = activation
            && !number.is_finite()
        {
            return Err(Error::invalid(format!(
                "activation: {number}, expected a finite number"
            )));
        }
        match activation.op() {
            Some(op) => self.builder().map(op, &[x]),
            None => Ok(x),
        }
    }
}
