//! Element-wise ops that are applied to a tile of the output while it is in registers or in the
//! first-level cache.
//!
//! A descriptor holds up to [`MAX_EPILOGUE`] ops, applied in order to each element
//! `x = c[row, col]`. An op with an operand reads `t = ptrs[OPERANDS + operand][batch *
//! batch_stride + row * row_stride + col * col_stride]`. Rows and columns are those of the whole
//! output: for a convolution, a row is an output pixel (n, oh, ow) and a column is an output
//! channel over all groups.
//!
//! The sequence [multiply by row vector or scalar] [add row vector] [add tensor] [relu or clamp],
//! each part optional, is applied to registers and costs next to nothing; each op after it is one
//! pass over the hot tile.

use crate::descriptor::plain;
use crate::gemm::batch_offset;
use crate::range::{Extremes, See, Seen};
use crate::simd::{Simd, Task};
use crate::vmath;
use std::cell::UnsafeCell;

/// Ops in one descriptor, at most.
pub const MAX_EPILOGUE: usize = 8;

/// Batch dimensions in one descriptor, at most.
pub const MAX_BATCH: usize = 4;

macro_rules! kinds {
    ($($(#[doc = $doc:literal])* $name:ident = $value:literal,)*) => {
        /// The function of an [`EpilogueOp`]: `x` is the element, `t` the operand, `p0` and `p1`
        /// are the parameters.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(u32)]
        pub enum EpilogueKind {
            $($(#[doc = $doc])* $name = $value,)*
        }

        impl EpilogueKind {
            /// Every kind.
            pub const ALL: &'static [EpilogueKind] = &[$(EpilogueKind::$name),*];

            /// The kind with this number.
            #[inline]
            pub fn from_u32(value: u32) -> Option<EpilogueKind> {
                match value {
                    $($value => Some(EpilogueKind::$name),)*
                    _ => None,
                }
            }
        }
    };
}

kinds! {
    /// `x + t`
    Add = 1,
    /// `x - t`
    Sub = 2,
    /// `t - x`
    RSub = 3,
    /// `x * t`
    Mul = 4,
    /// `x / t`
    Div = 5,
    /// `t / x`
    RDiv = 6,
    /// The larger of `x` and `t`; NaN if either is.
    Max = 7,
    /// The smaller of `x` and `t`; NaN if either is.
    Min = 8,
    /// `x`, whose smallest and largest element are noted at the operand and the one after it: see
    /// [`range`](crate::range). The last op of an epilogue.
    Range = 9,
    /// `x + p0`
    AddScalar = 16,
    /// `x * p0`
    MulScalar = 17,
    /// `max(x, 0)`; NaN stays.
    Relu = 18,
    /// `min(max(x, p0), p1)`; NaN stays.
    Clamp = 19,
    /// `x < 0 ? p0 * x : x`
    LeakyRelu = 20,
    /// `min(max(p0 * x + p1, 0), 1)`; ONNX's default is 0.2, 0.5.
    HardSigmoid = 21,
    /// `x * min(max(p0 * x + p1, 0), 1)`; ONNX's is 1/6, 0.5.
    HardSwish = 22,
    /// `-x`
    Neg = 23,
    /// `|x|`
    Abs = 24,
    /// `x * x`
    Square = 25,
    /// `sqrt(x)`
    Sqrt = 26,
    /// `1 / x`
    Reciprocal = 27,
    /// `1 / sqrt(x)`
    Rsqrt = 28,
    /// `x < 0 ? p0 * (e^x - 1) : x`
    Elu = 29,
    /// `e^x`
    Exp = 32,
    /// `ln(x)`
    Log = 33,
    /// Hyperbolic tangent.
    Tanh = 34,
    /// Error function.
    Erf = 35,
    /// `1 / (1 + e^-x)`
    Sigmoid = 36,
    /// `x * sigmoid(x)`
    Silu = 37,
    /// `x / 2 * (1 + erf(x / sqrt 2))`
    Gelu = 38,
    /// Gelu's approximation through tanh.
    GeluTanh = 39,
    /// `ln(1 + e^x)`
    Softplus = 40,
    /// `x * tanh(softplus(x))`
    Mish = 41,
}

/// One op of an epilogue. Strides are in elements.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Default)]
pub struct EpilogueOp {
    /// An [`EpilogueKind`] as its number.
    pub kind: u32,
    /// Index in `ptrs[OPERANDS..]`, for kinds with an operand.
    pub operand: u32,
    /// First parameter.
    pub p0: f32,
    /// Second parameter.
    pub p1: f32,
    /// Operand elements between rows; 0 broadcasts.
    pub row_stride: isize,
    /// Operand elements between columns: 1, or 0, which broadcasts.
    pub col_stride: isize,
    /// Operand elements between batch elements, per batch dimension of the descriptor.
    pub batch_stride: [isize; MAX_BATCH],
}

plain!(EpilogueOp {
    kind,
    operand,
    p0,
    p1,
    row_stride,
    col_stride,
    batch_stride
});

impl EpilogueOp {
    /// An op without an operand.
    pub fn unary(kind: EpilogueKind, p0: f32, p1: f32) -> EpilogueOp {
        EpilogueOp {
            kind: kind as u32,
            p0,
            p1,
            ..EpilogueOp::default()
        }
    }

    /// An op with one operand value per column, such as a bias.
    pub fn row_vec(kind: EpilogueKind, operand: u32) -> EpilogueOp {
        EpilogueOp {
            kind: kind as u32,
            operand,
            col_stride: 1,
            ..EpilogueOp::default()
        }
    }

    /// An op with one operand value per row.
    pub fn col_vec(kind: EpilogueKind, operand: u32) -> EpilogueOp {
        EpilogueOp {
            kind: kind as u32,
            operand,
            row_stride: 1,
            ..EpilogueOp::default()
        }
    }

    /// An op with an operand as large as the output, `ld` elements between its rows.
    pub fn tensor(kind: EpilogueKind, operand: u32, ld: isize) -> EpilogueOp {
        EpilogueOp {
            kind: kind as u32,
            operand,
            row_stride: ld,
            col_stride: 1,
            ..EpilogueOp::default()
        }
    }

    /// The op that notes the range of the elements: the smallest at an operand, the largest at the next.
    pub fn range(operand: u32) -> EpilogueOp {
        EpilogueOp {
            operand,
            ..EpilogueOp::unary(EpilogueKind::Range, 0.0, 0.0)
        }
    }

    /// Appends the op to the first `n` ones of a descriptor. False, and nothing appended, if there is no
    /// room.
    #[must_use]
    pub fn append_to(self, ops: &mut [EpilogueOp; MAX_EPILOGUE], n: &mut u32) -> bool {
        match ops.get_mut(*n as usize) {
            Some(free) => {
                *free = self;
                *n += 1;
                true
            }
            None => false,
        }
    }

    fn has_operand(&self) -> bool {
        self.kind < EpilogueKind::Range as u32
    }
}

/// An op with the address of its operand for one batch element.
#[derive(Clone, Copy)]
struct Resolved {
    kind: EpilogueKind,
    operand: *const f32,
    row_stride: isize,
    col_stride: isize,
    p0: f32,
    p1: f32,
}

/// Factor of a tile.
#[derive(Clone, Copy)]
pub(crate) enum Scale {
    One,
    All(f32),
    /// A factor per column.
    Columns(*const f32),
}

impl Scale {
    /// The factors of `n` columns from `col` on.
    ///
    /// # Safety
    /// The factors of these columns are readable.
    #[inline(always)]
    pub(crate) unsafe fn at<S: Simd>(&self, s: S, col: usize, n: usize) -> S::F {
        match *self {
            Scale::One => s.splat(1.0),
            Scale::All(x) => s.splat(x),
            // SAFETY: by contract.
            Scale::Columns(x) => unsafe { load(s, x.add(col), n) },
        }
    }
}

/// A vector, or its first `n` elements.
///
/// # Safety
/// So many are readable.
#[inline(always)]
pub(crate) unsafe fn load<S: Simd>(s: S, p: *const f32, n: usize) -> S::F {
    // SAFETY: by contract.
    unsafe {
        if n >= S::LANES {
            s.load(p)
        } else {
            s.load_n(p, n)
        }
    }
}

/// The part of an epilogue that micro-kernels apply to registers.
#[derive(Clone, Copy)]
pub(crate) struct Fast {
    /// Applied first.
    pub(crate) scale: Scale,
    /// Added to every row; null if absent.
    pub(crate) bias: *const f32,
    /// Added element-wise, after the bias; null if absent.
    pub(crate) residual: *const f32,
    pub(crate) residual_ld: isize,
    pub(crate) clamp: bool,
    pub(crate) lo: f32,
    pub(crate) hi: f32,
}

impl Fast {
    pub(crate) const NONE: Fast = Fast {
        scale: Scale::One,
        bias: std::ptr::null(),
        residual: std::ptr::null(),
        residual_ld: 0,
        clamp: false,
        lo: 0.0,
        hi: 0.0,
    };

    /// The part for the tile that starts at `row`, `col`.
    #[inline]
    pub(crate) fn at(&self, row: usize, col: usize) -> Fast {
        let mut out = *self;
        if let Scale::Columns(scale) = self.scale {
            out.scale = Scale::Columns(scale.wrapping_add(col));
        }
        if !self.bias.is_null() {
            out.bias = self.bias.wrapping_add(col);
        }
        if !self.residual.is_null() {
            out.residual = self
                .residual
                .wrapping_offset(row as isize * self.residual_ld)
                .wrapping_add(col);
        }
        out
    }

    /// The part applied to a vector of row `row`, from column `col` on, of which `n` columns count.
    ///
    /// # Safety
    /// The operands cover these columns.
    #[inline(always)]
    pub(crate) unsafe fn apply<S: Simd>(
        &self,
        s: S,
        mut x: S::F,
        row: usize,
        col: usize,
        n: usize,
    ) -> S::F {
        // SAFETY: by contract.
        unsafe {
            if !matches!(self.scale, Scale::One) {
                x = s.mul(x, self.scale.at(s, col, n));
            }
            if !self.bias.is_null() {
                x = s.add(x, load(s, self.bias.add(col), n));
            }
            if !self.residual.is_null() {
                let row = self.residual.offset(row as isize * self.residual_ld);
                x = s.add(x, load(s, row.add(col), n));
            }
        }
        match self.clamp {
            true => s.min(s.splat(self.hi), s.max(s.splat(self.lo), x)),
            false => x,
        }
    }

    /// Absorbs `op` if it continues the sequence scale, bias, residual, clamp.
    fn accept(&mut self, op: &Resolved) -> bool {
        let is_first = matches!(self.scale, Scale::One)
            && self.bias.is_null()
            && self.residual.is_null()
            && !self.clamp;
        match op.kind {
            EpilogueKind::MulScalar if is_first => self.scale = Scale::All(op.p0),
            EpilogueKind::Mul if is_first && op.row_stride == 0 && op.col_stride == 1 => {
                self.scale = Scale::Columns(op.operand);
            }
            EpilogueKind::Add if op.col_stride == 1 && !self.clamp && self.residual.is_null() => {
                if op.row_stride == 0 && self.bias.is_null() {
                    self.bias = op.operand;
                } else {
                    self.residual = op.operand;
                    self.residual_ld = op.row_stride;
                }
            }
            EpilogueKind::Relu if !self.clamp => {
                (self.clamp, self.lo, self.hi) = (true, 0.0, f32::INFINITY)
            }
            EpilogueKind::Clamp if !self.clamp => {
                (self.clamp, self.lo, self.hi) = (true, op.p0, op.p1)
            }
            _ => return false,
        }
        true
    }
}

/// An epilogue with its operands' addresses for one batch element.
pub(crate) struct Epilogue {
    pub(crate) fast: Fast,
    rest: [Resolved; MAX_EPILOGUE],
    n_rest: usize,
    range: Option<NotedRange>,
}

/// The range of the elements that one call computes, noted when its epilogue is dropped.
struct NotedRange {
    at: Extremes,
    seen: UnsafeCell<Seen>,
}

impl Drop for Epilogue {
    fn drop(&mut self) {
        if let Some(range) = &mut self.range {
            let extremes = range.seen.get_mut().extremes();
            // SAFETY: the addresses are those that `resolve` was given.
            unsafe { range.at.note(extremes) }
        }
    }
}

impl Epilogue {
    /// True when every op is known and its column stride allowed, and nothing follows on a range.
    pub(crate) fn valid(ops: &[EpilogueOp; MAX_EPILOGUE], n_ops: u32) -> bool {
        n_ops as usize <= MAX_EPILOGUE
            && ops[..n_ops as usize].iter().all(|op| {
                EpilogueKind::from_u32(op.kind).is_some()
                    && (op.col_stride == 0 || op.col_stride == 1)
            })
            && ops[..(n_ops as usize).saturating_sub(1)]
                .iter()
                .all(|op| op.kind != EpilogueKind::Range as u32)
    }

    /// # Safety
    /// `operands` holds a pointer for each operand that `ops` name; `ops` are valid.
    pub(crate) unsafe fn resolve(
        ops: &[EpilogueOp],
        operands: *const *mut u8,
        batch_idx: [usize; MAX_BATCH],
    ) -> Epilogue {
        let none = Resolved {
            kind: EpilogueKind::Relu,
            operand: std::ptr::null(),
            row_stride: 0,
            col_stride: 0,
            p0: 0.0,
            p1: 0.0,
        };
        let mut out = Epilogue {
            fast: Fast::NONE,
            rest: [none; MAX_EPILOGUE],
            n_rest: 0,
            range: None,
        };
        for op in ops {
            let Some(kind) = EpilogueKind::from_u32(op.kind) else {
                continue;
            };
            let mut operand = std::ptr::null_mut();
            // SAFETY: the caller has a pointer for each operand.
            let base = |i: u32| unsafe { *operands.add(i as usize) }.cast::<f32>();
            if op.has_operand() {
                operand =
                    base(op.operand).wrapping_offset(batch_offset(batch_idx, op.batch_stride));
            }
            if kind == EpilogueKind::Range {
                let at = Extremes {
                    smallest: base(op.operand),
                    largest: base(op.operand + 1),
                };
                let seen = UnsafeCell::new(Seen::NONE);
                out.range = Some(NotedRange { at, seen });
            }
            let resolved = Resolved {
                kind,
                operand: operand.cast_const(),
                row_stride: op.row_stride,
                col_stride: op.col_stride,
                p0: op.p0,
                p1: op.p1,
            };
            let is_noted = kind == EpilogueKind::Range;
            if !is_noted && (out.n_rest > 0 || !out.fast.accept(&resolved)) {
                out.rest[out.n_rest] = resolved;
                out.n_rest += 1;
            }
        }
        out
    }

    /// True when [`ApplyRest`] has an op to apply.
    pub(crate) fn has_rest(&self) -> bool {
        self.n_rest > 0 || self.range.is_some()
    }
}

/// A rectangle of the output.
#[derive(Clone, Copy)]
pub(crate) struct Rect {
    pub(crate) c: *mut f32,
    pub(crate) ldc: usize,
    /// First row and column, for operand addresses.
    pub(crate) row: usize,
    pub(crate) col: usize,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
}

impl Rect {
    /// A single row.
    pub(crate) fn row(c: *mut f32, cols: usize) -> Rect {
        Rect {
            c,
            ldc: 0,
            row: 0,
            col: 0,
            rows: 1,
            cols,
        }
    }
}

/// Applies the ops that micro-kernels do not: one pass over the rectangle each.
pub(crate) struct ApplyRest<'a>(pub(crate) &'a Epilogue, pub(crate) Rect);

impl Task for ApplyRest<'_> {
    type Out = ();

    /// Safety: the rectangle is writable, the operands readable over it.
    #[inline(always)]
    unsafe fn run<S: Simd>(self, s: S) {
        let ApplyRest(epilogue, rect) = self;
        for op in &epilogue.rest[..epilogue.n_rest] {
            // SAFETY: as the caller promised.
            unsafe { apply(s, op, rect) }
        }
        if let Some(range) = &epilogue.range {
            // SAFETY: nothing else refers to what this call has seen.
            unsafe { See(&mut *range.seen.get(), rect).run(s) }
        }
    }
}

/// A function of one element.
pub(crate) trait Map: Copy {
    fn map<S: Simd>(self, s: S, x: S::F) -> S::F;
}

/// A function of an element and its operand.
trait Zip: Copy {
    fn zip<S: Simd>(self, s: S, x: S::F, t: S::F) -> S::F;
}

macro_rules! map {
    ($name:ident $(($($p:ident),*))?, |$s:ident, $x:ident| $body:expr) => {
        #[derive(Clone, Copy)]
        struct $name $(($(map!(@ty $p)),*))?;
        impl Map for $name {
            #[inline(always)]
            fn map<S: Simd>(self, $s: S, $x: S::F) -> S::F {
                $(let $name($($p),*) = self;)?
                $body
            }
        }
    };
    (@ty $p:ident) => { f32 };
}

macro_rules! zip {
    ($name:ident, |$s:ident, $x:ident, $t:ident| $body:expr) => {
        #[derive(Clone, Copy)]
        struct $name;
        impl Zip for $name {
            #[inline(always)]
            fn zip<S: Simd>(self, $s: S, $x: S::F, $t: S::F) -> S::F {
                $body
            }
        }
    };
}

zip!(Add, |s, x, t| s.add(x, t));
zip!(Sub, |s, x, t| s.sub(x, t));
zip!(RSub, |s, x, t| s.sub(t, x));
zip!(Mul, |s, x, t| s.mul(x, t));
zip!(Div, |s, x, t| s.div(x, t));
zip!(RDiv, |s, x, t| s.div(t, x));
// `max` returns its second operand if either is NaN: that loses a NaN in `t` only if it comes
// first.
zip!(Max, |s, x, t| s.select(s.eq(t, t), s.max(t, x), t));
zip!(Min, |s, x, t| s.select(s.eq(t, t), s.min(t, x), t));
map!(AddScalar(a), |s, x| s.add(x, s.splat(a)));
map!(MulScalar(a), |s, x| s.mul(x, s.splat(a)));
map!(Clamp(lo, hi), |s, x| s
    .min(s.splat(hi), s.max(s.splat(lo), x)));
map!(LeakyRelu(a), |s, x| {
    s.select(s.lt(x, s.zero()), s.mul(x, s.splat(a)), x)
});
map!(HardSigmoid(a, b), |s, x| {
    let line = s.fma(x, s.splat(a), s.splat(b));
    s.min(s.splat(1.0), s.max(s.zero(), line))
});
map!(HardSwish(a, b), |s, x| {
    s.mul(x, HardSigmoid(a, b).map(s, x))
});
map!(Neg, |s, x| s.neg(x));
map!(Unchanged, |_s, x| x);
map!(Abs, |s, x| s.abs(x));
map!(Square, |s, x| s.mul(x, x));
map!(Elu(a), |s, x| {
    let negative = s.mul(vmath::expm1(s, x), s.splat(a));
    s.select(s.lt(x, s.zero()), negative, x)
});

/// Chooses the function of an op: kinds with an operand have a `Zip` of the same name, others a
/// `Map`.
macro_rules! by_kind {
    ($s:ident, $op:ident, $rect:ident; $($zip:ident)*; $($kind:ident => $map:expr,)*) => {
        match $op.kind {
            $(EpilogueKind::$zip => zip_rect($s, $op, $rect, $zip),)*
            $(EpilogueKind::$kind => map_rect($s, $rect, $map),)*
        }
    };
}

/// # Safety
/// As for [`ApplyRest`].
#[inline(always)]
unsafe fn apply<S: Simd>(s: S, op: &Resolved, rect: Rect) {
    let (p0, p1) = (op.p0, op.p1);
    // SAFETY: as the caller promised.
    unsafe {
        by_kind! { s, op, rect;
            Add Sub RSub Mul Div RDiv Max Min;
            Range => Unchanged,
            AddScalar => AddScalar(p0),
            MulScalar => MulScalar(p0),
            Relu => Clamp(0.0, f32::INFINITY),
            Clamp => Clamp(p0, p1),
            LeakyRelu => LeakyRelu(p0),
            HardSigmoid => HardSigmoid(p0, p1),
            HardSwish => HardSwish(p0, p1),
            Neg => Neg,
            Abs => Abs,
            Square => Square,
            Sqrt => vmath::Sqrt,
            Reciprocal => vmath::Reciprocal,
            Rsqrt => vmath::Rsqrt,
            Elu => Elu(p0),
            Exp => vmath::Exp,
            Log => vmath::Log,
            Tanh => vmath::Tanh,
            Erf => vmath::Erf,
            Sigmoid => vmath::Sigmoid,
            Silu => vmath::Silu,
            Gelu => vmath::Gelu,
            GeluTanh => vmath::GeluTanh,
            Softplus => vmath::Softplus,
            Mish => vmath::Mish,
        }
    }
}

/// # Safety
/// The rectangle is writable.
#[inline(always)]
unsafe fn map_rect<S: Simd, T: Map>(s: S, rect: Rect, f: T) {
    for r in 0..rect.rows {
        let row = rect.c.wrapping_add(r * rect.ldc);
        let mut j = 0;
        while j < rect.cols {
            let n = rect.cols - j;
            // SAFETY: at most `cols` elements of a row of the rectangle.
            unsafe { s.store_n(row.add(j), n, f.map(s, s.load_n(row.add(j), n))) };
            j += S::LANES;
        }
    }
}

/// # Safety
/// The rectangle is writable, the operand readable over it.
#[inline(always)]
unsafe fn zip_rect<S: Simd, T: Zip>(s: S, op: &Resolved, rect: Rect, f: T) {
    for r in 0..rect.rows {
        let row = rect.c.wrapping_add(r * rect.ldc);
        let operand = op.operand.wrapping_offset(
            (rect.row + r) as isize * op.row_stride + rect.col as isize * op.col_stride,
        );
        let mut j = 0;
        while j < rect.cols {
            let n = rect.cols - j;
            // SAFETY: at most `cols` elements of a row of the rectangle, and of the operand's row.
            unsafe {
                let t = if op.col_stride == 1 {
                    s.load_n(operand.add(j), n)
                } else {
                    s.splat(*operand)
                };
                s.store_n(row.add(j), n, f.zip(s, s.load_n(row.add(j), n), t));
            }
            j += S::LANES;
        }
    }
}
