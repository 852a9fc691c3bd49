//! Floating-point arithmetic: native where Rust has the operation, exact integer arithmetic for other rounding modes.

use super::{Decoder, Ins, unsupported};
use crate::{
    fault::Result,
    lanes::{Lane, LaneFn, Pair, Slots, binary, rare, ternary, unary},
    numeric::{
        approximate::{self, canonical, flush},
        exact::{Number, Rounding},
        format::{Bf16, F16, Format, Half, half_fma},
    },
    types::Type,
};

/// A lane function of `f32` operands: `$body`, with `.ftz` as the instruction asks.
macro_rules! single {
    ($ins:expr, $maker:ident, |$($x:ident),+| $body:expr) => {
        if $ins.has("ftz") {
            $maker(|$($x: f32),+| {
                $(let $x = flush($x);)+
                flush(canonical($body))
            })
        } else {
            $maker(|$($x: f32),+| canonical($body))
        }
    };
}

impl<'a> Decoder<'a> {
    /// `false` if the opcode is no floating-point arithmetic.
    pub(super) fn float(&mut self, ins: &Ins<'a>) -> Result<bool> {
        if matches!(ins.root(), "setp" | "set" | "selp" | "slct" | "mov") {
            return Ok(false);
        }
        let Ok(ty) = ins.ty() else { return Ok(false) };
        if ins.root() == "testp" {
            self.testp(ins, ty)?;
            return Ok(true);
        }
        let arity = ins.operands.len() - usize::from(!ins.operands.is_empty());
        let mode = rounding(ins);
        if mode != Rounding::Nearest && matches!(ty, Type::F32 | Type::F64) {
            return self.directed(ins, ty, arity, mode);
        }
        let Some(run) = nearest(ins, ty, arity) else {
            return Ok(false);
        };
        self.emit_lanes(ins, ty, &vec![ty; arity], run)?;
        self.emit_modifiers(ins, ty)?;
        Ok(true)
    }

    fn directed(&mut self, ins: &Ins<'a>, ty: Type, arity: usize, mode: Rounding) -> Result<bool> {
        let Some(e) = directed(ins, mode) else {
            return Ok(false);
        };
        ins.expect_operands(arity + 1)?;
        let d = self.target(ins.operand(0)?, ty)?;
        let mut sources = [self.source(ins.operand(1)?, ty)?; 3];
        for (k, slot) in sources.iter_mut().enumerate().take(arity).skip(1) {
            *slot = self.source(ins.operand(k + 1)?, ty)?;
        }
        let [a, b, c] = sources;
        let run = match ty {
            Type::F32 => rare(|a: f32, b: f32, c: f32, variant| {
                directed_value([a, b, c].map(f64::from), variant, Format::F32) as u32
            }),
            _ => rare(|a: f64, b: f64, c: f64, variant| {
                directed_value([a, b, c], variant, Format::F64)
            }),
        };
        self.emit_lane_fn(
            run,
            Slots {
                d,
                a,
                b,
                c,
                e,
                ..Slots::default()
            },
        );
        self.emit_modifiers(ins, ty)?;
        Ok(true)
    }

    /// Applies `.sat` and `.relu`, and `.ftz` of halves, to the result by instructions of their own.
    fn emit_modifiers(&mut self, ins: &Ins<'a>, ty: Type) -> Result<()> {
        let d = self.target(ins.operand(0)?, ty)?;
        let mut runs = Vec::new();
        if ins.has("ftz") {
            runs.extend(of_halves(ty, flush_half::<F16>, flush_half::<Bf16>));
        }
        if ins.has("sat") {
            runs.extend((ty == Type::F32).then(|| unary(clamp_single)));
            runs.extend(of_halves(ty, clamp::<F16>, clamp::<Bf16>));
        }
        if ins.has("relu") {
            runs.extend(of_halves(ty, relu::<F16>, relu::<Bf16>));
        }
        for run in runs {
            self.emit_lane_fn(run, Slots::unary(d, d));
        }
        Ok(())
    }

    /// `testp.finite.f32 p, a`
    fn testp(&mut self, ins: &Ins<'a>, ty: Type) -> Result<()> {
        macro_rules! test {
            ($T:ty) => {
                match ins.parts[1] {
                    "finite" => crate::lanes::compare(|a: $T, _: $T| a.is_finite()),
                    "infinite" => crate::lanes::compare(|a: $T, _: $T| a.is_infinite()),
                    "number" => crate::lanes::compare(|a: $T, _: $T| !a.is_nan()),
                    "notanumber" => crate::lanes::compare(|a: $T, _: $T| a.is_nan()),
                    "normal" => crate::lanes::compare(|a: $T, _: $T| a.is_normal()),
                    "subnormal" => crate::lanes::compare(|a: $T, _: $T| a.is_subnormal()),
                    other => return Err(unsupported(format!("test `{other}`"))),
                }
            };
        }
        let run = match ty {
            Type::F32 => test!(f32),
            Type::F64 => test!(f64),
            _ => return Err(unsupported(format!("operands of type {}", ty.name()))),
        };
        let (p, a) = (
            self.predicate(ins.operand(0)?)?,
            self.source(ins.operand(1)?, ty)?,
        );
        self.emit_lane_fn(run, Slots::predicate(p, a, a));
        Ok(())
    }
}

/// The rounding mode that an opcode names; to nearest without one.
pub(super) fn rounding(ins: &Ins) -> Rounding {
    let found = ins.parts.iter().find_map(|part| match *part {
        "rn" | "rni" => Some(Rounding::Nearest),
        "rna" => Some(Rounding::NearestAway),
        "rz" | "rzi" => Some(Rounding::Zero),
        "rm" | "rmi" => Some(Rounding::Down),
        "rp" | "rpi" => Some(Rounding::Up),
        _ => None,
    });
    found.unwrap_or(Rounding::Nearest)
}

/// Arithmetic that rounds to nearest.
fn nearest(ins: &Ins, ty: Type, arity: usize) -> Option<LaneFn> {
    match ty {
        Type::F32 => single(ins, arity),
        Type::F64 => double(ins, arity),
        Type::F16 => half::<F16>(ins, arity, false),
        Type::BF16 => half::<Bf16>(ins, arity, false),
        Type::F16x2 => half::<F16>(ins, arity, true),
        Type::BF16x2 => half::<Bf16>(ins, arity, true),
        Type::F32x2 => singles(ins, arity),
        _ => None,
    }
}

/// The smaller of two, the number where one is NaN, -0 before +0.
#[inline(always)]
fn least(a: f32, b: f32) -> f32 {
    let smaller = if a < b { a } else { b };
    let smaller = if a == b {
        f32::from_bits(a.to_bits() | b.to_bits())
    } else {
        smaller
    };
    let smaller = if b.is_nan() { a } else { smaller };
    if a.is_nan() { b } else { smaller }
}

#[inline(always)]
fn most(a: f32, b: f32) -> f32 {
    -least(-a, -b)
}

/// NaN if one of two is NaN.
#[inline(always)]
fn or_nan(a: f32, b: f32, x: f32) -> f32 {
    if a.is_nan() || b.is_nan() {
        f32::NAN
    } else {
        x
    }
}

#[inline(always)]
fn least_f64(a: f64, b: f64) -> f64 {
    let smaller = if a < b { a } else { b };
    let smaller = if a == b {
        f64::from_bits(a.to_bits() | b.to_bits())
    } else {
        smaller
    };
    let smaller = if b.is_nan() { a } else { smaller };
    if a.is_nan() { b } else { smaller }
}

fn single(ins: &Ins, arity: usize) -> Option<LaneFn> {
    match ins.root() {
        "min" | "max" => single_extremum(ins, arity),
        "abs" | "neg" | "copysign" => single_sign(ins, arity),
        _ if arity == 1 => single_function(ins),
        _ => single_arithmetic(ins, arity),
    }
}

fn single_arithmetic(ins: &Ins, arity: usize) -> Option<LaneFn> {
    Some(match (ins.root(), arity) {
        ("add", 2) => single!(ins, binary, |a, b| a + b),
        ("sub", 2) => single!(ins, binary, |a, b| a - b),
        ("mul", 2) => single!(ins, binary, |a, b| a * b),
        ("fma" | "mad", 3) => single!(ins, ternary, |a, b, c| a.mul_add(b, c)),
        ("div", 2) => single!(ins, binary, |a, b| a / b),
        _ => return None,
    })
}

fn single_extremum(ins: &Ins, arity: usize) -> Option<LaneFn> {
    let or_nans = ins.has("NaN");
    if arity == 2 && ins.has("xorsign") || arity == 3 && or_nans {
        return None;
    }
    Some(match (ins.root(), arity) {
        ("min", 2) if or_nans => single!(ins, binary, |a, b| or_nan(a, b, least(a, b))),
        ("max", 2) if or_nans => single!(ins, binary, |a, b| or_nan(a, b, most(a, b))),
        ("min", 2) => single!(ins, binary, |a, b| least(a, b)),
        ("max", 2) => single!(ins, binary, |a, b| most(a, b)),
        ("min", 3) => single!(ins, ternary, |a, b, c| least(least(a, b), c)),
        ("max", 3) => single!(ins, ternary, |a, b, c| most(most(a, b), c)),
        _ => return None,
    })
}

/// These do not quieten NaNs.
fn single_sign(ins: &Ins, arity: usize) -> Option<LaneFn> {
    Some(match (ins.root(), arity) {
        ("abs", 1) if ins.has("ftz") => unary(|a: f32| flush(a).abs()),
        ("abs", 1) => unary(f32::abs),
        ("neg", 1) if ins.has("ftz") => unary(|a: f32| -flush(a)),
        ("neg", 1) => unary(|a: f32| -a),
        ("copysign", 2) => binary(|a: f32, b: f32| b.copysign(a)),
        _ => return None,
    })
}

fn single_function(ins: &Ins) -> Option<LaneFn> {
    Some(match ins.root() {
        "sqrt" => single!(ins, unary, |a| approximate::sqrt(a)),
        "rcp" => single!(ins, unary, |a| approximate::rcp(a)),
        "rsqrt" => single!(ins, unary, |a| approximate::rsqrt(a)),
        "ex2" => single!(ins, unary, |a| approximate::ex2(a)),
        "lg2" => single!(ins, unary, |a| approximate::lg2(a)),
        "sin" => single!(ins, unary, |a| approximate::sin(a)),
        "cos" => single!(ins, unary, |a| approximate::cos(a)),
        "tanh" => single!(ins, unary, |a| approximate::tanh(a)),
        _ => return None,
    })
}

fn double(ins: &Ins, arity: usize) -> Option<LaneFn> {
    Some(match (ins.root(), arity) {
        ("add", 2) => binary(|a: f64, b: f64| a + b),
        ("sub", 2) => binary(|a: f64, b: f64| a - b),
        ("mul", 2) => binary(|a: f64, b: f64| a * b),
        ("fma" | "mad", 3) => ternary(|a: f64, b: f64, c: f64| a.mul_add(b, c)),
        ("div", 2) => binary(|a: f64, b: f64| a / b),
        ("min", 2) => binary(least_f64),
        ("max", 2) => binary(|a: f64, b: f64| -least_f64(-a, -b)),
        ("abs", 1) => unary(f64::abs),
        ("neg", 1) => unary(|a: f64| -a),
        ("copysign", 2) => binary(|a: f64, b: f64| b.copysign(a)),
        ("sqrt", 1) => unary(f64::sqrt),
        ("rcp", 1) if ins.has("approx") => unary(approximate::rcp_f64),
        ("rcp", 1) => unary(|a: f64| 1.0 / a),
        ("rsqrt", 1) if ins.has("ftz") => unary(approximate::rsqrt_f64),
        ("rsqrt", 1) => unary(|a: f64| 1.0 / a.sqrt()),
        _ => return None,
    })
}

/// Operations with a directed rounding mode.
const DIRECTED: [&str; 6] = ["add", "sub", "mul", "div", "fma", "sqrt"];

/// An operation with a directed rounding mode, as a number that fits a slot; `rcp` is a division of 1.
fn directed(ins: &Ins, mode: Rounding) -> Option<u32> {
    let name = match ins.root() {
        "mad" => "fma",
        "rcp" => "div",
        root => root,
    };
    let operation = DIRECTED.iter().position(|d| *d == name)? as u32;
    let mode = [Rounding::Zero, Rounding::Down, Rounding::Up]
        .iter()
        .position(|m| *m == mode)? as u32;
    Some(
        operation
            | mode << 3
            | u32::from(ins.has("ftz")) << 5
            | u32::from(ins.root() == "rcp") << 6,
    )
}

fn directed_value(operands: [f64; 3], variant: u32, format: Format) -> u64 {
    let ftz = variant >> 5 & 1 != 0;
    let flushed = |x: f64| {
        if ftz && x.abs() < f64::from(f32::MIN_POSITIVE) {
            0f64.copysign(x)
        } else {
            x
        }
    };
    let [a, b, c] = operands.map(|x| Number::from_f64(flushed(x)));
    let rounding = [
        Rounding::Zero,
        Rounding::Down,
        Rounding::Up,
        Rounding::Nearest,
    ][(variant >> 3 & 3) as usize];
    let value = match DIRECTED[(variant & 7) as usize % DIRECTED.len()] {
        "add" => a.add(b, rounding),
        "sub" => a.subtract(b, rounding),
        "mul" => a.multiply(b),
        "div" if variant >> 6 & 1 != 0 => Number::from_f64(1.0).divide(a),
        "div" => a.divide(b),
        "sqrt" => a.square_root(),
        _ => a.multiply(b).add(c, rounding),
    };
    let bits = value.round(format, rounding, false);
    if ftz {
        u64::from(flush(f32::from_bits(bits as u32)).to_bits())
    } else {
        bits
    }
}

/// To [0, 1]; NaN becomes 0.
fn clamp_single(x: f32) -> f32 {
    if x > 1.0 {
        1.0
    } else if x > 0.0 {
        x
    } else {
        0.0
    }
}

/// To [0, 1]; NaN becomes 0.
#[inline(always)]
fn clamp<H: Half>(x: H) -> H {
    H::from_f32(clamp_single(x.to_f32()))
}

/// Zero where negative; NaN stays.
#[inline(always)]
fn relu<H: Half>(x: H) -> H {
    let x = x.to_f32();
    H::from_f32(if x <= 0.0 { 0.0 } else { x })
}

/// Sends subnormal halves to zero.
#[inline(always)]
fn flush_half<H: Half>(x: H) -> H {
    let exponent = 0x7fff & !((1 << H::FORMAT.fraction_bits) - 1);
    if x.bits() & exponent == 0 {
        H::from_bits(x.bits() & 0x8000)
    } else {
        x
    }
}

/// A function of halves as a lane function, of single values or of pairs.
fn of_one<H: Half + Lane>(packed: bool, f: impl Fn(H) -> H + Copy + 'static) -> LaneFn {
    if packed {
        unary(move |a: Pair<H>| Pair(f(a.0), f(a.1)))
    } else {
        unary(f)
    }
}

/// One of two functions, for a 16-bit type or a pair of one; `None` for other types.
fn of_halves(
    ty: Type,
    f16: impl Fn(F16) -> F16 + Copy + 'static,
    bf16: impl Fn(Bf16) -> Bf16 + Copy + 'static,
) -> Option<LaneFn> {
    match ty {
        Type::F16 | Type::F16x2 => Some(of_one(ty == Type::F16x2, f16)),
        Type::BF16 | Type::BF16x2 => Some(of_one(ty == Type::BF16x2, bf16)),
        _ => None,
    }
}

fn of_two<H: Half + Lane>(packed: bool, f: impl Fn(H, H) -> H + Copy + 'static) -> LaneFn {
    if packed {
        binary(move |a: Pair<H>, b: Pair<H>| Pair(f(a.0, b.0), f(a.1, b.1)))
    } else {
        binary(f)
    }
}

fn of_three<H: Half + Lane>(packed: bool, f: impl Fn(H, H, H) -> H + Copy + 'static) -> LaneFn {
    if packed {
        ternary(move |a: Pair<H>, b: Pair<H>, c: Pair<H>| Pair(f(a.0, b.0, c.0), f(a.1, b.1, c.1)))
    } else {
        ternary(f)
    }
}

/// Instructions of `f16`, `bf16` and their pairs.
fn half<H: Half + Lane>(ins: &Ins, arity: usize, packed: bool) -> Option<LaneFn> {
    // Flushing operands would need another step; NVRTC does not ask for it unless told to.
    let flushes = ins.has("ftz") && !matches!(ins.root(), "ex2" | "abs" | "neg");
    if rounding(ins) != Rounding::Nearest || ins.has("xorsign") || flushes {
        return None;
    }
    match (ins.root(), arity) {
        ("fma", 3) => Some(of_three(packed, half_fma::<H>)),
        (_, 1) => half_of_one::<H>(ins, packed),
        (_, 2) => half_of_two::<H>(ins, packed),
        _ => None,
    }
}

fn half_of_one<H: Half + Lane>(ins: &Ins, packed: bool) -> Option<LaneFn> {
    Some(match ins.root() {
        "abs" => of_one(packed, |a: H| H::from_bits(a.bits() & 0x7fff)),
        "neg" => of_one(packed, |a: H| H::from_bits(a.bits() ^ 0x8000)),
        "ex2" => of_one(packed, |a: H| H::from_f32(approximate::ex2(a.to_f32()))),
        "tanh" => of_one(packed, |a: H| H::from_f32(approximate::tanh(a.to_f32()))),
        _ => return None,
    })
}

fn half_of_two<H: Half + Lane>(ins: &Ins, packed: bool) -> Option<LaneFn> {
    // Sums and products of halves, rounded to f32 and again, are rounded as if once: 24 >= 2 * 11 + 2.
    Some(match ins.root() {
        "add" => of_two(packed, |a: H, b: H| H::from_f32(a.to_f32() + b.to_f32())),
        "sub" => of_two(packed, |a: H, b: H| H::from_f32(a.to_f32() - b.to_f32())),
        "mul" => of_two(packed, |a: H, b: H| H::from_f32(a.to_f32() * b.to_f32())),
        "min" if ins.has("NaN") => of_two(packed, |a: H, b: H| {
            let (a, b) = (a.to_f32(), b.to_f32());
            H::from_f32(or_nan(a, b, least(a, b)))
        }),
        "max" if ins.has("NaN") => of_two(packed, |a: H, b: H| {
            let (a, b) = (a.to_f32(), b.to_f32());
            H::from_f32(or_nan(a, b, most(a, b)))
        }),
        "min" => of_two(packed, |a: H, b: H| {
            H::from_f32(least(a.to_f32(), b.to_f32()))
        }),
        "max" => of_two(packed, |a: H, b: H| {
            H::from_f32(most(a.to_f32(), b.to_f32()))
        }),
        _ => return None,
    })
}

/// Pairs of `f32` in 64-bit registers.
fn singles(ins: &Ins, arity: usize) -> Option<LaneFn> {
    if rounding(ins) != Rounding::Nearest || ins.has("ftz") {
        return None;
    }
    Some(match (ins.root(), arity) {
        ("add", 2) => {
            binary(|a: Pair<f32>, b: Pair<f32>| Pair(canonical(a.0 + b.0), canonical(a.1 + b.1)))
        }
        ("mul", 2) => {
            binary(|a: Pair<f32>, b: Pair<f32>| Pair(canonical(a.0 * b.0), canonical(a.1 * b.1)))
        }
        ("fma", 3) => ternary(|a: Pair<f32>, b: Pair<f32>, c: Pair<f32>| {
            Pair(
                canonical(a.0.mul_add(b.0, c.0)),
                canonical(a.1.mul_add(b.1, c.1)),
            )
        }),
        _ => return None,
    })
}
