//! `cvt` and `cvta`: integers, floats, packed and 8-bit floats, in every rounding mode.

use super::{Decoder, Ins, float::rounding, unsupported};
use crate::{
    fault::Result,
    lanes::{LaneFn, Pair, Slots, binary, compare, rare, unary},
    memory::window,
    numeric::{
        approximate::canonical,
        exact::{Number, Rounding},
        format::{Bf16, F16, Format, Half},
    },
    parse::ast::Operand,
    types::Type,
};

/// Evaluates `$body` with `$T` as the Rust type of an integer type.
macro_rules! by_integer {
    ($ty:expr, $T:ident, $body:expr) => {
        match $ty {
            Type::U8 | Type::B8 => {
                type $T = u8;
                $body
            }
            Type::S8 => {
                type $T = i8;
                $body
            }
            Type::U16 | Type::B16 => {
                type $T = u16;
                $body
            }
            Type::S16 => {
                type $T = i16;
                $body
            }
            Type::U32 | Type::B32 => {
                type $T = u32;
                $body
            }
            Type::S32 => {
                type $T = i32;
                $body
            }
            Type::U64 | Type::B64 => {
                type $T = u64;
                $body
            }
            Type::S64 => {
                type $T = i64;
                $body
            }
            _ => return None,
        }
    };
}

impl<'a> Decoder<'a> {
    /// `false` if the opcode converts nothing.
    pub(super) fn convert(&mut self, ins: &Ins<'a>) -> Result<bool> {
        match ins.root() {
            "cvt" => self.cvt(ins),
            "cvta" => self.cvta(ins),
            "isspacep" => self.isspacep(ins),
            _ => Ok(false),
        }
    }

    fn cvt(&mut self, ins: &Ins<'a>) -> Result<bool> {
        let [to, from] = ins.types()[..] else {
            return Ok(false);
        };
        if ins.operands.len() == 3 {
            return self.cvt_pair(ins, to, from);
        }
        if to == Type::F16x2 {
            let run = match from {
                Type::E4M3x2 => unary(|a: u16| unpack_small(a, Format::E4M3)),
                Type::E5M2x2 => unary(|a: u16| unpack_small(a, Format::E5M2)),
                _ => return Ok(false),
            };
            self.emit_lanes(ins, to, &[from], run)?;
            return Ok(true);
        }
        ins.expect_operands(2)?;
        let (run, variant) = match quick(ins, to, from) {
            Some(run) => (run, 0),
            None => match Plan::new(ins, to, from) {
                Some(plan) => (plan.run(), plan.pack()),
                None => return Ok(false),
            },
        };
        let a = self.cvt_source(ins.operand(1)?, from)?;
        self.emit_cvt(ins.operand(0)?, to, run, (a, variant))?;
        Ok(true)
    }

    /// Converts `a` by a function with this variant, and extends the result if the target's register is wider.
    fn emit_cvt(
        &mut self,
        target: &Operand,
        to: Type,
        run: LaneFn,
        (a, variant): (u32, u32),
    ) -> Result<()> {
        let is_wide = to.units() == 1 && self.is_wide(target);
        let d = self.target(target, if is_wide { Type::B64 } else { to })?;
        let result = if is_wide {
            self.new_register(Type::B32)
        } else {
            d
        };
        let slots = Slots {
            b: a,
            c: a,
            e: variant,
            ..Slots::unary(result, a)
        };
        self.emit_lane_fn(run, slots);
        if let Some(extend) = extension(to, is_wide) {
            self.emit_lane_fn(extend, Slots::unary(d, result));
        }
        Ok(())
    }

    /// Registers may be wider than the type: then the lower word.
    fn cvt_source(&mut self, operand: &Operand, from: Type) -> Result<u32> {
        if from.units() != 1 || !self.is_wide(operand) {
            return self.source(operand, from);
        }
        let a = self.source(operand, Type::B64)?;
        let cut = self.new_register(Type::B32);
        self.emit_lane_fn(unary(|a: u64| a as u32), Slots::unary(cut, a));
        Ok(cut)
    }

    /// `cvt.rn.f16x2.f32 d, a, b`: `a` goes to the upper half.
    fn cvt_pair(&mut self, ins: &Ins<'a>, to: Type, from: Type) -> Result<bool> {
        if from != Type::F32 {
            return Ok(false);
        }
        let plain = is_plain(ins);
        let (part, run) = match to {
            Type::F16x2 => (
                Type::F16,
                binary(|a: f32, b: f32| Pair(F16::from_f32(b), F16::from_f32(a))),
            ),
            Type::BF16x2 => (
                Type::BF16,
                binary(|a: f32, b: f32| Pair(Bf16::from_f32(b), Bf16::from_f32(a))),
            ),
            Type::E4M3x2 => (Type::E4M3, planned_pair()),
            Type::E5M2x2 => (Type::E5M2, planned_pair()),
            _ => return Ok(false),
        };
        let Some(plan) = Plan::new(ins, part, from) else {
            return Ok(false);
        };
        ins.expect_operands(3)?;
        let d = self.target(ins.operand(0)?, to)?;
        let (a, b) = self.lhs_rhs(ins, from)?;
        let slots = Slots {
            c: a,
            e: if plain { 0 } else { plan.pack() },
            ..Slots::binary(d, a, b)
        };
        self.emit_lane_fn(if plain { run } else { planned_pair() }, slots);
        Ok(true)
    }

    fn is_wide(&self, operand: &Operand) -> bool {
        matches!(operand, Operand::Register(r) if self.register_type(*r).units() == 2)
    }

    /// Addresses between their state space and the generic one.
    fn cvta(&mut self, ins: &Ins<'a>) -> Result<bool> {
        let ty = ins.ty()?;
        if ty.units() != 2 {
            return Err(unsupported("32-bit addresses"));
        }
        let to = ins.has("to");
        let space = ins
            .parts
            .iter()
            .find(|p| p.starts_with("shared") || ["local", "param", "global", "const"].contains(p));
        let run = match (space.copied(), to) {
            (Some("global" | "const"), _) => unary(|a: u64| a),
            (Some("local"), false) => unary(|a: u64| a.wrapping_add(window::LOCAL)),
            (Some("local"), true) => unary(|a: u64| a.wrapping_sub(window::LOCAL)),
            (Some("param"), false) => unary(|a: u64| a.wrapping_add(window::PARAM)),
            (Some("param"), true) => unary(|a: u64| a.wrapping_sub(window::PARAM)),
            (Some(_), false) => unary(|a: u64| a.wrapping_add(window::SHARED)),
            (Some(_), true) => unary(|a: u64| a.wrapping_sub(window::SHARED)),
            (None, _) => return Ok(false),
        };
        self.emit_lanes(ins, ty, &[ty], run)?;
        Ok(true)
    }

    fn isspacep(&mut self, ins: &Ins<'a>) -> Result<bool> {
        let ranges = |base: u64| [base, base + window::SIZE];
        let [low, high] = match ins.parts[1] {
            "shared" | "shared::cta" | "shared::cluster" => ranges(window::SHARED),
            "local" => ranges(window::LOCAL),
            "param" | "param::entry" => ranges(window::PARAM),
            "global" => [window::GLOBAL, u64::MAX],
            _ => return Ok(false),
        };
        let p = self.predicate(ins.operand(0)?)?;
        let a = self.source(ins.operand(1)?, Type::U64)?;
        let (low, high) = (
            self.constant(low, Type::U64)?,
            self.constant(high, Type::U64)?,
        );
        let above = self.new_register(Type::Pred);
        let (at_least, below) = (
            compare(|a: u64, b: u64| a >= b),
            compare(|a: u64, b: u64| a < b),
        );
        self.emit_lane_fn(at_least, Slots::predicate(above, a, low));
        self.emit_lane_fn(below, Slots::predicate(p, a, high));
        let both = crate::lanes::logic(|a, b, _| a & b);
        self.emit_lane_fn(both, Slots::predicate(p, p, above));
        Ok(true)
    }
}

/// Conversions that have vector code.
#[allow(clippy::unnecessary_cast)] // The types are a macro's.
fn quick(ins: &Ins, to: Type, from: Type) -> Option<LaneFn> {
    if !is_plain(ins) {
        return quick_rounding(ins, to, from);
    }
    match (from, to) {
        (Type::F32, Type::F16) => Some(unary(F16::from_f32)),
        (Type::F32, Type::BF16) => Some(unary(Bf16::from_f32)),
        (Type::F16, Type::F32) => Some(unary(|a: F16| canonical(a.to_f32()))),
        (Type::BF16, Type::F32) => Some(unary(|a: Bf16| canonical(a.to_f32()))),
        (Type::F32, Type::F64) => Some(unary(|a: f32| f64::from(a))),
        (Type::F64, Type::F32) => Some(unary(|a: f64| canonical(a as f32))),
        (_, Type::F32) => by_integer!(from, A, Some(unary(|a: A| a as f32))),
        (_, Type::F64) => by_integer!(from, A, Some(unary(|a: A| a as f64))),
        _ if is_float(to) || is_float(from) => None,
        _ => truncation(to, from),
    }
}

/// Between integers.
#[allow(clippy::unnecessary_cast)] // The types are a macro's.
fn truncation(to: Type, from: Type) -> Option<LaneFn> {
    match to.size_bytes() {
        1 => by_integer!(from, A, Some(unary(|a: A| a as u8))),
        2 => by_integer!(from, A, Some(unary(|a: A| a as u16))),
        4 => by_integer!(from, A, Some(unary(|a: A| a as u32))),
        _ => by_integer!(from, A, Some(unary(|a: A| a as u64))),
    }
}

/// Fills a register by a narrow signed result, or by one that is narrower than the register.
fn extension(to: Type, is_wide: bool) -> Option<LaneFn> {
    Some(match (to, is_wide) {
        (Type::S8, false) => unary(|x: i8| i32::from(x)),
        (Type::S16, false) => unary(|x: i16| i32::from(x)),
        (Type::S8, true) => unary(|x: i8| i64::from(x)),
        (Type::S16, true) => unary(|x: i16| i64::from(x)),
        (Type::S32, true) => unary(|x: i32| i64::from(x)),
        (_, true) => unary(|x: u32| u64::from(x)),
        _ => return None,
    })
}

/// Two floats by the packed plan in slot `e`.
fn planned_pair() -> LaneFn {
    rare(|a: u32, b: u32, _, variant| {
        let plan = Plan::unpack(variant);
        let convert = |x: u32| plan.convert(u64::from(x)) as u32;
        let (low, high) = (convert(b), convert(a));
        match plan.to {
            Type::F16 | Type::BF16 => low | high << 16,
            _ => low | high << 8,
        }
    })
}

/// To whole numbers.
fn quick_rounding(ins: &Ins, to: Type, from: Type) -> Option<LaneFn> {
    let [_, mode, _, _] = ins.parts[..] else {
        return None;
    };
    match (from, to) {
        (Type::F32, Type::S32) => match mode {
            "rzi" => Some(unary(|a: f32| a as i32)),
            "rni" => Some(unary(|a: f32| a.round_ties_even() as i32)),
            "rmi" => Some(unary(|a: f32| a.floor() as i32)),
            _ => None,
        },
        (Type::F32, Type::U32) => (mode == "rzi").then(|| unary(|a: f32| a as u32)),
        (Type::F32, Type::F32) => match mode {
            "rzi" => Some(unary(|a: f32| canonical(a.trunc()))),
            "rni" => Some(unary(|a: f32| canonical(a.round_ties_even()))),
            "rmi" => Some(unary(|a: f32| canonical(a.floor()))),
            "rpi" => Some(unary(|a: f32| canonical(a.ceil()))),
            _ => None,
        },
        (Type::F64, Type::F64) => match mode {
            "rzi" => Some(unary(f64::trunc)),
            "rni" => Some(unary(f64::round_ties_even)),
            "rmi" => Some(unary(f64::floor)),
            "rpi" => Some(unary(f64::ceil)),
            _ => None,
        },
        _ => None,
    }
}

/// To nearest, with nothing else asked.
fn is_plain(ins: &Ins) -> bool {
    ins.parts[1..]
        .iter()
        .all(|p| *p == "rn" || Type::parse(p).is_some())
}

/// True for a type of a single floating-point number.
fn is_float(ty: Type) -> bool {
    format(ty).is_some()
}

fn format(ty: Type) -> Option<Format> {
    Some(match ty {
        Type::F16 => Format::F16,
        Type::BF16 => Format::BF16,
        Type::TF32 => Format::TF32,
        Type::F32 => Format::F32,
        Type::F64 => Format::F64,
        Type::E4M3 => Format::E4M3,
        Type::E5M2 => Format::E5M2,
        _ => return None,
    })
}

/// Any conversion between two scalar types, as a number that fits a slot.
#[derive(Clone, Copy)]
struct Plan {
    to: Type,
    from: Type,
    rounding: Rounding,
    /// To a whole number first, of a float type.
    whole: bool,
    ftz: bool,
    /// To [0, 1], or to the range of an integer.
    sat: bool,
    relu: bool,
    /// To the largest number of the format instead of infinity.
    satfinite: bool,
}

/// Scalar types of conversions, in the order of their numbers in a packed plan.
const TYPES: [Type; 16] = [
    Type::U8,
    Type::S8,
    Type::U16,
    Type::S16,
    Type::U32,
    Type::S32,
    Type::U64,
    Type::S64,
    Type::F16,
    Type::BF16,
    Type::TF32,
    Type::F32,
    Type::F64,
    Type::E4M3,
    Type::E5M2,
    Type::Pred,
];
const ROUNDINGS: [Rounding; 5] = [
    Rounding::Nearest,
    Rounding::NearestAway,
    Rounding::Zero,
    Rounding::Down,
    Rounding::Up,
];

impl Plan {
    /// `None` for types that are not converted.
    fn new(ins: &Ins, to: Type, from: Type) -> Option<Plan> {
        let known = |ty| TYPES[..15].contains(&ty);
        let whole = ins
            .parts
            .iter()
            .any(|p| matches!(*p, "rni" | "rzi" | "rmi" | "rpi"));
        let plan = Plan {
            to,
            from,
            rounding: rounding(ins),
            whole,
            ftz: ins.has("ftz"),
            sat: ins.has("sat"),
            relu: ins.has("relu"),
            satfinite: ins.has("satfinite"),
        };
        (known(to) && known(from)).then_some(plan)
    }

    fn pack(self) -> u32 {
        let index = |ty| TYPES.iter().position(|t| *t == ty).unwrap_or(15) as u32;
        let mode = ROUNDINGS
            .iter()
            .position(|r| *r == self.rounding)
            .unwrap_or(0) as u32;
        let flags = [self.whole, self.ftz, self.sat, self.relu, self.satfinite];
        let flags = flags
            .iter()
            .enumerate()
            .fold(0, |all, (k, flag)| all | u32::from(*flag) << k);
        index(self.to) | index(self.from) << 4 | mode << 8 | flags << 12
    }

    fn unpack(packed: u32) -> Plan {
        let flag = |k: u32| packed >> (12 + k) & 1 != 0;
        Plan {
            to: TYPES[(packed & 15) as usize],
            from: TYPES[(packed >> 4 & 15) as usize],
            rounding: ROUNDINGS[(packed >> 8 & 7) as usize % 5],
            whole: flag(0),
            ftz: flag(1),
            sat: flag(2),
            relu: flag(3),
            satfinite: flag(4),
        }
    }

    fn run(self) -> LaneFn {
        match (self.from.units(), self.to.units()) {
            (1, 1) => rare(|a: u32, _, _, plan| Plan::unpack(plan).convert(u64::from(a)) as u32),
            (1, _) => rare(|a: u32, _, _, plan| Plan::unpack(plan).convert(u64::from(a))),
            (_, 1) => rare(|a: u64, _, _, plan| Plan::unpack(plan).convert(a) as u32),
            _ => rare(|a: u64, _, _, plan| Plan::unpack(plan).convert(a)),
        }
    }

    /// The converted bits.
    fn convert(self, bits: u64) -> u64 {
        match (format(self.from), format(self.to)) {
            (None, None) => {
                let value = self.integer(bits);
                let (least, most) = range(self.to);
                if self.sat {
                    value.clamp(least, most) as u64
                } else {
                    value as u64
                }
            }
            (None, Some(to)) => shifted(
                self.to,
                Number::from_integer(self.integer(bits)).round(to, self.rounding, false),
            ),
            (Some(from), None) => self.to_integer(from.to_f64(bits)),
            (Some(from), Some(to)) => {
                let value = self.prepared(if self.from == Type::F64 {
                    f64::from_bits(bits)
                } else {
                    from.to_f64(bits)
                });
                shifted(
                    self.to,
                    Number::from_f64(value).round(to, self.rounding, self.satfinite),
                )
            }
        }
    }

    /// The source as an integer.
    fn integer(self, bits: u64) -> i128 {
        match self.from {
            Type::U8 => i128::from(bits as u8),
            Type::S8 => i128::from(bits as i8),
            Type::U16 => i128::from(bits as u16),
            Type::S16 => i128::from(bits as i16),
            Type::U32 => i128::from(bits as u32),
            Type::S32 => i128::from(bits as i32),
            Type::S64 => i128::from(bits as i64),
            _ => i128::from(bits),
        }
    }

    /// Clamped; NaN to zero, or to the middle of the range if either type has 64 bits (PTX ISA, `cvt`).
    fn to_integer(self, value: f64) -> u64 {
        let value = if self.ftz { flushed(value) } else { value };
        let (least, most) = range(self.to);
        let middle = if least < 0 { least } else { (most >> 1) + 1 };
        let nan = if self.from == Type::F64 || self.to.size_bytes() == 8 {
            middle
        } else {
            0
        };
        Number::from_f64(value)
            .to_integer(self.rounding, least, most)
            .unwrap_or(nan) as u64
    }

    /// A float with the modifiers that apply before it is rounded to the target's format.
    fn prepared(self, value: f64) -> f64 {
        let value = if self.ftz { flushed(value) } else { value };
        let value = match self.rounding {
            _ if !self.whole => value,
            Rounding::Zero => value.trunc(),
            Rounding::Down => value.floor(),
            Rounding::Up => value.ceil(),
            _ => value.round_ties_even(),
        };
        if self.sat {
            clamped(value)
        } else if self.relu && value <= 0.0 {
            0.0
        } else {
            value
        }
    }
}

/// A tf32 number is the upper part of an f32.
fn shifted(ty: Type, bits: u64) -> u64 {
    if ty == Type::TF32 { bits << 13 } else { bits }
}

/// Least and largest value of an integer type.
fn range(ty: Type) -> (i128, i128) {
    let bits = 8 * ty.size_bytes() as u32;
    if ty.is_signed() {
        (-(1i128 << (bits - 1)), (1i128 << (bits - 1)) - 1)
    } else {
        (0, (1i128 << bits) - 1)
    }
}

/// `.ftz` of a conversion: numbers that are subnormal in single precision become zero.
fn flushed(x: f64) -> f64 {
    if x.abs() < f64::from(f32::MIN_POSITIVE) {
        0f64.copysign(x)
    } else {
        x
    }
}

/// `.sat`: to [0, 1], NaN to 0.
fn clamped(x: f64) -> f64 {
    if x > 1.0 {
        1.0
    } else if x > 0.0 {
        x
    } else {
        0.0
    }
}

fn unpack_small(bits: u16, format: Format) -> Pair<F16> {
    let half = |bits: u16| F16::from_f32(format.to_f64(u64::from(bits & 0xff)) as f32);
    Pair(half(bits), half(bits >> 8))
}
