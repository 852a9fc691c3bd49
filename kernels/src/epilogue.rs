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
use crate::simd::{Simd, Task};
use crate::vmath;

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
        self.kind < EpilogueKind::AddScalar as u32
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
unsafe fn load<S: Simd>(s: S, p: *const f32, n: usize) -> S::F {
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
}

impl Epilogue {
    /// True when every op is known and its column stride allowed.
    pub(crate) fn valid(ops: &[EpilogueOp; MAX_EPILOGUE], n_ops: u32) -> bool {
        n_ops as usize <= MAX_EPILOGUE
            && ops[..n_ops as usize].iter().all(|op| {
                EpilogueKind::from_u32(op.kind).is_some()
                    && (op.col_stride == 0 || op.col_stride == 1)
            })
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
        };
        for op in ops {
            let Some(kind) = EpilogueKind::from_u32(op.kind) else {
                continue;
            };
            let mut operand = std::ptr::null_mut();
            if op.has_operand() {
                // SAFETY: the caller has a pointer for each operand.
                let base = unsafe { *operands.add(op.operand as usize) }.cast::<f32>();
                operand = base.wrapping_offset(batch_offset(batch_idx, op.batch_stride));
            }
            let resolved = Resolved {
                kind,
                operand: operand.cast_const(),
                row_stride: op.row_stride,
                col_stride: op.col_stride,
                p0: op.p0,
                p1: op.p1,
            };
            if out.n_rest > 0 || !out.fast.accept(&resolved) {
                out.rest[out.n_rest] = resolved;
                out.n_rest += 1;
            }
        }
        out
    }

    /// True when [`ApplyRest`] has an op to apply.
    pub(crate) fn has_rest(&self) -> bool {
        self.n_rest > 0
    }
}

/// Storage of results: as `f32`, or as 8-bit integers `saturate(round(x / divisor) + zero)`, ties
/// to even, NaN as 0.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Quantize {
    /// 0 for `f32` (or sums of integers), 1 for `u8`, 2 for `i8`.
    pub to: u32,
    /// Zero point.
    pub zero: i32,
    /// Scale.
    pub divisor: f32,
    /// Unused, zero.
    pub reserved: u32,
}

plain!(Quantize {
    to,
    zero,
    divisor,
    reserved
});

impl Quantize {
    /// To `u8`, or to `i8`.
    pub fn bytes(is_signed: bool, divisor: f32, zero: i32) -> Quantize {
        Quantize {
            to: 1 + u32::from(is_signed),
            zero,
            divisor,
            reserved: 0,
        }
    }

    /// True when `to` is known and `zero` is one of its values.
    pub fn is_valid(&self) -> bool {
        let range = match self.to {
            0 => return true,
            1 => 0..=255,
            2 => -128..=127,
            _ => return false,
        };
        range.contains(&self.zero)
    }

    /// Bytes of a stored element.
    pub fn size_bytes(&self) -> usize {
        if self.to == 0 { size_of::<f32>() } else { 1 }
    }
}

/// Stores a rectangle of `f32` elsewhere as 8-bit integers.
pub(crate) struct StoreBytes {
    pub(crate) quantize: Quantize,
    pub(crate) from: Rect,
    pub(crate) to: *mut u8,
    pub(crate) ld: usize,
}

impl Task for StoreBytes {
    type Out = ();

    /// Safety: the rectangle is readable, and as many bytes are writable in rows of `ld` bytes.
    #[inline(always)]
    unsafe fn run<S: Simd>(self, s: S) {
        // SAFETY: by contract.
        unsafe {
            match self.quantize.to {
                1 => self.rows::<S, true>(s),
                _ => self.rows::<S, false>(s),
            }
        }
    }
}

impl StoreBytes {
    /// # Safety
    /// As for [`StoreBytes::run`].
    #[inline(always)]
    unsafe fn rows<S: Simd, const UNSIGNED: bool>(&self, s: S) {
        let rounding = Rounding::<S, UNSIGNED>::new(s, self.quantize);
        for r in (0..self.from.rows).step_by(2) {
            let rows = [r, r + 1];
            let is_pair = UNSIGNED && r + 1 < self.from.rows;
            // SAFETY: by contract.
            unsafe {
                let mut j = 0;
                while is_pair && j + 2 * S::LANES <= self.from.cols {
                    let mut bytes = [[s.splat_i(0); 2]; 2];
                    for (bytes, r) in bytes.iter_mut().zip(rows) {
                        let from = self.from.c.add(r * self.from.ldc + j);
                        bytes[0] = rounding.apply(s, s.load(from));
                        bytes[1] = rounding.apply(s, s.load(from.add(S::LANES)));
                    }
                    let places = rows.map(|r| self.to.wrapping_add(r * self.ld + j));
                    s.store_byte_rows(places, bytes);
                    j += 2 * S::LANES;
                }
                while j < self.from.cols {
                    let n = self.from.cols - j;
                    for r in r..(r + 2).min(self.from.rows) {
                        let x = load(s, self.from.c.add(r * self.from.ldc + j), n);
                        s.store_bytes(self.to.add(r * self.ld + j), n, rounding.apply(s, x));
                    }
                    j += S::LANES;
                }
            }
        }
    }
}

/// [`Quantize`] in vectors, to unsigned or signed bytes.
struct Rounding<S: Simd, const UNSIGNED: bool> {
    /// Range of the quotient before `zero` is added. Whole numbers, so that clamping before
    /// rounding is the same as after.
    lo: S::F,
    hi: S::F,
    /// The quotient of NaN, whose result is 0.
    nan: S::F,
    divisor: S::F,
    divides: bool,
    /// One over the divisor, where the product is near enough to the quotient.
    inverse: Option<S::F>,
    zero: S::I,
}

/// Quotients that are as far from a whole number, or less, are rounded to the same one when they are
/// computed by the inverse: the products of at most 383 differ by less than `383 * 3 * 2^-24`, some
/// 7e-5.
const FAR_FROM_TIES: f32 = 0.4998;

impl<S: Simd, const UNSIGNED: bool> Rounding<S, UNSIGNED> {
    #[inline(always)]
    fn new(s: S, quantize: Quantize) -> Rounding<S, UNSIGNED> {
        let zero = quantize.zero;
        let (lo, hi) = if UNSIGNED { (0, 255) } else { (-128, 127) };
        let divides = quantize.divisor != 1.0;
        let has_inverse = |divisor: f32| divisor.is_normal() && (1.0 / divisor).is_normal();
        Rounding {
            lo: s.splat((lo - zero) as f32),
            hi: s.splat((hi - zero) as f32),
            nan: s.splat(-zero as f32),
            divisor: s.splat(quantize.divisor),
            divides,
            inverse: Some(quantize.divisor)
                .filter(|&divisor| divides && has_inverse(divisor))
                .map(|divisor| s.splat(1.0 / divisor)),
            zero: s.splat_i(zero),
        }
    }

    #[inline(always)]
    fn apply(&self, s: S, x: S::F) -> S::I {
        if !self.divides {
            return self.rounded(s, x);
        }
        // A division takes as long as all else together; where its rounding may matter is rare.
        if let Some(inverse) = self.inverse {
            let quotient = self.clamped(s, s.mul(x, inverse));
            let whole = s.to_int(quotient);
            let distance = s.abs(s.sub(quotient, s.to_float(whole)));
            if !s.any(s.lt(s.splat(FAR_FROM_TIES), distance)) {
                return s.add_i(whole, self.zero);
            }
        }
        self.rounded(s, s.div(x, self.divisor))
    }

    #[inline(always)]
    fn rounded(&self, s: S, x: S::F) -> S::I {
        s.add_i(s.to_int(self.clamped(s, x)), self.zero)
    }

    #[inline(always)]
    fn clamped(&self, s: S, x: S::F) -> S::F {
        // The lower end of NaN, which is 0 in unsigned bytes.
        let clamped = s.min(self.hi, s.max(x, self.lo));
        match UNSIGNED {
            true => clamped,
            false => s.select(s.eq(x, x), clamped, self.nan),
        }
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

/// Applies the ops that micro-kernels do not: one pass over the rectangle each.
pub(crate) struct ApplyRest<'a>(pub(crate) &'a Epilogue, pub(crate) Rect);

impl Task for ApplyRest<'_> {
    type Out = ();

    /// Safety: the rectangle is writable, the operands readable over it.
    #[inline(always)]
    unsafe fn run<S: Simd>(self, s: S) {
        for op in &self.0.rest[..self.0.n_rest] {
            // SAFETY: as the caller promised.
            unsafe { apply(s, op, self.1) }
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
