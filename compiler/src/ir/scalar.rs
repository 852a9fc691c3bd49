//! Element-wise operations: one table, one meaning each.
//!
//! Interpreter and back ends implement the primitive operations. Composite ones (`relu`, `gelu`, ...) are defined
//! once, here, as a program over primitives ([`ScalarOp::expand`]); interpreter, Cranelift and CUDA texts derive from it.
//! Arithmetic on `f16` and `bf16` is defined as: widen to `f32`, compute, round once; so primitives other than casts,
//! comparisons of equal bits and selects never see half types.

use crate::ir::vecprog::{Reg, VecProg};
use gristmill_runtime::DType;
use std::fmt;

/// A real attribute: `f64` with bitwise equality, so that ops can be hashed.
#[derive(Clone, Copy, Debug)]
pub struct Real(pub f64);

impl PartialEq for Real {
    fn eq(&self, other: &Real) -> bool {
        self.0.to_bits() == other.0.to_bits()
    }
}
impl Eq for Real {}
impl std::hash::Hash for Real {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        self.0.to_bits().hash(state);
    }
}
impl PartialOrd for Real {
    fn partial_cmp(&self, other: &Real) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Real {
    fn cmp(&self, other: &Real) -> std::cmp::Ordering {
        self.0.total_cmp(&other.0)
    }
}
impl From<f64> for Real {
    fn from(v: f64) -> Real {
        Real(v)
    }
}
impl fmt::Display for Real {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.0)
    }
}

/// Dtypes that the operands of an element-wise op may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Domain {
    /// Floating point.
    Float,
    /// Floating point or integer.
    Number,
    /// Integer.
    Int,
    /// `bool`.
    Bool,
    /// Everything.
    Any,
}

impl Domain {
    fn takes(self, d: DType) -> bool {
        match self {
            Domain::Float => d.is_float(),
            Domain::Number => d != DType::Bool,
            Domain::Int => d.is_int(),
            Domain::Bool => d == DType::Bool,
            Domain::Any => true,
        }
    }
}

/// One row of the table of element-wise ops.
#[derive(Clone, Copy, Debug)]
pub struct ScalarSpec {
    /// Text name.
    pub name: &'static str,
    /// Number of operands.
    pub arity: usize,
    /// Operand dtypes.
    pub domain: Domain,
    /// True when backends implement it; false when [`ScalarOp::expand`] defines it.
    pub primitive: bool,
    /// Rough cost in floating-point operations per element.
    pub flops: u32,
    /// Allowed error against the interpreter, in units of the last place of `f32`/`f64` (0: exact).
    pub tolerance_ulps: u32,
    /// First line of the doc.
    pub doc: &'static str,
}

macro_rules! scalar_ops {
    ($( $(#[doc = $doc:literal])* $variant:ident $({ $($attr:ident),* })? $name:literal $arity:literal $domain:ident $kind:ident $flops:literal ulps $ulps:literal; )*) => {
        /// An element-wise operation.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum ScalarOp {
            $( $(#[doc = $doc])* $variant $({ $(#[allow(missing_docs)] $attr: Real),* })?, )*
            /// Conversion. Float to int truncates and saturates (NaN gives 0), int to int wraps, anything to `bool` is `!= 0`.
            Cast(DType),
            /// The bits of an element as those of a dtype of the same width. To `bool`, bits other than 0 are true.
            BitCast(DType),
        }

        impl ScalarOp {
            /// The row of the table.
            pub fn spec(&self) -> &'static ScalarSpec {
                match self {
                    $( ScalarOp::$variant { .. } => &ScalarSpec {
                        name: $name, arity: $arity, domain: Domain::$domain, primitive: scalar_ops!(@prim $kind), flops: $flops,
                        tolerance_ulps: $ulps, doc: concat!($($doc),*),
                    }, )*
                    ScalarOp::Cast(_) => &ScalarSpec {
                        name: "cast", arity: 1, domain: Domain::Any, primitive: true, flops: 1, tolerance_ulps: 0,
                        doc: "Conversion between dtypes.",
                    },
                    ScalarOp::BitCast(_) => &ScalarSpec {
                        name: "bit_cast", arity: 1, domain: Domain::Any, primitive: true, flops: 1, tolerance_ulps: 0,
                        doc: "The bits of an element as another dtype of the same width.",
                    },
                }
            }

            /// Attributes in table order. The target dtype of [`CONVERSIONS`] is not among them.
            pub fn attrs(&self) -> Vec<(&'static str, Real)> {
                match *self {
                    $( ScalarOp::$variant $({ $($attr),* })? => vec![$($((stringify!($attr), $attr)),*)?], )*
                    ScalarOp::Cast(_) | ScalarOp::BitCast(_) => vec![],
                }
            }

            /// The op of a name, its attributes taken from `attr`. [`CONVERSIONS`] are not made here.
            pub fn from_name(name: &str, attr: &mut dyn FnMut(&'static str) -> Result<f64, String>) -> Option<Result<ScalarOp, String>> {
                match name {
                    $( $name => { scalar_ops!(@attrs attr $variant $({ $($attr),* })?) } )*
                    _ => None,
                }
            }

            /// One of each, attributes at representative values; for tests and tables, without [`CONVERSIONS`].
            pub fn samples() -> Vec<ScalarOp> {
                vec![$( ScalarOp::$variant $({ $($attr: Real(scalar_ops!(@sample $attr))),* })? ),*]
            }
        }
    };
    (@attrs $get:ident $variant:ident) => { Some(Ok(ScalarOp::$variant)) };
    (@attrs $get:ident $variant:ident { $($attr:ident),* }) => {{
        $( let $attr = match $get(stringify!($attr)) {
            Ok(value) => Real(value),
            Err(message) => return Some(Err(message)),
        }; )*
        Some(Ok(ScalarOp::$variant { $($attr),* }))
    }};
    (@prim primitive) => { true };
    (@prim composite) => { false };
    (@sample alpha) => { 0.25 };
    (@sample beta) => { 0.5 };
    (@sample lo) => { -0.75 };
    (@sample hi) => { 1.5 };
    (@sample gamma) => { 1.0625 };
}

scalar_ops! {
    /// `-x`; wraps for integers.
    Neg "neg" 1 Number primitive 1 ulps 0;
    /// Absolute value; wraps at the least integer.
    Abs "abs" 1 Number primitive 1 ulps 0;
    /// -1, 0 or 1; NaN and zeros are kept.
    Sign "sign" 1 Number primitive 2 ulps 0;
    /// Round towards minus infinity.
    Floor "floor" 1 Float primitive 1 ulps 0;
    /// Round towards plus infinity.
    Ceil "ceil" 1 Float primitive 1 ulps 0;
    /// Round to nearest, ties to even.
    Round "round" 1 Float primitive 1 ulps 0;
    /// Round towards zero.
    Trunc "trunc" 1 Float primitive 1 ulps 0;
    /// Square root.
    Sqrt "sqrt" 1 Float primitive 6 ulps 0;
    /// `1 / sqrt(x)`.
    Rsqrt "rsqrt" 1 Float composite 8 ulps 2;
    /// `1 / x`.
    Recip "recip" 1 Float composite 4 ulps 0;
    /// `e^x`.
    Exp "exp" 1 Float primitive 12 ulps 4;
    /// `e^x - 1`, accurate near 0.
    Expm1 "expm1" 1 Float primitive 16 ulps 8;
    /// Natural logarithm.
    Log "log" 1 Float primitive 14 ulps 4;
    /// `ln(1 + x)`, accurate near 0.
    Log1p "log1p" 1 Float primitive 18 ulps 8;
    /// Sine of radians.
    Sin "sin" 1 Float primitive 16 ulps 4;
    /// Cosine of radians.
    Cos "cos" 1 Float primitive 16 ulps 4;
    /// Tangent of radians.
    Tan "tan" 1 Float primitive 24 ulps 8;
    /// Inverse sine.
    Asin "asin" 1 Float primitive 24 ulps 8;
    /// Inverse cosine.
    Acos "acos" 1 Float primitive 24 ulps 8;
    /// Inverse tangent.
    Atan "atan" 1 Float primitive 24 ulps 8;
    /// Hyperbolic sine.
    Sinh "sinh" 1 Float primitive 24 ulps 8;
    /// Hyperbolic cosine.
    Cosh "cosh" 1 Float primitive 24 ulps 8;
    /// Hyperbolic tangent.
    Tanh "tanh" 1 Float primitive 16 ulps 8;
    /// Inverse hyperbolic sine.
    Asinh "asinh" 1 Float primitive 30 ulps 8;
    /// Inverse hyperbolic cosine.
    Acosh "acosh" 1 Float primitive 30 ulps 8;
    /// Inverse hyperbolic tangent.
    Atanh "atanh" 1 Float primitive 30 ulps 8;
    /// Gauss error function.
    Erf "erf" 1 Float primitive 20 ulps 8;
    /// Logical not.
    Not "not" 1 Bool primitive 1 ulps 0;
    /// Bitwise complement.
    BitNot "bit_not" 1 Int primitive 1 ulps 0;
    /// True for NaN.
    IsNan "is_nan" 1 Float composite 1 ulps 0;
    /// True for plus infinity.
    IsPosInf "is_pos_inf" 1 Float composite 1 ulps 0;
    /// True for minus infinity.
    IsNegInf "is_neg_inf" 1 Float composite 1 ulps 0;
    /// `max(x, 0)`.
    Relu "relu" 1 Number composite 1 ulps 0;
    /// `1 / (1 + e^-x)`.
    Sigmoid "sigmoid" 1 Float composite 18 ulps 8;
    /// `x/2 * (1 + erf(x / sqrt 2))` (Hendrycks and Gimpel, arXiv:1606.08415).
    Gelu "gelu" 1 Float composite 24 ulps 16;
    /// The tanh form of GELU (same paper, section 2).
    GeluTanh "gelu_tanh" 1 Float composite 24 ulps 16;
    /// `x * sigmoid(x)`.
    Silu "silu" 1 Float composite 19 ulps 8;
    /// `ln(1 + e^x)`.
    Softplus "softplus" 1 Float composite 30 ulps 8;
    /// `x / (1 + |x|)`.
    Softsign "softsign" 1 Float composite 6 ulps 2;
    /// `x * tanh(softplus(x))`.
    Mish "mish" 1 Float composite 48 ulps 16;
    /// `x * clamp(x / 6 + 1/2, 0, 1)`.
    HardSwish "hard_swish" 1 Float composite 5 ulps 2;
    /// `clamp(alpha x + beta, 0, 1)`.
    HardSigmoid { alpha, beta } "hard_sigmoid" 1 Float composite 4 ulps 2;
    /// `x` where `x >= 0`, else `alpha x`.
    LeakyRelu { alpha } "leaky_relu" 1 Float composite 2 ulps 0;
    /// `x` where `x > 0`, else `alpha (e^x - 1)`.
    Elu { alpha } "elu" 1 Float composite 18 ulps 8;
    /// `gamma x` where `x > 0`, else `gamma alpha (e^x - 1)`.
    Selu { alpha, gamma } "selu" 1 Float composite 19 ulps 8;
    /// `max(0, x) + min(0, alpha (e^(x / alpha) - 1))`.
    Celu { alpha } "celu" 1 Float composite 22 ulps 8;
    /// `x` where `x > alpha`, else 0.
    ThresholdedRelu { alpha } "thresholded_relu" 1 Float composite 2 ulps 0;
    /// `x - lambd`-like shrinking: `x + hi` where `x < lo`, `x - hi` where `x > -lo`, else 0.
    Shrink { lo, hi } "shrink" 1 Float composite 4 ulps 0;
    /// `min(max(x, lo), hi)` with constant limits; NaN is kept.
    ClampTo { lo, hi } "clamp_to" 1 Float composite 2 ulps 0;
    /// Sum; wraps for integers.
    Add "add" 2 Number primitive 1 ulps 0;
    /// Difference; wraps for integers.
    Sub "sub" 2 Number primitive 1 ulps 0;
    /// Product; wraps for integers.
    Mul "mul" 2 Number primitive 1 ulps 0;
    /// Quotient; truncates for integers, where a zero divisor is a run-time error.
    Div "div" 2 Number primitive 4 ulps 0;
    /// Remainder with the sign of the dividend (C `fmod`); a zero integer divisor is a run-time error.
    Rem "rem" 2 Number primitive 8 ulps 0;
    /// Remainder with the sign of the divisor (Python `%`); a zero integer divisor is a run-time error.
    Mod "mod" 2 Number primitive 10 ulps 0;
    /// `x^y`. Integers: wrapping; a negative exponent gives the truncated quotient (0, or +-1 for base +-1).
    Pow "pow" 2 Number primitive 40 ulps 8;
    /// Least; NaN if either is NaN.
    Min "min" 2 Number primitive 1 ulps 0;
    /// Greatest; NaN if either is NaN.
    Max "max" 2 Number primitive 1 ulps 0;
    /// Angle of the point `(y, x)` in radians.
    Atan2 "atan2" 2 Float primitive 30 ulps 8;
    /// Logical and.
    And "and" 2 Bool primitive 1 ulps 0;
    /// Logical or.
    Or "or" 2 Bool primitive 1 ulps 0;
    /// Logical exclusive or.
    Xor "xor" 2 Bool primitive 1 ulps 0;
    /// Bitwise and.
    BitAnd "bit_and" 2 Int primitive 1 ulps 0;
    /// Bitwise or.
    BitOr "bit_or" 2 Int primitive 1 ulps 0;
    /// Bitwise exclusive or.
    BitXor "bit_xor" 2 Int primitive 1 ulps 0;
    /// Shift left; a count of the width or more gives 0.
    Shl "shl" 2 Int primitive 1 ulps 0;
    /// Shift right, arithmetic for signed; a count of the width or more gives the sign fill.
    Shr "shr" 2 Int primitive 1 ulps 0;
    /// Equal (false for NaN).
    Eq "eq" 2 Any primitive 1 ulps 0;
    /// Not equal (true for NaN).
    Ne "ne" 2 Any primitive 1 ulps 0;
    /// Less.
    Lt "lt" 2 Number primitive 1 ulps 0;
    /// Less or equal.
    Le "le" 2 Number primitive 1 ulps 0;
    /// Greater.
    Gt "gt" 2 Number primitive 1 ulps 0;
    /// Greater or equal.
    Ge "ge" 2 Number primitive 1 ulps 0;
    /// `x` where `x >= 0`, else `slope * x`.
    Prelu "prelu" 2 Number composite 2 ulps 0;
    /// Second operand where the first is true, else the third.
    Select "select" 3 Any primitive 1 ulps 0;
    /// `min(max(x, lo), hi)`; NaN is kept.
    Clamp "clamp" 3 Number composite 2 ulps 0;
}

/// Ops whose attribute is the dtype of the result.
pub const CONVERSIONS: [fn(DType) -> ScalarOp; 2] = [ScalarOp::Cast, ScalarOp::BitCast];

impl fmt::Display for ScalarOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.spec().name)
    }
}

impl ScalarOp {
    /// Dtype of the result, or why the operand dtypes do not fit.
    pub fn result_dtype(&self, args: &[DType]) -> Result<DType, String> {
        let spec = self.spec();
        if args.len() != spec.arity {
            return Err(format!("takes {} operands, got {}", spec.arity, args.len()));
        }
        let checked = match self {
            ScalarOp::Select if args[0] != DType::Bool => {
                return Err(format!("condition must be bool, got {}", args[0]));
            }
            ScalarOp::Select => &args[1..],
            _ => args,
        };
        if let Some(d) = checked.iter().find(|d| !spec.domain.takes(**d)) {
            return Err(format!(
                "operand dtype {d} is not supported; expected {:?}",
                spec.domain
            )
            .to_lowercase());
        }
        if let Some(d) = checked.iter().find(|d| **d != checked[0]) {
            return Err(format!("operand dtypes differ: {} and {d}", checked[0]));
        }
        use ScalarOp::*;
        Ok(match self {
            Cast(to) => *to,
            BitCast(to) if to.size_bytes() != checked[0].size_bytes() => {
                return Err(format!("{} and {to} differ in width", checked[0]));
            }
            BitCast(to) => *to,
            Eq | Ne | Lt | Le | Gt | Ge | IsNan | IsPosInf | IsNegInf => DType::Bool,
            _ => checked[0],
        })
    }

    /// True when `op(a, b) == op(b, a)`.
    pub fn is_commutative(&self) -> bool {
        use ScalarOp::*;
        matches!(
            self,
            Add | Mul | Min | Max | And | Or | Xor | BitAnd | BitOr | BitXor | Eq | Ne
        )
    }

    /// Appends this op to `p` as primitives and returns the result register. Operand dtypes must have been checked by
    /// [`ScalarOp::result_dtype`].
    pub fn expand(self, p: &mut VecProg, args: &[Reg]) -> Reg {
        let d = p.dtype(*args.last().expect("every op has an operand"));
        let takes_narrow = matches!(
            self,
            ScalarOp::Cast(_) | ScalarOp::BitCast(_) | ScalarOp::Select
        );
        let widen = d.is_narrow_float() && !takes_narrow;
        if widen {
            let wide: Vec<Reg> = args
                .iter()
                .map(|&a| p.op(ScalarOp::Cast(DType::F32), &[a]))
                .collect();
            let r = self.expand(p, &wide);
            return if p.dtype(r) == DType::F32 {
                p.op(ScalarOp::Cast(d), &[r])
            } else {
                r
            };
        }
        if let ScalarOp::Cast(to) = self {
            return expand_cast(p, args[0], to);
        }
        if let ScalarOp::BitCast(to) = self {
            return expand_bit_cast(p, args[0], to);
        }
        if self.spec().primitive {
            p.op(self, args)
        } else {
            self.expand_composite(p, args)
        }
    }

    fn expand_composite(self, p: &mut VecProg, args: &[Reg]) -> Reg {
        use ScalarOp::*;
        let x = args[0];
        let d = p.dtype(x);
        match self {
            Rsqrt => {
                let (one, root) = (p.real(d, 1.0), p.op(Sqrt, &[x]));
                p.op(Div, &[one, root])
            }
            Recip => {
                let one = p.real(d, 1.0);
                p.op(Div, &[one, x])
            }
            IsNan => p.op(Ne, &[x, x]),
            IsPosInf | IsNegInf => {
                let inf = p.real(
                    d,
                    if self == IsPosInf {
                        f64::INFINITY
                    } else {
                        f64::NEG_INFINITY
                    },
                );
                p.op(Eq, &[x, inf])
            }
            Relu => {
                let zero = p.real(d, 0.0);
                p.op(Max, &[x, zero])
            }
            Clamp => {
                let low = p.op(Max, &[x, args[1]]);
                p.op(Min, &[low, args[2]])
            }
            ClampTo { lo, hi } => clamp(p, x, lo.0, hi.0),
            Prelu => {
                let scaled = p.op(Mul, &[x, args[1]]);
                where_ge(p, x, 0.0, x, scaled)
            }
            LeakyRelu { alpha } => {
                let scaled = times(p, x, alpha.0);
                where_ge(p, x, 0.0, x, scaled)
            }
            ThresholdedRelu { alpha } => {
                let (a, zero) = (p.real(d, alpha.0), p.real(d, 0.0));
                let c = p.op(Gt, &[x, a]);
                p.op(Select, &[c, x, zero])
            }
            Shrink { lo, hi } => expand_shrink(p, x, lo.0, hi.0),
            HardSigmoid { alpha, beta } => {
                let t = affine(p, x, alpha.0, beta.0);
                clamp(p, t, 0.0, 1.0)
            }
            HardSwish => {
                let t = affine(p, x, 1.0 / 6.0, 0.5);
                let t = clamp(p, t, 0.0, 1.0);
                p.op(Mul, &[x, t])
            }
            Softsign => {
                let a = p.op(Abs, &[x]);
                let den = plus(p, a, 1.0);
                p.op(Div, &[x, den])
            }
            _ => self.expand_transcendental(p, x),
        }
    }

    fn expand_transcendental(self, p: &mut VecProg, x: Reg) -> Reg {
        use ScalarOp::*;
        match self {
            Sigmoid => sigmoid(p, x),
            Silu => {
                let s = sigmoid(p, x);
                p.op(Mul, &[x, s])
            }
            Gelu => {
                let t = times(p, x, std::f64::consts::FRAC_1_SQRT_2);
                let e = p.op(Erf, &[t]);
                half_times_one_plus(p, x, e)
            }
            GeluTanh => {
                let sq = p.op(Mul, &[x, x]);
                let t = affine(p, sq, 0.044715, 1.0);
                let t = p.op(Mul, &[x, t]);
                let t = times(p, t, (2.0 / std::f64::consts::PI).sqrt());
                let e = p.op(Tanh, &[t]);
                half_times_one_plus(p, x, e)
            }
            Softplus => softplus(p, x),
            Mish => {
                let s = softplus(p, x);
                let t = p.op(Tanh, &[s]);
                p.op(Mul, &[x, t])
            }
            Elu { alpha } => elu(p, x, 1.0, alpha.0, 1.0),
            Selu { alpha, gamma } => elu(p, x, gamma.0, gamma.0 * alpha.0, 1.0),
            Celu { alpha } => elu(p, x, 1.0, alpha.0, alpha.0),
            _ => unreachable!("every composite op of the table is expanded"),
        }
    }
}

/// Casts that no backend has as one step go through `f32` (half types) or `u8` (`bool`).
fn expand_cast(p: &mut VecProg, x: Reg, to: DType) -> Reg {
    let from = p.dtype(x);
    if from == to {
        return x;
    }
    if to == DType::Bool && from.is_narrow_float()
        || from.is_narrow_float() && to != DType::F32 && to != DType::F64
    {
        let wide = p.op(ScalarOp::Cast(DType::F32), &[x]);
        return expand_cast(p, wide, to);
    }
    if from.is_narrow_float() && to == DType::F64 {
        let wide = p.op(ScalarOp::Cast(DType::F32), &[x]);
        return p.op(ScalarOp::Cast(to), &[wide]);
    }
    if to.is_narrow_float() && !from.is_float() {
        // 64-bit integers round to f64 first: its 53 bits cannot change a rounding to 11 or 8 bits by double rounding
        // except at exact ties, which f64 keeps exact below 2^53.
        let wide = p.op(ScalarOp::Cast(DType::F64), &[x]);
        return p.op(ScalarOp::Cast(to), &[wide]);
    }
    p.op(ScalarOp::Cast(to), &[x])
}

/// Between integers a cast wraps, which keeps the bits; `bool` is cast as `u8`.
fn expand_bit_cast(p: &mut VecProg, x: Reg, to: DType) -> Reg {
    let from = p.dtype(x);
    let is_integer = |d: DType| d.is_int() || d == DType::Bool;
    if is_integer(from) && is_integer(to) {
        return expand_cast(p, x, to);
    }
    match (from, to) {
        _ if from == to => x,
        (DType::Bool, _) => {
            let bits = p.op(ScalarOp::Cast(DType::U8), &[x]);
            p.op(ScalarOp::BitCast(to), &[bits])
        }
        (_, DType::Bool) => {
            let bits = p.op(ScalarOp::BitCast(DType::U8), &[x]);
            p.op(ScalarOp::Cast(to), &[bits])
        }
        _ => p.op(ScalarOp::BitCast(to), &[x]),
    }
}

fn times(p: &mut VecProg, x: Reg, k: f64) -> Reg {
    let k = p.real(p.dtype(x), k);
    p.op(ScalarOp::Mul, &[x, k])
}

fn plus(p: &mut VecProg, x: Reg, k: f64) -> Reg {
    let k = p.real(p.dtype(x), k);
    p.op(ScalarOp::Add, &[x, k])
}

fn affine(p: &mut VecProg, x: Reg, scale: f64, offset: f64) -> Reg {
    let t = if scale == 1.0 { x } else { times(p, x, scale) };
    plus(p, t, offset)
}

fn clamp(p: &mut VecProg, x: Reg, lo: f64, hi: f64) -> Reg {
    let d = p.dtype(x);
    let (lo, hi) = (p.real(d, lo), p.real(d, hi));
    let t = p.op(ScalarOp::Max, &[x, lo]);
    p.op(ScalarOp::Min, &[t, hi])
}

fn where_ge(p: &mut VecProg, x: Reg, limit: f64, yes: Reg, no: Reg) -> Reg {
    let limit = p.real(p.dtype(x), limit);
    let c = p.op(ScalarOp::Ge, &[x, limit]);
    p.op(ScalarOp::Select, &[c, yes, no])
}

fn sigmoid(p: &mut VecProg, x: Reg) -> Reg {
    let n = p.op(ScalarOp::Neg, &[x]);
    let e = p.op(ScalarOp::Exp, &[n]);
    let den = plus(p, e, 1.0);
    let one = p.real(p.dtype(x), 1.0);
    p.op(ScalarOp::Div, &[one, den])
}

fn half_times_one_plus(p: &mut VecProg, x: Reg, e: Reg) -> Reg {
    let h = times(p, x, 0.5);
    let e = plus(p, e, 1.0);
    p.op(ScalarOp::Mul, &[h, e])
}

/// `max(x, 0) + log1p(exp(-|x|))`, which does not overflow.
fn softplus(p: &mut VecProg, x: Reg) -> Reg {
    let a = p.op(ScalarOp::Abs, &[x]);
    let n = p.op(ScalarOp::Neg, &[a]);
    let e = p.op(ScalarOp::Exp, &[n]);
    let l = p.op(ScalarOp::Log1p, &[e]);
    let zero = p.real(p.dtype(x), 0.0);
    let m = p.op(ScalarOp::Max, &[x, zero]);
    p.op(ScalarOp::Add, &[m, l])
}

/// `pos * x` where `x > 0`, else `neg * expm1(x / inner)`.
fn elu(p: &mut VecProg, x: Reg, pos: f64, neg: f64, inner: f64) -> Reg {
    let t = if inner == 1.0 {
        x
    } else {
        times(p, x, 1.0 / inner)
    };
    let e = p.op(ScalarOp::Expm1, &[t]);
    let e = times(p, e, neg);
    let linear = if pos == 1.0 { x } else { times(p, x, pos) };
    let zero = p.real(p.dtype(x), 0.0);
    let c = p.op(ScalarOp::Gt, &[x, zero]);
    p.op(ScalarOp::Select, &[c, linear, e])
}

fn expand_shrink(p: &mut VecProg, x: Reg, lo: f64, hi: f64) -> Reg {
    let d = p.dtype(x);
    let (low, high, zero) = (p.real(d, lo), p.real(d, -lo), p.real(d, 0.0));
    let (up, down) = (plus(p, x, hi), plus(p, x, -hi));
    let is_high = p.op(ScalarOp::Gt, &[x, high]);
    let is_low = p.op(ScalarOp::Lt, &[x, low]);
    let t = p.op(ScalarOp::Select, &[is_high, down, zero]);
    p.op(ScalarOp::Select, &[is_low, up, t])
}
