//! The table of tensor ops: name, attributes, operand count, class, type rule and doc in one entry each.
//!
//! Enum, printer, parser, verifier and docs derive from it. Element-wise ops have their own table in [`super::scalar`]
//! and appear here as [`Op::Map`].

use super::attr::Attr;
use super::axes::Axes::{self, Aligned, Fixed, Leading};
use super::constant::ConstData;
use super::dim::Dim;
use super::eval::Evaluator::{self, Tensors};
use super::gradient::Gradient::{self, Rule, Zero};
use super::gradient::{self, NO_RULE, contract, conv, index, norm, pool, reduce, scatter, view};
use super::graph::Graph;
use super::scalar::{CONVERSIONS, Real, ScalarOp};
use super::types::Type;
use super::work::{Count, Sizes};
use super::{axes, eval, infer, work};
use crate::nearest::nearest;
use gristmill_runtime::{DType, Tensor};

/// Kind of work of an op; decides the kind of cluster that can hold it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum OpClass {
    /// Makes a value from nothing: constant, iota.
    Source,
    /// Element-wise with broadcasting.
    Map,
    /// Only moves elements; an index map inside a cluster.
    View,
    /// Reduces axes.
    Reduce,
    /// Matrix product, convolution.
    Contract,
    /// Pooling, and other ops whose elements take a loop each.
    Window,
    /// Fused attention.
    Attention,
    /// Reads at computed positions.
    Gather,
    /// Writes at computed positions.
    Scatter,
    /// Sort and top-k.
    Sort,
    /// Cumulative ops along an axis.
    Scan,
    /// Regions: if, loop, scan.
    Control,
    /// Variables.
    State,
    /// Send, recv, collectives.
    Transfer,
    /// A cluster.
    Cluster,
}

/// Type rule: result types, or why the operands do not fit.
pub type Infer = fn(&Op, &[Type], &[Graph]) -> Result<Vec<Type>, String>;

/// One row of the table.
pub struct OpSpec {
    /// Text name.
    pub name: &'static str,
    /// Definition of the results.
    pub doc: &'static str,
    /// Least and greatest number of operands.
    pub arity: (usize, usize),
    /// Kind of work.
    pub class: OpClass,
    /// Type rule.
    pub infer: Infer,
    /// Reference evaluator.
    pub eval: Evaluator,
    /// Arithmetic.
    pub work: fn(&Sizes) -> Count,
    /// The op below a transpose of its operands.
    pub axes: Axes,
    /// Largest error of a result where back ends are compared with the evaluator, relative to the largest element and beside the dtype's
    /// resolution; equal results are expected where it is 0.
    pub tolerance: f64,
    /// Cotangents of the operands from those of the results.
    pub gradient: Gradient,
    /// Elements of the first operand that are read.
    pub reads: Reads,
}

/// The part of the first operand that an op reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reads {
    /// All elements.
    Whole,
    /// At most as many elements as the op writes.
    Picked,
}

/// Most samples that a bin of a region of interest takes along one axis.
pub const MAX_ROI_SAMPLES: usize = 1 << 14;

/// Tolerance of ops that move or choose elements.
const EXACT: f64 = 0.0;
/// Tolerance of ops that round.
const ROUNDED: f64 = 1e-6;

/// Gradient of ops that come with placement.
const PLACED: Gradient = Gradient::None("gradients are made before ops are placed on devices");

/// Any number of operands.
const MANY: usize = usize::MAX;

macro_rules! attr_enum {
    ($(#[$doc:meta])* $name:ident { $($(#[$vdoc:meta])* $variant:ident $text:literal),* $(,)? }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum $name { $($(#[$vdoc])* $variant),* }

        impl Attr for $name {
            fn print(&self) -> String {
                match self { $($name::$variant => $text.to_owned()),* }
            }
            fn parse(text: &str) -> Option<Self> {
                match text { $($text => Some($name::$variant),)* _ => None }
            }
        }
    };
}

attr_enum! {
    /// Function of a reduction.
    ReduceKind {
        /// Sum.
        Sum "sum",
        /// Arithmetic mean.
        Mean "mean",
        /// Greatest; NaN wins.
        Max "max",
        /// Least; NaN wins.
        Min "min",
        /// Product.
        Prod "prod",
    }
}
attr_enum! {
    /// Greatest or least.
    Extremum {
        /// Greatest.
        Max "max",
        /// Least.
        Min "min",
    }
}
attr_enum! {
    /// Function that joins a scattered update with the element that is there.
    ScatterKind {
        /// Replaces; of several updates of one element the last in row-major order wins.
        Set "set",
        /// Adds.
        Add "add",
        /// Multiplies.
        Mul "mul",
        /// Greatest.
        Max "max",
        /// Least.
        Min "min",
    }
}
attr_enum! {
    /// Elements of the border of a pad.
    PadMode {
        /// The scalar operand.
        Constant "constant",
        /// The mirrored interior, the edge not repeated.
        Reflect "reflect",
        /// The nearest edge element.
        Edge "edge",
        /// The opposite side.
        Wrap "wrap",
    }
}
attr_enum! {
    /// Where the channel axis of activations and the matching order of convolution weights is.
    Layout {
        /// `[n, c, spatial..]`, weights `[out, in / groups, spatial..]`.
        ChannelsFirst "channels_first",
        /// `[n, spatial.., c]`, weights `[spatial.., in / groups, out]`.
        ChannelsLast "channels_last",
    }
}
attr_enum! {
    /// Function of a pooling window.
    PoolKind {
        /// Greatest; padding never wins.
        Max "max",
        /// Mean over the elements inside the tensor.
        Avg "avg",
        /// Mean over the window, padding counted.
        AvgIncludePad "avg_include_pad",
    }
}
attr_enum! {
    /// Kind of the op that decides how a cluster loops.
    ClusterKind {
        /// Element-wise over views.
        Map "map",
        /// Reduction with prologue and epilogue.
        Reduce "reduce",
        /// Matrix product or convolution with epilogue.
        Contract "contract",
        /// Pooling.
        Window "window",
        /// Fused attention.
        Attention "attention",
        /// Reads at computed positions.
        Gather "gather",
        /// Writes at computed positions.
        Scatter "scatter",
        /// Sort and top-k.
        Sort "sort",
        /// Cumulative ops.
        Scan "scan",
    }
}

/// Geometry of a convolution's or pooling's windows, per spatial axis.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Window {
    /// Step between windows.
    pub strides: Vec<usize>,
    /// Step between the taps of a window.
    pub dilations: Vec<usize>,
    /// Padding before the first element.
    pub pads_low: Vec<usize>,
    /// Padding after the last element.
    pub pads_high: Vec<usize>,
}

/// The error of a name that no op has, with the nearest one that there is.
fn unknown_op(name: &str) -> String {
    let names = Op::catalogue().into_iter().map(|(name, ..)| name);
    match nearest(name, names, 1)[..] {
        [near] => format!("unknown op {name:?}; did you mean {near:?}?"),
        _ => format!("unknown op {name:?}"),
    }
}

macro_rules! ops {
    ($( $(#[doc = $doc:literal])* $variant:ident $({ $($attr:ident : $ty:ty),* })? $name:literal $min:literal..$max:tt $class:ident {
        infer: $infer:path, eval: $eval:expr,
        work: $work:expr, axes: $axes:expr, tolerance: $tolerance:expr, gradient: $gradient:expr, $(reads: $reads:ident,)?
    } )*) => {
        /// A tensor op with its attributes.
        #[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum Op {
            /// Element-wise op; operands broadcast as NumPy's do.
            Map(ScalarOp),
            $( $(#[doc = $doc])* $variant $({ $(#[allow(missing_docs)] $attr: $ty),* })?, )*
        }

        impl Op {
            /// The row of the table.
            pub fn spec(&self) -> OpSpec {
                match self {
                    Op::Map(s) => map_spec(*s),
                    $( Op::$variant { .. } => OpSpec {
                        name: $name, doc: concat!($($doc),*), arity: ($min, ops!(@max $max)), class: OpClass::$class, infer: $infer, eval: $eval,
                        work: $work, axes: $axes, tolerance: $tolerance, gradient: $gradient, reads: ops!(@reads $($reads)?),
                    }, )*
                }
            }

            /// Attributes in table order, as text. A variable without an initial value has no such attribute.
            pub fn attrs(&self) -> Vec<(&'static str, String)> {
                let mut attrs = self.all_attrs();
                attrs.retain(|(name, text)| (*name, &text[..]) != ("initial", "none"));
                attrs
            }

            fn all_attrs(&self) -> Vec<(&'static str, String)> {
                match self {
                    Op::Map(ScalarOp::Cast(to) | ScalarOp::BitCast(to)) => vec![("to", to.print())],
                    Op::Map(s) => s.attrs().into_iter().map(|(n, v)| (n, v.print())).collect(),
                    $( Op::$variant $({ $($attr),* })? => vec![$($((stringify!($attr), Attr::print($attr))),*)?], )*
                }
            }

            /// The op with each dim of its attributes replaced by what `f` gives for it.
            pub fn map_dims(&self, f: &dyn Fn(&Dim) -> Dim) -> Op {
                match self {
                    Op::Map(s) => Op::Map(*s),
                    $( Op::$variant $({ $($attr),* })? => Op::$variant $({ $($attr: Attr::map_dims($attr, f)),* })?, )*
                }
            }

            /// The op of a text name; `attr` gives the text of an attribute.
            pub fn from_text(name: &str, attr: &mut dyn FnMut(&'static str) -> Result<String, String>) -> Result<Op, String> {
                if let Some(conversion) = CONVERSIONS.iter().find(|c| c(DType::F32).spec().name == name) {
                    return Ok(Op::Map(conversion(read(attr, "to")?)));
                }
                let mut real = |n: &'static str| Ok(read::<Real>(attr, n)?.0);
                if let Some(s) = ScalarOp::from_name(name, &mut real) {
                    return s.map(Op::Map);
                }
                match name {
                    $( $name => Ok(Op::$variant $({ $($attr: read(attr, stringify!($attr))?),* })?), )*
                    _ => Err(unknown_op(name)),
                }
            }

            /// Every op name with its gradient, element-wise ones left out.
            #[cfg(test)]
            pub(crate) fn gradients() -> Vec<(&'static str, Gradient)> {
                vec![$( ($name, $gradient) ),*]
            }

            /// Every op name with class and doc, element-wise ones last.
            pub fn catalogue() -> Vec<(&'static str, OpClass, &'static str)> {
                let mut all = vec![$( ($name, OpClass::$class, concat!($($doc),*)) ),*];
                let conversions = CONVERSIONS.map(|c| c(DType::F32));
                let scalar_ops = conversions.into_iter().chain(ScalarOp::samples());
                all.extend(scalar_ops.map(|s| (s.spec().name, OpClass::Map, s.spec().doc)));
                all
            }
        }
    };
    (@max many) => { MANY };
    (@max $n:literal) => { $n };
    (@reads) => { Reads::Whole };
    (@reads $reads:ident) => { Reads::$reads };
}

fn map_spec(s: ScalarOp) -> OpSpec {
    let row = s.spec();
    OpSpec {
        name: row.name,
        doc: row.doc,
        arity: (row.arity, row.arity),
        class: OpClass::Map,
        infer: infer::map,
        eval: Tensors(eval::map),
        work: work::map,
        axes: Aligned(axes::map),
        tolerance: ROUNDED,
        gradient: gradient::map::gradient(s),
        reads: Reads::Whole,
    }
}

fn read<T: Attr>(
    attr: &mut dyn FnMut(&'static str) -> Result<String, String>,
    name: &'static str,
) -> Result<T, String> {
    let text = match attr(name) {
        // The only attribute that a text need not have.
        Err(_) if name == "initial" => "none".to_owned(),
        text => text?,
    };
    T::parse(&text).ok_or_else(|| format!("attribute {name} cannot be read from {text:?}"))
}

ops! {
    /// A tensor known at compile time.
    Constant { value: ConstData } "constant" 0..0 Source {
        infer: infer::constant, eval: Tensors(eval::constant),
        work: work::none, axes: Fixed, tolerance: EXACT,
        gradient: Zero,
    }
    /// Position along `axis`, as `dtype`, in a tensor of `shape`.
    Iota { dtype: DType, shape: Vec<Dim>, axis: usize } "iota" 0..0 Source {
        infer: infer::iota, eval: Tensors(eval::iota),
        work: work::none, axes: Fixed, tolerance: EXACT,
        gradient: Zero,
    }
    /// Random bits (`u32`): element `i` in row-major order is word `i % 4` of Philox4x32-10 (Salmon et al., SC 2011) of the counter `i / 4`, stream and the key `seed`, low words first. The operand is the stream, one `i64`. Bits depend on position, seed and stream alone.
    RandomBits { seed: u64, shape: Vec<Dim> } "random_bits" 1..1 Window {
        infer: infer::random_bits, eval: Tensors(eval::random_bits),
        work: work::random_bits, axes: Fixed, tolerance: EXACT,
        gradient: Zero,
    }
    /// Repeats axes of extent 1, and new leading axes, up to exactly `shape` (NumPy `broadcast_to`).
    Broadcast { shape: Vec<Dim> } "broadcast" 1..1 View {
        infer: infer::broadcast, eval: Tensors(eval::broadcast),
        work: work::none, axes: Leading(axes::broadcast), tolerance: EXACT,
        gradient: Rule(view::broadcast),
    }
    /// The same elements in row-major order under another shape.
    Reshape { shape: Vec<Dim> } "reshape" 1..1 View {
        infer: infer::reshape, eval: Tensors(eval::reshape),
        work: work::none, axes: Fixed, tolerance: EXACT,
        gradient: Rule(view::reshape),
    }
    /// Output axis `i` is input axis `perm[i]`.
    Transpose { perm: Vec<usize> } "transpose" 1..1 View {
        infer: infer::transpose, eval: Tensors(eval::transpose),
        work: work::none, axes: Fixed, tolerance: EXACT,
        gradient: Rule(view::transpose),
    }
    /// Along each axis, elements `start + i * step` for `i` in `0..size`. Steps may be negative, not zero.
    Slice { starts: Vec<Dim>, sizes: Vec<Dim>, steps: Vec<i64> } "slice" 1..1 View {
        infer: infer::slice, eval: Tensors(eval::slice),
        work: work::none, axes: Leading(axes::slice), tolerance: EXACT,
        gradient: Rule(view::slice), reads: Picked,
    }
    /// Adds `low` and `high` border elements per axis. The second operand is the scalar of `constant` mode; it is absent in the others.
    Pad { low: Vec<usize>, high: Vec<usize>, mode: PadMode } "pad" 1..2 View {
        infer: infer::pad, eval: Tensors(eval::pad),
        work: work::none, axes: Leading(axes::pad), tolerance: EXACT,
        gradient: Rule(view::pad),
    }
    /// Joins along `axis`.
    Concat { axis: usize } "concat" 1..many View {
        infer: infer::concat, eval: Tensors(eval::concat),
        work: work::none, axes: Aligned(axes::concat), tolerance: EXACT,
        gradient: Rule(view::concat),
    }
    /// `out[.., i.., ..] = data[.., indices[i..], ..]` at `axis` (NumPy `take`). Negative indices count from the end; one out of range is a run-time error.
    Gather { axis: usize } "gather" 2..2 Gather {
        infer: infer::gather, eval: Tensors(eval::gather),
        work: work::gather, axes: Leading(axes::gather), tolerance: EXACT,
        gradient: Rule(index::gather), reads: Picked,
    }
    /// `out[i, j, k] = data[i, indices[i, j, k], k]` for axis 1 (NumPy `take_along_axis`).
    GatherElements { axis: usize } "gather_elements" 2..2 Gather {
        infer: infer::gather_elements, eval: Tensors(eval::gather_elements),
        work: work::gather, axes: Fixed, tolerance: EXACT,
        gradient: Rule(index::gather_elements), reads: Picked,
    }
    /// Index tuples in the last axis of `indices` select slices of `data`; the first `batch_dims` axes are shared.
    GatherNd { batch_dims: usize } "gather_nd" 2..2 Gather {
        infer: infer::gather_nd, eval: Tensors(eval::gather_nd),
        work: work::gather, axes: Fixed, tolerance: EXACT,
        gradient: Rule(index::gather_nd), reads: Picked,
    }
    /// The positions (`i64`) that indices mean: each in an axis of the one extent, or, of several, in that of its place in the last axis, which
    /// holds tuples. Negative indices count from the end; one out of range is a run-time error. What reads the positions cannot fail by them.
    CheckIndices { extents: Vec<Dim> } "check_indices" 1..1 Gather {
        infer: infer::check_indices, eval: Tensors(eval::check_indices),
        work: work::gather, axes: Fixed, tolerance: EXACT,
        gradient: Zero,
    }
    /// The operand, of floats, whose elements are all finite: NaN or an infinity is a run-time error (TensorFlow `check_numerics`).
    CheckFinite "check_finite" 1..1 Gather {
        infer: infer::check_finite, eval: Tensors(eval::check_finite),
        work: work::gather, axes: Fixed, tolerance: EXACT,
        gradient: Rule(gradient::state::assign),
    }
    /// A copy of `data` with `updates` written at `indices` along `axis`; of several for one element, each joins in row-major order.
    ScatterElements { axis: usize, kind: ScatterKind } "scatter_elements" 3..3 Scatter {
        infer: infer::scatter_elements, eval: Tensors(eval::scatter_elements),
        work: work::scatter, axes: Fixed, tolerance: ROUNDED,
        gradient: Rule(scatter::scatter),
    }
    /// A copy of `data` with slices `updates` written at the index tuples of `indices`, joining in row-major order.
    ScatterNd { kind: ScatterKind } "scatter_nd" 3..3 Scatter {
        infer: infer::scatter_nd, eval: Tensors(eval::scatter_nd),
        work: work::scatter, axes: Fixed, tolerance: ROUNDED,
        gradient: Rule(scatter::scatter),
    }
    /// Reduces `axes`. Empty: sum 0, prod 1, mean NaN (0 for integers), max and min the dtype's least and greatest (infinities). Integer means accumulate in 64 bits and truncate.
    Reduce { kind: ReduceKind, axes: Vec<usize>, keepdims: bool } "reduce" 1..1 Reduce {
        infer: infer::reduce, eval: Tensors(eval::reduce),
        work: work::reduction, axes: Leading(axes::reduce), tolerance: ROUNDED,
        gradient: Rule(reduce::reduce),
    }
    /// Index (`i64`) of the first, or last, extreme element along `axis`; NaN counts as extreme.
    ArgReduce { kind: Extremum, axis: usize, keepdims: bool, select_last: bool } "arg_reduce" 1..1 Reduce {
        infer: infer::arg_reduce, eval: Tensors(eval::arg_reduce),
        work: work::reduction, axes: Leading(axes::arg_reduce), tolerance: EXACT,
        gradient: Zero,
    }
    /// `softmax` along `axis`, the maximum subtracted first. With `log`, its logarithm.
    Softmax { axis: usize, log: bool } "softmax" 1..1 Reduce {
        infer: infer::softmax, eval: Tensors(eval::softmax),
        work: work::softmax, axes: Leading(axes::lines), tolerance: ROUNDED,
        gradient: Rule(norm::softmax),
    }
    /// `(x - mean) / sqrt(var + epsilon) * gamma + beta` over axes from `axis` on (Ba et al., arXiv:1607.06450). Operands x, gamma, beta; the latter two have the shape of the normalised axes.
    LayerNorm { axis: usize, epsilon: Real } "layer_norm" 3..3 Reduce {
        infer: infer::norm, eval: Tensors(eval::layer_norm),
        work: work::normalisation, axes: Leading(axes::norm), tolerance: ROUNDED,
        gradient: Rule(norm::layer_norm),
    }
    /// `x / sqrt(mean(x^2) + epsilon) * gamma` over axes from `axis` on (Zhang and Sennrich, arXiv:1910.07467).
    RmsNorm { axis: usize, epsilon: Real } "rms_norm" 2..2 Reduce {
        infer: infer::norm, eval: Tensors(eval::rms_norm),
        work: work::normalisation, axes: Leading(axes::norm), tolerance: ROUNDED,
        gradient: Rule(norm::rms_norm),
    }
    /// `(x - mean) / sqrt(var + epsilon)` over `axes`, in ascending order: one group of a group normalisation (Wu and He, arXiv:1803.08494, eq. 1 and 2).
    Standardize { axes: Vec<usize>, epsilon: Real } "standardize" 1..1 Reduce {
        infer: infer::standardize, eval: Tensors(eval::standardize),
        work: work::normalisation, axes: Leading(axes::standardize), tolerance: ROUNDED,
        gradient: Rule(norm::standardize),
    }
    /// Matrix product of `[.., m, k]` and `[.., k, n]`; leading axes broadcast. Half types accumulate in `f32`.
    MatMul "matmul" 2..2 Contract {
        infer: infer::matmul, eval: Tensors(eval::matmul),
        work: work::matmul, axes: Leading(axes::matmul), tolerance: ROUNDED,
        gradient: Rule(contract::matmul),
    }
    /// Convolution of `x` and weights, `groups` groups, layout as named.
    Conv { window: Window, groups: usize, layout: Layout } "conv" 2..2 Contract {
        infer: infer::conv, eval: Tensors(eval::conv),
        work: work::conv, axes: Fixed, tolerance: ROUNDED,
        gradient: Rule(conv::conv),
    }
    /// Transposed convolution, channels first, weights `[in, out / groups, spatial..]`; `output_pads` extends the high side.
    ConvTranspose { window: Window, output_pads: Vec<usize>, groups: usize } "conv_transpose" 2..2 Contract {
        infer: infer::conv_transpose, eval: Tensors(eval::conv_transpose),
        work: work::conv_transpose, axes: Fixed, tolerance: ROUNDED,
        gradient: Rule(conv::conv_transpose),
    }
    /// Pooling with windows of extent `size`. With `ceil`, windows that start inside the input or its low padding are kept, and their part outside of the padded input is not counted. A window over padding alone gives the least element, or a mean of NaN (0 for integers).
    Pool { kind: PoolKind, size: Vec<usize>, window: Window, ceil: bool, layout: Layout } "pool" 1..1 Window {
        infer: infer::pool, eval: Tensors(eval::pool),
        work: work::pool, axes: Fixed, tolerance: ROUNDED,
        gradient: Rule(pool::pool),
    }
    /// Max pooling, channels first, with a second result: the row-major position (`i64`) of each first maximum in the whole input, -1 where there is none.
    MaxPoolIndices { size: Vec<usize>, window: Window, ceil: bool } "max_pool_indices" 1..1 Window {
        infer: infer::max_pool_indices, eval: Tensors(eval::max_pool_indices),
        work: work::pool, axes: Fixed, tolerance: EXACT,
        gradient: Rule(pool::max_pool_indices),
    }
    /// Gradient of [`Op::Pool`] by maxima. Operands x and the cotangent of the pooled result; the result has the shape of x. Each window adds its cotangent to its first maximum in row-major order, the first NaN if there is any. A window over padding alone adds nothing.
    MaxPoolGrad { size: Vec<usize>, window: Window, ceil: bool, layout: Layout } "max_pool_grad" 2..2 Window {
        infer: infer::max_pool_grad, eval: Tensors(eval::max_pool_grad),
        work: work::max_pool_grad, axes: Fixed, tolerance: ROUNDED,
        gradient: Rule(pool::max_pool_grad),
    }
    /// Regions of interest of `x: [n, c, h, w]`, each a grid of bins of `size: [rows, columns]`: `[regions, c, rows, columns]` (He et al., arXiv:1703.06870, section 3). Operands x, regions `[regions, 4]` of corners `x1, y1, x2, y2` in pixels after multiplication by `scale`, and their images (indices). A bin joins `sampling` bilinear samples along each axis, or as many as it has pixels, rounded up, where that is 0; more than [`MAX_ROI_SAMPLES`] are a run-time error. `max` takes the largest weighted pixel of all samples, as ONNX defines it. With `half_pixel` coordinates are those of pixels' corners; otherwise a region has at least one pixel. Samples outside of the image, and bins without samples, give 0.
    RoiAlign { kind: PoolKind, size: Vec<usize>, sampling: usize, scale: Real, half_pixel: bool } "roi_align" 3..3 Window {
        infer: infer::roi_align, eval: Tensors(eval::roi_align),
        // Four samples of four weighted pixels, and as much again for their positions.
        work: |s| work::windows(s, 64), axes: Fixed, tolerance: ROUNDED,
        gradient: NO_RULE,
    }
    /// `softmax(scale * q k^T + mask) v` over `[.., len, head]` operands q, k, v and an optional additive mask (Vaswani et al., arXiv:1706.03762, eq. 1). `causal` lets query `i` see keys `0..=i` only. A query that sees no key gives NaN.
    Attention { scale: Real, causal: bool } "attention" 3..4 Attention {
        infer: infer::attention, eval: Tensors(eval::attention),
        work: work::attention, axes: Fixed, tolerance: ROUNDED,
        gradient: Rule(contract::attention),
    }
    /// The `k` greatest (or least) along `axis`, sorted, and their positions (`i64`); equal elements keep their order. NaN is greater than all.
    TopK { k: Dim, axis: usize, largest: bool } "top_k" 1..1 Sort {
        infer: infer::top_k, eval: Tensors(eval::top_k),
        work: work::sort, axes: Fixed, tolerance: EXACT,
        gradient: Rule(index::top_k),
    }
    /// Running sum along `axis`.
    CumSum { axis: usize, exclusive: bool, reverse: bool } "cum_sum" 1..1 Scan {
        infer: infer::cum_sum, eval: Tensors(eval::cum_sum),
        work: work::scan, axes: Leading(axes::lines), tolerance: ROUNDED,
        gradient: Rule(reduce::cum_sum),
    }
    /// Operands: condition (`bool`, one element), then the operands of both regions. Region 0 runs when true, else region 1.
    If "if" 1..many Control {
        infer: infer::if_, eval: Evaluator::Branch,
        work: work::none, axes: Fixed, tolerance: EXACT,
        gradient: Gradient::Branches,
    }
    /// Operands: trip count (`i64`), condition (`bool`), `carried` values, then invariants. The
    /// region takes iteration number, condition, carried, invariants and gives condition, carried,
    /// then one value per stacked result. Results: carried, stacked (`trip` rows: a loop with
    /// stacked results that ends after another count is a run-time error). Without stacked results
    /// `trip` is the number of iterations, or 0 where it is not known. A carried value may change
    /// an extent that its formal has as a symbol of its own.
    Loop { carried: usize, trip: Dim } "loop" 2..many Control {
        infer: infer::loop_, eval: Evaluator::Repeat,
        work: work::none, axes: Fixed, tolerance: EXACT,
        gradient: Gradient::Iterations,
    }
    /// Operands: `carried` values, `scanned` sequences (axis 0), then invariants. The region takes carried, one element of each sequence, invariants and gives carried, then stacked elements. `reverse` walks from the end; results are stacked in the same direction.
    Scan { carried: usize, scanned: usize, length: Dim, reverse: bool } "scan" 1..many Control {
        infer: infer::scan, eval: Evaluator::Scan,
        work: work::none, axes: Fixed, tolerance: EXACT,
        gradient: Gradient::Steps,
    }
    /// Positions (`i64`) of the elements other than 0, in row-major order: column `i` of `[rank,
    /// count]` is that of the `i`th.
    NonZero { count: Dim } "non_zero" 1..1 Control {
        infer: infer::non_zero, eval: Evaluator::Selection(eval::non_zero),
        work: work::none, axes: Fixed, tolerance: EXACT,
        gradient: Zero,
    }
    /// The distinct slices along `axis`, or elements of the flat tensor; where each comes first;
    /// which one each slice is; how often each comes (all `i64`). Slices are sorted, NaN last, or
    /// in the order in which they come. NaN is equal to nothing.
    Unique { count: Dim, axis: Option<usize>, sorted: bool } "unique" 1..1 Control {
        infer: infer::unique, eval: Evaluator::Selection(eval::unique),
        work: work::none, axes: Fixed, tolerance: EXACT,
        gradient: NO_RULE,
    }
    /// Boxes that overlap no better one: `[count, 3]` of image, class and box, by image, class and
    /// falling score. Operands: boxes `f32[images, boxes, 4]`, scores `f32[images, classes,
    /// boxes]`, the most boxes of an image and class (`i64`), the ratio of intersection to union
    /// (`f32`) above which a box is dropped, and the score that a box must exceed (`f32`; negative
    /// infinity: any). Boxes are two opposite corners, or with `center` centre and extents.
    NonMaxSuppression { count: Dim, center: bool } "non_max_suppression" 5..5 Control {
        infer: infer::non_max_suppression, eval: Evaluator::Selection(eval::non_max_suppression),
        work: work::none, axes: Fixed, tolerance: EXACT,
        gradient: Zero,
    }
    /// Gives a symbol its value: the operand, one `i64` that is not negative, is from here on the
    /// extent that `symbol` stands for. The result is the operand.
    Extent { symbol: String } "extent" 1..1 Control {
        infer: infer::extent, eval: Evaluator::Extent,
        work: work::none, axes: Fixed, tolerance: EXACT,
        gradient: Zero,
    }
    /// The operand, which has this shape: symbols without a value get theirs from its extents; an
    /// extent other than the one that is named is a run-time error.
    Shaped { shape: Vec<Dim> } "shaped" 1..1 Control {
        infer: infer::shaped, eval: Evaluator::Shaped,
        work: work::none, axes: Fixed, tolerance: EXACT,
        gradient: NO_RULE,
    }
    /// A part of a graph that is compiled by itself, when all symbols in it have values: the region
    /// computes the results from the operands.
    Segment { number: usize } "segment" 0..many Control {
        infer: infer::segment, eval: Evaluator::Body,
        work: work::none, axes: Fixed, tolerance: EXACT,
        gradient: Gradient::None("gradients are made before a graph is cut into segments"),
    }
    /// Current value of a variable in a resource container; the initial one before the first assignment.
    ReadVariable { container: String, name: String, dtype: DType, shape: Vec<Dim>, initial: Option<ConstData> } "read_variable" 0..0 State {
        infer: infer::read_variable, eval: Evaluator::Read,
        work: work::none, axes: Fixed, tolerance: EXACT,
        gradient: Zero,
    }
    /// Sets a variable; the result is the new value.
    AssignVariable { container: String, name: String } "assign_variable" 1..1 State {
        infer: infer::same, eval: Evaluator::Assign,
        work: work::none, axes: Fixed, tolerance: EXACT,
        gradient: Rule(gradient::state::assign),
    }
    /// Gives the operand to device `to` under `key`; the result is the operand itself.
    Send { key: String, to: String } "send" 1..1 Transfer {
        infer: infer::same, eval: Evaluator::Send,
        work: work::none, axes: Fixed, tolerance: EXACT,
        gradient: PLACED,
    }
    /// The tensor sent by device `from` under `key`.
    Recv { key: String, from: String, dtype: DType, shape: Vec<Dim> } "recv" 0..0 Transfer {
        infer: infer::recv, eval: Evaluator::Receive,
        work: work::none, axes: Fixed, tolerance: EXACT,
        gradient: PLACED,
    }
    /// Element-wise reduction of operands of one type, in their order. As many results, all the same: result `i` is for where operand `i` is made.
    AllReduce { kind: ReduceKind } "all_reduce" 1..many Transfer {
        infer: infer::all_reduce, eval: Tensors(eval::all_reduce),
        work: work::none, axes: Fixed, tolerance: ROUNDED,
        gradient: Rule(gradient::state::all_reduce),
    }
    /// The part of one rank in an all-reduce by a library: element-wise reduction of operands of one type, where operand `rank` is made. The other operands only have to be made before. Ranks of one all-reduce have the same `group`, and no two a device in common.
    AllReduceRank { kind: ReduceKind, group: usize, rank: usize } "all_reduce_rank" 1..many Transfer {
        infer: infer::all_reduce_rank, eval: Tensors(eval::all_reduce_rank),
        work: work::none, axes: Fixed, tolerance: ROUNDED,
        gradient: PLACED,
    }
    /// The same in the graph of one device, with the operand that is there: its reduction with those of the other `devices`, of which this is number `rank`.
    Collective { kind: ReduceKind, key: String, rank: usize, devices: Vec<String> } "collective" 1..1 Transfer {
        infer: infer::collective, eval: Evaluator::Elsewhere,
        work: work::none, axes: Fixed, tolerance: ROUNDED,
        gradient: PLACED,
    }
    /// One kernel: the region computes the results from the operands. Its node number `anchor` decides how the kernel loops; number `root` defines the results.
    Cluster { kind: ClusterKind, anchor: usize, root: usize } "cluster" 0..many Cluster {
        infer: infer::cluster, eval: Evaluator::Body,
        work: work::none, axes: Fixed, tolerance: EXACT,
        gradient: Gradient::None("gradients are made before ops are fused"),
    }
}

impl Op {
    /// A constant op.
    pub fn constant(value: Tensor) -> Op {
        Op::Constant {
            value: ConstData::held(value),
        }
    }

    /// Text name.
    pub fn name(&self) -> &'static str {
        self.spec().name
    }

    /// Kind of work.
    pub fn class(&self) -> OpClass {
        self.spec().class
    }
}
