//! The table of tensor ops: name, attributes, operand count, class, type rule and doc in one entry each.
//!
//! Enum, printer, parser, verifier and docs derive from it. Element-wise ops have their own table in [`super::scalar`]
//! and appear here as [`Op::Map`].

/// Binds the attributes of an op, or returns an error: the table pairs each rule with its op.
macro_rules! attrs {
    ($op:expr, $variant:ident { $($field:ident),* }) => {
        let Op::$variant { $($field),* , .. } = $op else {
            return Err(super::OtherOp { expected: stringify!($variant), found: $op.name() }.into());
        };
    };
}

mod control;
mod conv;
mod gather;
mod map;
mod norm;
mod pool;
mod product;
mod reduce;
mod roi;
mod sample;
mod scatter;
mod select;
mod sort;
mod source;
mod state;
mod transfer;
mod view;

use super::attr::Attr;
use super::axes::Axes::{self, Aligned, Fixed, Leading};
use super::constant::ConstData;
use super::dim::Dim;
use super::eval::Evaluator::{self, Tensors};
use super::gradient::Gradient::{self, Rule, Zero};
use super::gradient::NO_RULE;
use super::graph::Graph;
use super::scalar::{CONVERSIONS, Real, ScalarOp};
use super::types::Type;
use super::work::{Count, Sizes};
use super::{axes, infer, work};
use crate::error::Error;
use crate::nearest::nearest;
use control::*;
use conv::*;
use gather::*;
use gristmill_runtime::{DType, Tensor};
use map::*;
use norm::*;
use pool::*;
use product::*;
use reduce::*;
use roi::*;
use sample::*;
use scatter::*;
use select::*;
use sort::*;
use source::*;
use state::*;
use transfer::*;
use view::*;

/// A rule in the row of another op.
struct OtherOp {
    expected: &'static str,
    found: &'static str,
}

impl From<OtherOp> for String {
    fn from(other: OtherOp) -> String {
        let OtherOp { expected, found } = other;
        format!("a rule of {expected} is used for {found}")
    }
}

impl From<OtherOp> for Error {
    fn from(other: OtherOp) -> Error {
        Error::internal(String::from(other))
    }
}

/// Kind of work of an op; decides the kind of cluster around it.
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
    /// Elements read of the first operand.
    pub reads: Reads,
}

/// The part of the first operand read by an op.
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
        infer: map_infer,
        eval: Tensors(map_eval),
        work: map_work,
        axes: Aligned(map_axes),
        tolerance: ROUNDED,
        gradient: map_gradient(s),
        reads: Reads::Whole,
    }
}

fn read<T: Attr>(
    attr: &mut dyn FnMut(&'static str) -> Result<String, String>,
    name: &'static str,
) -> Result<T, String> {
    let text = match attr(name) {
        // The attributes that a text need not have.
        Err(_) if name == "initial" => "none".to_owned(),
        Err(_) if name == "first" => "0".to_owned(),
        text => text?,
    };
    T::parse(&text).ok_or_else(|| format!("attribute {name} cannot be read from {text:?}"))
}

ops! {
    /// A tensor known at compile time.
    Constant { value: ConstData } "constant" 0..0 Source {
        infer: constant_infer, eval: Tensors(constant_eval),
        work: work::none, axes: Fixed, tolerance: EXACT,
        gradient: Zero,
    }
    /// Position along `axis`, as `dtype`, in a tensor of `shape`.
    Iota { dtype: DType, shape: Vec<Dim>, axis: usize } "iota" 0..0 Source {
        infer: iota_infer, eval: Tensors(iota_eval),
        work: work::none, axes: Fixed, tolerance: EXACT,
        gradient: Zero,
    }
    /// Random bits (`u32`): the element of position `i`, which is `first` and its place in row-major order, is word `i % 4` of Philox4x32-10 (Salmon et al., SC 2011) of the counter `i / 4`, stream and the key `seed`, low words first. The operand is the stream, one `i64`. Bits depend on position, seed and stream alone.
    RandomBits { seed: u64, first: u64, shape: Vec<Dim> } "random_bits" 1..1 Window {
        infer: random_bits_infer, eval: Tensors(random_bits_eval),
        work: random_bits_work, axes: Fixed, tolerance: EXACT,
        gradient: Zero,
    }
    /// Repeats axes of extent 1, and new leading axes, up to exactly `shape` (NumPy `broadcast_to`).
    Broadcast { shape: Vec<Dim> } "broadcast" 1..1 View {
        infer: broadcast_infer, eval: Tensors(broadcast_eval),
        work: work::none, axes: Leading(broadcast_axes), tolerance: EXACT,
        gradient: Rule(broadcast_gradient),
    }
    /// The same elements in row-major order under another shape.
    Reshape { shape: Vec<Dim> } "reshape" 1..1 View {
        infer: reshape_infer, eval: Tensors(reshape_eval),
        work: work::none, axes: Fixed, tolerance: EXACT,
        gradient: Rule(reshape_gradient),
    }
    /// Output axis `i` is input axis `perm[i]`.
    Transpose { perm: Vec<usize> } "transpose" 1..1 View {
        infer: transpose_infer, eval: Tensors(transpose_eval),
        work: work::none, axes: Fixed, tolerance: EXACT,
        gradient: Rule(transpose_gradient),
    }
    /// Along each axis, elements `start + i * step` for `i` in `0..size`. Steps may be negative, not zero.
    Slice { starts: Vec<Dim>, sizes: Vec<Dim>, steps: Vec<i64> } "slice" 1..1 View {
        infer: slice_infer, eval: Tensors(slice_eval),
        work: work::none, axes: Leading(slice_axes), tolerance: EXACT,
        gradient: Rule(slice_gradient), reads: Picked,
    }
    /// Adds `low` and `high` border elements per axis. The second operand is the scalar of `constant` mode; it is absent in the others.
    Pad { low: Vec<usize>, high: Vec<usize>, mode: PadMode } "pad" 1..2 View {
        infer: pad_infer, eval: Tensors(pad_eval),
        work: work::none, axes: Leading(pad_axes), tolerance: EXACT,
        gradient: Rule(pad_gradient),
    }
    /// Joins along `axis`.
    Concat { axis: usize } "concat" 1..many View {
        infer: concat_infer, eval: Tensors(concat_eval),
        work: work::none, axes: Aligned(concat_axes), tolerance: EXACT,
        gradient: Rule(concat_gradient),
    }
    /// `out[.., i.., ..] = data[.., indices[i..], ..]` at `axis` (NumPy `take`). Negative indices count from the end; one out of range is a run-time error.
    Gather { axis: usize } "gather" 2..2 Gather {
        infer: gather_infer, eval: Tensors(gather_eval),
        work: gather_work, axes: Leading(gather_axes), tolerance: EXACT,
        gradient: Rule(gather_gradient), reads: Picked,
    }
    /// `out[i, j, k] = data[i, indices[i, j, k], k]` for axis 1 (NumPy `take_along_axis`).
    GatherElements { axis: usize } "gather_elements" 2..2 Gather {
        infer: gather_elements_infer, eval: Tensors(gather_elements_eval),
        work: gather_work, axes: Fixed, tolerance: EXACT,
        gradient: Rule(gather_elements_gradient), reads: Picked,
    }
    /// Index tuples in the last axis of `indices` select slices of `data`; the first `batch_dims` axes are shared.
    GatherNd { batch_dims: usize } "gather_nd" 2..2 Gather {
        infer: gather_nd_infer, eval: Tensors(gather_nd_eval),
        work: gather_work, axes: Fixed, tolerance: EXACT,
        gradient: Rule(gather_nd_gradient), reads: Picked,
    }
    /// The positions (`i64`) that indices mean: each in an axis of the one extent, or, of several, in that of its place in the last axis, which
    /// holds tuples. Negative indices count from the end; one out of range is a run-time error. What reads the positions cannot fail by them.
    CheckIndices { extents: Vec<Dim> } "check_indices" 1..1 Gather {
        infer: check_indices_infer, eval: Tensors(check_indices_eval),
        work: gather_work, axes: Fixed, tolerance: EXACT,
        gradient: Zero,
    }
    /// The operand, of floats, whose elements are all finite: NaN or an infinity is a run-time error (TensorFlow `check_numerics`).
    CheckFinite "check_finite" 1..1 Gather {
        infer: check_finite_infer, eval: Tensors(check_finite_eval),
        work: gather_work, axes: Fixed, tolerance: EXACT,
        gradient: Rule(assign_gradient),
    }
    /// A copy of `data` with `updates` written at `indices` along `axis`; of several for one element, each joins in row-major order.
    ScatterElements { axis: usize, kind: ScatterKind } "scatter_elements" 3..3 Scatter {
        infer: scatter_elements_infer, eval: Tensors(scatter_elements_eval),
        work: scatter_work, axes: Fixed, tolerance: ROUNDED,
        gradient: Rule(scatter_gradient),
    }
    /// A copy of `data` with slices `updates` written at the index tuples of `indices`, joining in row-major order.
    ScatterNd { kind: ScatterKind } "scatter_nd" 3..3 Scatter {
        infer: scatter_nd_infer, eval: Tensors(scatter_nd_eval),
        work: scatter_work, axes: Fixed, tolerance: ROUNDED,
        gradient: Rule(scatter_gradient),
    }
    /// Reduces `axes`. Empty: sum 0, prod 1, mean NaN (0 for integers), max and min the dtype's least and greatest (infinities). Integer means accumulate in 64 bits and truncate.
    Reduce { kind: ReduceKind, axes: Vec<usize>, keepdims: bool } "reduce" 1..1 Reduce {
        infer: reduce_infer, eval: Tensors(reduce_eval),
        work: work::reduction, axes: Leading(reduce_axes), tolerance: ROUNDED,
        gradient: Rule(reduce_gradient),
    }
    /// Index (`i64`) of the first, or last, extreme element along `axis`; NaN counts as extreme.
    ArgReduce { kind: Extremum, axis: usize, keepdims: bool, select_last: bool } "arg_reduce" 1..1 Reduce {
        infer: arg_reduce_infer, eval: Tensors(arg_reduce_eval),
        work: work::reduction, axes: Leading(arg_reduce_axes), tolerance: EXACT,
        gradient: Zero,
    }
    /// `softmax` along `axis`, the maximum subtracted first. With `log`, its logarithm.
    Softmax { axis: usize, log: bool } "softmax" 1..1 Reduce {
        infer: softmax_infer, eval: Tensors(softmax_eval),
        work: softmax_work, axes: Leading(axes::lines), tolerance: ROUNDED,
        gradient: Rule(softmax_gradient),
    }
    /// `(x - mean) / sqrt(var + epsilon) * gamma + beta` over axes from `axis` on (Ba et al., arXiv:1607.06450). Operands x, gamma, beta; the latter two have the shape of the normalised axes.
    LayerNorm { axis: usize, epsilon: Real } "layer_norm" 3..3 Reduce {
        infer: norm_infer, eval: Tensors(layer_norm_eval),
        work: norm_work, axes: Leading(norm_axes), tolerance: ROUNDED,
        gradient: Rule(layer_norm_gradient),
    }
    /// `x / sqrt(mean(x^2) + epsilon) * gamma` over axes from `axis` on (Zhang and Sennrich, arXiv:1910.07467).
    RmsNorm { axis: usize, epsilon: Real } "rms_norm" 2..2 Reduce {
        infer: norm_infer, eval: Tensors(rms_norm_eval),
        work: norm_work, axes: Leading(norm_axes), tolerance: ROUNDED,
        gradient: Rule(rms_norm_gradient),
    }
    /// `(x - mean) / sqrt(var + epsilon)` over `axes`, in ascending order: one group of a group normalisation (Wu and He, arXiv:1803.08494, eq. 1 and 2).
    Standardize { axes: Vec<usize>, epsilon: Real } "standardize" 1..1 Reduce {
        infer: standardize_infer, eval: Tensors(standardize_eval),
        work: norm_work, axes: Leading(standardize_axes), tolerance: ROUNDED,
        gradient: Rule(standardize_gradient),
    }
    /// Matrix product of `[.., m, k]` and `[.., k, n]`; leading axes broadcast. Half types accumulate in `f32`.
    MatMul "matmul" 2..2 Contract {
        infer: matmul_infer, eval: Tensors(matmul_eval),
        work: matmul_work, axes: Leading(matmul_axes), tolerance: ROUNDED,
        gradient: Rule(matmul_gradient),
    }
    /// Convolution of `x` and weights, `groups` groups, layout as named.
    Conv { window: Window, groups: usize, layout: Layout } "conv" 2..2 Contract {
        infer: conv_infer, eval: Tensors(conv_eval),
        work: conv_work, axes: Fixed, tolerance: ROUNDED,
        gradient: Rule(conv_gradient),
    }
    /// Transposed convolution, channels first, weights `[in, out / groups, spatial..]`; `output_pads` extends the high side.
    ConvTranspose { window: Window, output_pads: Vec<usize>, groups: usize } "conv_transpose" 2..2 Contract {
        infer: conv_transpose_infer, eval: Tensors(conv_transpose_eval),
        work: conv_transpose_work, axes: Fixed, tolerance: ROUNDED,
        gradient: Rule(conv_transpose_gradient),
    }
    /// Pooling with windows of extent `size`. With `ceil`, windows that start inside the input or its low padding are kept, and their part outside of the padded input is not counted. A window over padding alone gives the least element, or a mean of NaN (0 for integers).
    Pool { kind: PoolKind, size: Vec<usize>, window: Window, ceil: bool, layout: Layout } "pool" 1..1 Window {
        infer: pool_infer, eval: Tensors(pool_eval),
        work: pool_work, axes: Fixed, tolerance: ROUNDED,
        gradient: Rule(pool_gradient),
    }
    /// Max pooling, channels first, with a second result: the row-major position (`i64`) of each first maximum in the whole input, -1 where there is none.
    MaxPoolIndices { size: Vec<usize>, window: Window, ceil: bool } "max_pool_indices" 1..1 Window {
        infer: max_pool_indices_infer, eval: Tensors(max_pool_indices_eval),
        work: pool_work, axes: Fixed, tolerance: EXACT,
        gradient: Rule(max_pool_indices_gradient),
    }
    /// Gradient of [`Op::Pool`] by maxima. Operands x and the cotangent of the pooled result; the result has the shape of x. Each window adds its cotangent to its first maximum in row-major order, the first NaN if there is any. A window over padding alone adds nothing.
    MaxPoolGrad { size: Vec<usize>, window: Window, ceil: bool, layout: Layout } "max_pool_grad" 2..2 Window {
        infer: max_pool_grad_infer, eval: Tensors(max_pool_grad_eval),
        work: max_pool_grad_work, axes: Fixed, tolerance: ROUNDED,
        gradient: Rule(max_pool_grad_gradient),
    }
    /// Regions of interest of `x: [n, c, h, w]`, each a grid of bins of `size: [rows, columns]`: `[regions, c, rows, columns]` (He et al., arXiv:1703.06870, section 3). Operands x, regions `[regions, 4]` of corners `x1, y1, x2, y2` in pixels after multiplication by `scale`, and their images (indices). A bin joins `sampling` bilinear samples along each axis, or as many as it has pixels, rounded up, where that is 0; more than [`MAX_ROI_SAMPLES`] are a run-time error. `max` takes the largest weighted pixel of all samples, as ONNX defines it. With `half_pixel` coordinates are those of pixels' corners; otherwise a region has at least one pixel. Samples outside of the image, and bins without samples, give 0.
    RoiAlign { kind: PoolKind, size: Vec<usize>, sampling: usize, scale: Real, half_pixel: bool } "roi_align" 3..3 Window {
        infer: roi_align_infer, eval: Tensors(roi_align_eval),
        // Four samples of four weighted pixels, and as much again for their positions.
        work: |s| work::windows(s, 64), axes: Fixed, tolerance: ROUNDED,
        gradient: NO_RULE,
    }
    /// Bilinear samples of `x: [n, c, h, w]` (Jaderberg et al., arXiv:1506.02025, eq. 5; Dai et al., arXiv:1703.06211, eq. 3): `[n, c, taps, points]`. Operands x, positions `[n, groups, taps, 2, points]` in pixels (down, then right), and an optional mask of weights `[n, groups, taps, points]` (Zhu et al., arXiv:1811.11168, eq. 1); groups share the channels. Pixels outside of the image are 0.
    Sample { groups: usize } "sample" 2..3 Window {
        infer: sample_infer, eval: Tensors(sample_eval),
        // Four weighted pixels, and as much again for their position.
        work: |s| work::windows(s, 16), axes: Fixed, tolerance: ROUNDED,
        gradient: Rule(sample_gradient),
    }
    /// `softmax(scale * q k^T + mask) v` over `[.., len, head]` operands q, k, v and an optional additive mask (Vaswani et al., arXiv:1706.03762, eq. 1). `causal` lets query `i` see keys `0..=i` only. A query that sees no key gives NaN.
    Attention { scale: Real, causal: bool } "attention" 3..4 Attention {
        infer: attention_infer, eval: Tensors(attention_eval),
        work: attention_work, axes: Fixed, tolerance: ROUNDED,
        gradient: Rule(attention_gradient),
    }
    /// The `k` greatest (or least) along `axis`, sorted, and their positions (`i64`); equal elements keep their order. NaN is greater than all.
    TopK { k: Dim, axis: usize, largest: bool } "top_k" 1..1 Sort {
        infer: top_k_infer, eval: Tensors(top_k_eval),
        work: top_k_work, axes: Fixed, tolerance: EXACT,
        gradient: Rule(top_k_gradient),
    }
    /// Running sum along `axis`.
    CumSum { axis: usize, exclusive: bool, reverse: bool } "cum_sum" 1..1 Scan {
        infer: cum_sum_infer, eval: Tensors(cum_sum_eval),
        work: cum_sum_work, axes: Leading(axes::lines), tolerance: ROUNDED,
        gradient: Rule(cum_sum_gradient),
    }
    /// Operands: condition (`bool`, one element), then the operands of both regions. Region 0 runs when true, else region 1.
    If "if" 1..many Control {
        infer: if_infer, eval: Evaluator::Branch,
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
        infer: loop_infer, eval: Evaluator::Repeat,
        work: work::none, axes: Fixed, tolerance: EXACT,
        gradient: Gradient::Iterations,
    }
    /// Operands: `carried` values, `scanned` sequences (axis 0), then invariants. The region takes carried, one element of each sequence, invariants and gives carried, then stacked elements. `reverse` walks from the end; results are stacked in the same direction.
    Scan { carried: usize, scanned: usize, length: Dim, reverse: bool } "scan" 1..many Control {
        infer: scan_infer, eval: Evaluator::Scan,
        work: work::none, axes: Fixed, tolerance: EXACT,
        gradient: Gradient::Steps,
    }
    /// Positions (`i64`) of the elements other than 0, in row-major order: column `i` of `[rank,
    /// count]` is that of the `i`th.
    NonZero { count: Dim } "non_zero" 1..1 Control {
        infer: non_zero_infer, eval: Evaluator::Selection(non_zero_eval),
        work: work::none, axes: Fixed, tolerance: EXACT,
        gradient: Zero,
    }
    /// The distinct slices along `axis`, or elements of the flat tensor; where each comes first;
    /// which one each slice is; how often each comes (all `i64`). Slices are sorted, NaN last, or
    /// in the order in which they come. NaN is equal to nothing.
    Unique { count: Dim, axis: Option<usize>, sorted: bool } "unique" 1..1 Control {
        infer: unique_infer, eval: Evaluator::Selection(unique_eval),
        work: work::none, axes: Fixed, tolerance: EXACT,
        gradient: NO_RULE,
    }
    /// Boxes that overlap no better one: `[count, 3]` of image, class and box, by image, class and
    /// falling score. Operands: boxes `f32[images, boxes, 4]`, scores `f32[images, classes,
    /// boxes]`, the most boxes of an image and class (`i64`), the ratio of intersection to union
    /// (`f32`) above which a box is dropped, and the score that a box must exceed (`f32`; negative
    /// infinity: any). Boxes are two opposite corners, or with `center` centre and extents.
    NonMaxSuppression { count: Dim, center: bool } "non_max_suppression" 5..5 Control {
        infer: non_max_suppression_infer, eval: Evaluator::Selection(non_max_suppression_eval),
        work: work::none, axes: Fixed, tolerance: EXACT,
        gradient: Zero,
    }
    /// Gives a symbol its value: the operand, one `i64` that is not negative, is from here on the
    /// extent that `symbol` stands for. The result is the operand.
    Extent { symbol: String } "extent" 1..1 Control {
        infer: extent_infer, eval: Evaluator::Extent,
        work: work::none, axes: Fixed, tolerance: EXACT,
        gradient: Zero,
    }
    /// The operand, which has this shape: symbols without a value get theirs from its extents; an
    /// extent other than the one that is named is a run-time error.
    Shaped { shape: Vec<Dim> } "shaped" 1..1 Control {
        infer: shaped_infer, eval: Evaluator::Shaped,
        work: work::none, axes: Fixed, tolerance: EXACT,
        gradient: NO_RULE,
    }
    /// A part of a graph that is compiled by itself, when all symbols in it have values: the region
    /// computes the results from the operands.
    Segment { number: usize } "segment" 0..many Control {
        infer: segment_infer, eval: Evaluator::Body,
        work: work::none, axes: Fixed, tolerance: EXACT,
        gradient: Gradient::None("gradients are made before a graph is cut into segments"),
    }
    /// Current value of a variable in a resource container; the initial one before the first assignment.
    ReadVariable { container: String, name: String, dtype: DType, shape: Vec<Dim>, initial: Option<ConstData> } "read_variable" 0..0 State {
        infer: read_variable_infer, eval: Evaluator::Read,
        work: work::none, axes: Fixed, tolerance: EXACT,
        gradient: Zero,
    }
    /// Sets a variable; the result is the new value.
    AssignVariable { container: String, name: String } "assign_variable" 1..1 State {
        infer: infer::same, eval: Evaluator::Assign,
        work: work::none, axes: Fixed, tolerance: EXACT,
        gradient: Rule(assign_gradient),
    }
    /// Gives the operand to device `to` under `key`; the result is the operand itself.
    Send { key: String, to: String } "send" 1..1 Transfer {
        infer: infer::same, eval: Evaluator::Send,
        work: work::none, axes: Fixed, tolerance: EXACT,
        gradient: PLACED,
    }
    /// The tensor sent by device `from` under `key`.
    Recv { key: String, from: String, dtype: DType, shape: Vec<Dim> } "recv" 0..0 Transfer {
        infer: recv_infer, eval: Evaluator::Receive,
        work: work::none, axes: Fixed, tolerance: EXACT,
        gradient: PLACED,
    }
    /// Element-wise reduction of operands of one type, in their order. As many results, all the same: result `i` is for where operand `i` is made.
    AllReduce { kind: ReduceKind } "all_reduce" 1..many Transfer {
        infer: all_reduce_infer, eval: Tensors(all_reduce_eval),
        work: work::none, axes: Fixed, tolerance: ROUNDED,
        gradient: Rule(all_reduce_gradient),
    }
    /// The part of one rank in an all-reduce by a library: element-wise reduction of operands of one type, where operand `rank` is made. The other operands only have to be made before. Ranks of one all-reduce have the same `group`, and no two a device in common.
    AllReduceRank { kind: ReduceKind, group: usize, rank: usize } "all_reduce_rank" 1..many Transfer {
        infer: all_reduce_rank_infer, eval: Tensors(all_reduce_rank_eval),
        work: work::none, axes: Fixed, tolerance: ROUNDED,
        gradient: PLACED,
    }
    /// The same in the graph of one device, with the operand that is there: its reduction with those of the other `devices`, of which this is number `rank`.
    Collective { kind: ReduceKind, key: String, rank: usize, devices: Vec<String> } "collective" 1..1 Transfer {
        infer: collective_infer, eval: Evaluator::Elsewhere,
        work: work::none, axes: Fixed, tolerance: ROUNDED,
        gradient: PLACED,
    }
    /// One kernel: the region computes the results from the operands. Its node number `anchor` decides how the kernel loops; number `root` defines the results.
    Cluster { kind: ClusterKind, anchor: usize, root: usize } "cluster" 0..many Cluster {
        infer: cluster_infer, eval: Evaluator::Body,
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
