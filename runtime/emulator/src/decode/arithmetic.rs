//! Integers, bits, comparisons, selections and moves.

use super::{
    Decoder, Ins, malformed,
    operands::parts,
    program::{Action, NONE},
    unsupported,
};
use crate::{
    fault::Result,
    lanes::{
        LaneFn, Pair, Slots, binary, carry, compare, logic, quaternary, select, ternary, unary,
    },
    numeric::{
        format::{Bf16, F16, Half},
        integer::{Integer, insert32, insert64, lookup, permute},
    },
    parse::ast::Operand,
    types::Type,
};

/// Half of a packed operand.
#[derive(Clone, Copy, PartialEq)]
enum Part {
    Lower,
    Upper,
}

/// The predicate that multi-step instructions use.
const SCRATCH: u32 = 1;

/// Evaluates `$body` with `$T` as the Rust type of an integer type of PTX; `None` for other types.
macro_rules! by_integer {
    ($ty:expr, $T:ident, $body:expr) => {
        by_type!($ty, $T, [
            U16 | B16 => u16, S16 => i16, U32 | B32 => u32, S32 => i32, U64 | B64 => u64, S64 => i64
        ], $body)
    };
}

/// The same where the sign makes no difference: fewer functions.
macro_rules! by_width {
    ($ty:expr, $T:ident, $body:expr) => {
        by_type!($ty, $T, [U16 | B16 | S16 => u16, U32 | B32 | S32 => u32, U64 | B64 | S64 => u64], $body)
    };
}

macro_rules! by_type {
    ($ty:expr, $T:ident, [$($($variant:ident)|+ => $rust:ty),*], $body:expr) => {
        match $ty {
            $($(Type::$variant)|+ => { type $T = $rust; Some($body) })*
            _ => None,
        }
    };
}

/// The comparison `$name` of values that `$value` makes from operands; returns `None` from the function if there is none.
macro_rules! float_comparison {
    ($name:expr, $T:ty, $value:expr) => {{
        macro_rules! holds {
            (|$a:ident, $b:ident| $test:expr) => {
                compare(|a: $T, b: $T| {
                    let ($a, $b) = ($value(a), $value(b));
                    $test
                })
            };
        }
        Some(match $name {
            "eq" => holds!(|a, b| a == b),
            "ne" => holds!(|a, b| a < b || a > b),
            "lt" => holds!(|a, b| a < b),
            "le" => holds!(|a, b| a <= b),
            "gt" => holds!(|a, b| a > b),
            "ge" => holds!(|a, b| a >= b),
            "equ" => holds!(|a, b| !(a < b || a > b)),
            "neu" => holds!(|a, b| a != b),
            "ltu" => holds!(|a, b| !(a >= b)),
            "leu" => holds!(|a, b| !(a > b)),
            "gtu" => holds!(|a, b| !(a <= b)),
            "geu" => holds!(|a, b| !(a < b)),
            "num" => holds!(|a, b| a == a && b == b),
            "nan" => holds!(|a, b| a != a || b != b),
            _ => return None,
        })
    }};
}

impl<'a> Decoder<'a> {
    /// `false` if the opcode is none of these.
    pub(super) fn arithmetic(&mut self, ins: &Ins<'a>) -> Result<bool> {
        match ins.root() {
            "mov" => self.mov(ins)?,
            "setp" => self.setp(ins)?,
            "set" => self.set(ins)?,
            "selp" => self.selp(ins)?,
            "slct" => self.slct(ins)?,
            "and" | "or" | "xor" | "not" if ins.ty()? == Type::Pred => self.logic(ins)?,
            "add" | "addc" | "sub" | "subc" | "mad" | "madc"
                if ins.has("cc") || matches!(ins.root(), "addc" | "subc" | "madc") =>
            {
                self.with_carry(ins)?;
            }
            _ => return self.plain(ins),
        }
        Ok(true)
    }

    /// Instructions of one step: as many sources as the lane function takes.
    fn plain(&mut self, ins: &Ins<'a>) -> Result<bool> {
        let ty = ins.ty()?;
        let (sources, run) = match ins.operands.len() {
            2 => (vec![ty], one_source(ins, ty)),
            3 => (two_types(ins, ty), two_sources(ins, ty)),
            4 => (three_types(ins, ty), three_sources(ins, ty)),
            5 => (vec![ty, ty, Type::U32, Type::U32], four_sources(ins, ty)),
            _ => return Ok(false),
        };
        let Some(run) = run else { return Ok(false) };
        let is_wide = matches!(ins.root(), "mul" | "mad") && ins.has("wide");
        let target = match ins.root() {
            "popc" | "clz" | "bfind" => Type::U32,
            "dp4a" | "dp2a" => Type::B32,
            _ if is_wide => widened(ty),
            _ => ty,
        };
        self.emit_lanes(ins, target, &sources, run)?;
        Ok(true)
    }

    /// Emits `run` with the first operand as target of type `target` and the rest as sources.
    pub(super) fn emit_lanes(
        &mut self,
        ins: &Ins<'a>,
        target: Type,
        sources: &[Type],
        run: LaneFn,
    ) -> Result<()> {
        ins.expect_operands(sources.len() + 1)?;
        let mut slots = Slots {
            d: self.target(ins.operand(0)?, target)?,
            ..Slots::default()
        };
        if slots.d == NONE {
            return Ok(());
        }
        for (k, (slot, ty)) in [&mut slots.a, &mut slots.b, &mut slots.c, &mut slots.e]
            .into_iter()
            .zip(sources)
            .enumerate()
        {
            *slot = self.source(ins.operand(k + 1)?, *ty)?;
        }
        self.emit(Action::Lanes(run), slots);
        Ok(())
    }

    fn mov(&mut self, ins: &Ins<'a>) -> Result<()> {
        ins.expect_operands(2)?;
        let ty = ins.ty()?;
        match (ins.operand(0)?, ins.operand(1)?) {
            (to, from) if ty == Type::Pred => {
                let (p, (a, flip)) = (self.predicate(to)?, self.condition(from)?);
                let run = if flip == 0 {
                    logic(|a, _, _| a)
                } else {
                    logic(|a, _, _| !a)
                };
                self.emit_lane_fn(run, Slots::predicate(p, a, a));
            }
            (Operand::Vector(to), from) => self.unpack(to, from, ty)?,
            (to, Operand::Vector(from)) => self.pack(to, from, ty)?,
            (to, from) => {
                let (d, a) = (self.target(to, ty)?, self.source(from, ty)?);
                self.copy(d, a, ty);
            }
        }
        Ok(())
    }

    /// `d = a`, of the size of `ty`.
    pub(super) fn copy(&mut self, d: u32, a: u32, ty: Type) {
        if d == NONE {
            return;
        }
        match ty.units() {
            1 => self.emit_lane_fn(unary(|a: u32| a), Slots::unary(d, a)),
            units => {
                for k in (0..units).step_by(2) {
                    let slots = Slots {
                        d: d + k,
                        a: a + k,
                        ..Slots::default()
                    };
                    self.emit(Action::Lanes(unary(|a: u64| a)), slots);
                }
            }
        }
    }

    /// `mov.b64 {a, b}, c`
    fn unpack(&mut self, to: &[Operand], from: &Operand, ty: Type) -> Result<()> {
        let a = self.source(from, ty)?;
        let part = part_type(ty, to.len())?;
        let runs =
            unpacking(ty.size_bytes(), to.len()).ok_or_else(|| unsupported("this vector form"))?;
        for (k, (to, run)) in to.iter().zip(runs).enumerate() {
            let d = self.target(to, part)?;
            let a = if ty == Type::B128 {
                a + 2 * k as u32
            } else {
                a
            };
            if d != NONE {
                self.emit_lane_fn(run, Slots::unary(d, a));
            }
        }
        Ok(())
    }

    /// `mov.b64 a, {b, c}`
    fn pack(&mut self, to: &Operand, from: &[Operand], ty: Type) -> Result<()> {
        let d = self.target(to, ty)?;
        let part = part_type(ty, from.len())?;
        let sources: Vec<u32> = from
            .iter()
            .map(|f| self.source(f, part))
            .collect::<Result<_>>()?;
        let at = |k: usize| sources.get(k).copied().unwrap_or(0);
        if (ty.size_bytes(), from.len()) == (16, 2) {
            self.copy(d, at(0), Type::B64);
            self.copy(d + 2, at(1), Type::B64);
            return Ok(());
        }
        let run =
            packing(ty.size_bytes(), from.len()).ok_or_else(|| unsupported("this vector form"))?;
        let slots = Slots {
            c: at(2),
            e: at(3),
            ..Slots::binary(d, at(0), at(1))
        };
        self.emit_lane_fn(run, slots);
        Ok(())
    }

    /// `and.pred p, q, !r` and its kin.
    fn logic(&mut self, ins: &Ins<'a>) -> Result<()> {
        let p = self.predicate(ins.operand(0)?)?;
        let (a, flip) = self.condition(ins.operand(1)?)?;
        let (b, other) = if ins.root() == "not" {
            (a, flip)
        } else {
            self.condition(ins.operand(2)?)?
        };
        let (a, b) = (self.upright(a, flip), self.upright(b, other));
        let run = match ins.root() {
            "and" => logic(|a, b, _| a & b),
            "or" => logic(|a, b, _| a | b),
            "xor" => logic(|a, b, _| a ^ b),
            _ => logic(|a, _, _| !a),
        };
        self.emit_lane_fn(run, Slots::predicate(p, a, b));
        Ok(())
    }

    /// The predicate itself, or a new one with its complement.
    fn upright(&mut self, a: u32, flip: u32) -> u32 {
        if flip == 0 {
            return a;
        }
        let p = self.new_register(Type::Pred);
        self.emit_lane_fn(logic(|a, _, _| !a), Slots::predicate(p, a, a));
        p
    }

    fn setp(&mut self, ins: &Ins<'a>) -> Result<()> {
        let ty = ins.ty()?;
        let (p, q) = match ins.operand(0)? {
            Operand::Pair(p, q) => (self.predicate(p)?, self.predicate(q)?),
            p => (self.predicate(p)?, NONE),
        };
        self.compare(ins, ty, Part::Lower)?;
        self.set_predicate(ins, p, SCRATCH, false)?;
        if matches!(ty, Type::F16x2 | Type::BF16x2) {
            self.compare(ins, ty, Part::Upper)?;
            return self.set_predicate(ins, q, SCRATCH, false);
        }
        self.set_predicate(ins, q, SCRATCH, true)
    }

    /// Compares operands 1 and 2 into the scratch predicate; halves as the single-precision numbers that they are.
    fn compare(&mut self, ins: &Ins<'a>, ty: Type, part: Part) -> Result<()> {
        let (mut a, mut b) = self.lhs_rhs(ins, ty)?;
        let mut compared = ty;
        if let Some(widen) = widening(ty, part) {
            compared = Type::F32;
            for side in [&mut a, &mut b] {
                let d = self.new_register(Type::F32);
                self.emit_lane_fn(widen, Slots::unary(d, *side));
                *side = d;
            }
        }
        let name = ins.parts[1];
        let ftz = ins.has("ftz") && ty == Type::F32;
        let run = comparison(name, compared, ftz)
            .ok_or_else(|| unsupported(format!("comparison `{name}`")))?;
        self.emit_lane_fn(run, Slots::predicate(SCRATCH, a, b));
        Ok(())
    }

    /// `p = from` or its complement, combined with the condition that `setp.lt.and` names.
    fn set_predicate(&mut self, ins: &Ins<'a>, p: u32, from: u32, complement: bool) -> Result<()> {
        if p == NONE {
            return Ok(());
        }
        let (c, flip) = if ins.operands.len() > 3 {
            self.condition(ins.operand(3)?)?
        } else {
            (from, 0)
        };
        let combine = ["and", "or", "xor"]
            .into_iter()
            .find(|m| ins.has(m))
            .filter(|_| ins.operands.len() > 3);
        let slots = Slots {
            c,
            ..Slots::predicate(p, from, from)
        };
        self.emit_lane_fn(combination(combine, complement, flip != 0), slots);
        Ok(())
    }

    /// `set.lt.u32.f32 d, a, b`: all ones or 1.0 where it holds.
    fn set(&mut self, ins: &Ins<'a>) -> Result<()> {
        let ty = ins.ty()?;
        let target = ins.first_type()?;
        self.compare(ins, ty, Part::Lower)?;
        self.set_predicate(ins, SCRATCH, SCRATCH, false)?;
        let d = self.target(ins.operand(0)?, target)?;
        if matches!(ty, Type::F16x2 | Type::BF16x2) {
            return Err(unsupported("packed operands"));
        }
        let one = match target {
            Type::F32 => u64::from(1f32.to_bits()),
            Type::F16 => u64::from(F16::from_f32(1.0).bits()),
            Type::BF16 => u64::from(Bf16::from_f32(1.0).bits()),
            Type::U16 | Type::S16 => 0xffff,
            Type::U32 | Type::S32 => 0xffff_ffff,
            _ => return Err(unsupported(format!("a result of type {}", target.name()))),
        };
        let (a, b) = (self.constant(one, target)?, self.constant(0, target)?);
        let slots = Slots {
            r: SCRATCH,
            ..Slots::binary(d, a, b)
        };
        self.emit_lane_fn(select::<u32, _>(|p| p), slots);
        Ok(())
    }

    fn selp(&mut self, ins: &Ins<'a>) -> Result<()> {
        ins.expect_operands(4)?;
        let ty = ins.ty()?;
        let d = self.target(ins.operand(0)?, ty)?;
        let (a, b) = self.lhs_rhs(ins, ty)?;
        let (r, flip) = self.condition(ins.operand(3)?)?;
        let run = match (ty.units(), flip) {
            (1, 0) => select::<u32, _>(|p| p),
            (1, _) => select::<u32, _>(|p| !p),
            (_, 0) => select::<u64, _>(|p| p),
            _ => select::<u64, _>(|p| !p),
        };
        let slots = Slots {
            r,
            ..Slots::binary(d, a, b)
        };
        self.emit_lane_fn(run, slots);
        Ok(())
    }

    /// `slct.f32.s32 d, a, b, c`: `a` where `c >= 0`.
    fn slct(&mut self, ins: &Ins<'a>) -> Result<()> {
        let (by, ty) = (ins.ty()?, ins.first_type()?);
        let run = match (ty.units(), by) {
            (1, Type::S32) => ternary(|a: u32, b: u32, c: i32| if c >= 0 { a } else { b }),
            (1, Type::F32) => ternary(|a: u32, b: u32, c: f32| if c >= 0.0 { a } else { b }),
            (2, Type::S32) => ternary(|a: u64, b: u64, c: i32| if c >= 0 { a } else { b }),
            (2, Type::F32) => ternary(|a: u64, b: u64, c: f32| if c >= 0.0 { a } else { b }),
            _ => return Err(unsupported("this form")),
        };
        self.emit_lanes(ins, ty, &[ty, ty, by], run)
    }

    /// Instructions that read or write the condition code.
    fn with_carry(&mut self, ins: &Ins<'a>) -> Result<()> {
        let ty = ins.ty()?;
        let run = carry_function(ins, ty)
            .ok_or_else(|| unsupported(format!("operands of type {}", ty.name())))?;
        let d = self.target(ins.operand(0)?, ty)?;
        let (a, b) = self.lhs_rhs(ins, ty)?;
        let c = if ins.operands.len() > 3 {
            self.source(ins.operand(3)?, ty)?
        } else {
            a
        };
        let slots = Slots {
            c,
            // Without `.cc` the carry out is dropped.
            p: if ins.has("cc") { self.carry } else { SCRATCH },
            r: self.carry,
            ..Slots::binary(d, a, b)
        };
        self.emit_lane_fn(run, slots);
        Ok(())
    }
}

/// The type of twice the width.
fn widened(ty: Type) -> Type {
    match ty {
        Type::U16 => Type::U32,
        Type::S16 => Type::S32,
        Type::U32 => Type::U64,
        _ => Type::S64,
    }
}

/// Functions of `bytes` bytes that give each of `count` equal parts.
fn unpacking(bytes: usize, count: usize) -> Option<Vec<LaneFn>> {
    Some(match (bytes, count) {
        (2, 2) => vec![unary(|a: u16| a as u8), unary(|a: u16| (a >> 8) as u8)],
        (4, 2) => vec![unary(|a: u32| a as u16), unary(|a: u32| (a >> 16) as u16)],
        (8, 2) => vec![unary(|a: u64| a as u32), unary(|a: u64| (a >> 32) as u32)],
        (4, 4) => vec![
            unary(|a: u32| a as u8),
            unary(|a: u32| (a >> 8) as u8),
            unary(|a: u32| (a >> 16) as u8),
            unary(|a: u32| (a >> 24) as u8),
        ],
        (8, 4) => vec![
            unary(|a: u64| a as u16),
            unary(|a: u64| (a >> 16) as u16),
            unary(|a: u64| (a >> 32) as u16),
            unary(|a: u64| (a >> 48) as u16),
        ],
        (16, 2) => vec![unary(|a: u64| a), unary(|a: u64| a)],
        _ => return None,
    })
}

/// The function that makes `bytes` bytes, at most 8, of `count` equal parts.
fn packing(bytes: usize, count: usize) -> Option<LaneFn> {
    Some(match (bytes, count) {
        (2, 2) => binary(|a: u8, b: u8| u16::from(a) | u16::from(b) << 8),
        (4, 2) => binary(|a: u16, b: u16| u32::from(a) | u32::from(b) << 16),
        (8, 2) => binary(|a: u32, b: u32| u64::from(a) | u64::from(b) << 32),
        (4, 4) => quaternary(|a: u8, b: u8, c: u8, e: u8| u32::from_le_bytes([a, b, c, e])),
        (8, 4) => quaternary(|a: u16, b: u16, c: u16, e: u16| {
            u64::from(a) | u64::from(b) << 16 | u64::from(c) << 32 | u64::from(e) << 48
        }),
        _ => return None,
    })
}

/// From a half to single precision; `None` for types that are compared as they are.
fn widening(ty: Type, part: Part) -> Option<LaneFn> {
    Some(match (ty, part) {
        (Type::F16, _) => unary(|x: F16| x.to_f32()),
        (Type::BF16, _) => unary(|x: Bf16| x.to_f32()),
        (Type::F16x2, Part::Lower) => unary(|x: Pair<F16>| x.0.to_f32()),
        (Type::F16x2, Part::Upper) => unary(|x: Pair<F16>| x.1.to_f32()),
        (Type::BF16x2, Part::Lower) => unary(|x: Pair<Bf16>| x.0.to_f32()),
        (Type::BF16x2, Part::Upper) => unary(|x: Pair<Bf16>| x.1.to_f32()),
        _ => return None,
    })
}

fn carry_function(ins: &Ins, ty: Type) -> Option<LaneFn> {
    by_integer!(
        ty,
        T,
        match (ins.root(), ins.has("hi")) {
            ("add", _) => carry(|a: T, b: T, _, _| T::add_carry(a, b, false)),
            ("addc", _) => carry(|a: T, b: T, _, carry| T::add_carry(a, b, carry)),
            ("sub", _) => carry(|a: T, b: T, _, _| T::subtract_borrow(a, b, false)),
            ("subc", _) => carry(|a: T, b: T, _, borrow| T::subtract_borrow(a, b, borrow)),
            ("mad", false) => carry(|a: T, b: T, c, _| T::add_carry(a.wrapping_mul(b), c, false)),
            ("mad", true) =>
                carry(|a: T, b: T, c, _| T::add_carry(T::multiply_high(a, b), c, false)),
            ("madc", false) =>
                carry(|a: T, b: T, c, carry| T::add_carry(a.wrapping_mul(b), c, carry)),
            _ => carry(|a: T, b: T, c, carry| T::add_carry(T::multiply_high(a, b), c, carry)),
        }
    )
}

/// The type of one of `count` equal parts.
fn part_type(ty: Type, count: usize) -> Result<Type> {
    match ty.size_bytes() / count.max(1) {
        1 => Ok(Type::B8),
        2 => Ok(Type::B16),
        4 => Ok(Type::B32),
        8 => Ok(Type::B64),
        _ => Err(malformed(format!("{count} parts of a {}", ty.name()))),
    }
}

/// Function of predicate `a`, complemented or not, and of the condition `c`, flipped or not.
fn combination(combine: Option<&str>, complement: bool, flip: bool) -> LaneFn {
    match (combine, complement, flip) {
        (None, false, _) => logic(|a, _, _| a),
        (None, true, _) => logic(|a, _, _| !a),
        (Some("and"), false, false) => logic(|a, _, c| a & c),
        (Some("and"), false, true) => logic(|a, _, c| a & !c),
        (Some("and"), true, false) => logic(|a, _, c| !a & c),
        (Some("and"), true, true) => logic(|a, _, c| !a & !c),
        (Some("or"), false, false) => logic(|a, _, c| a | c),
        (Some("or"), false, true) => logic(|a, _, c| a | !c),
        (Some("or"), true, false) => logic(|a, _, c| !a | c),
        (Some("or"), true, true) => logic(|a, _, c| !a | !c),
        (Some(_), false, false) | (Some(_), true, true) => logic(|a, _, c| a ^ c),
        (Some(_), ..) => logic(|a, _, c| !(a ^ c)),
    }
}

fn two_types(ins: &Ins, ty: Type) -> Vec<Type> {
    match ins.root() {
        "shl" | "shr" => vec![ty, Type::U32],
        "bmsk" | "szext" => vec![Type::U32, Type::U32],
        _ => vec![ty, ty],
    }
}

fn three_types(ins: &Ins, ty: Type) -> Vec<Type> {
    match ins.root() {
        "mad" if ins.has("wide") => vec![ty, ty, widened(ty)],
        "bfe" => vec![ty, Type::U32, Type::U32],
        "dp4a" | "dp2a" | "prmt" | "shf" => vec![Type::B32; 3],
        _ => vec![ty; 3],
    }
}

fn one_source(ins: &Ins, ty: Type) -> Option<LaneFn> {
    match ins.root() {
        "neg" => by_width!(ty, T, unary(|a: T| a.wrapping_neg())),
        "abs" => {
            by_type!(ty, T, [S16 => i16, S32 => i32, S64 => i64], unary(|a: T| a.wrapping_abs()))
        }
        "not" => by_width!(ty, T, unary(|a: T| !a)),
        "cnot" => by_width!(ty, T, unary(|a: T| T::from(a == 0))),
        "popc" => by_type!(ty, T, [B32 => u32, B64 => u64], unary(|a: T| a.count_ones())),
        "clz" => by_type!(ty, T, [B32 => u32, B64 => u64], unary(|a: T| a.leading_zeros())),
        "brev" => by_type!(ty, T, [B32 => u32, B64 => u64], unary(|a: T| a.reverse_bits())),
        "bfind" if ins.has("shiftamt") => by_integer!(
            ty,
            T,
            unary(|a: T| {
                let at = T::find(a);
                if at == u32::MAX { at } else { T::BITS - 1 - at }
            })
        ),
        "bfind" => by_integer!(ty, T, unary(|a: T| T::find(a))),
        _ => None,
    }
}

fn two_sources(ins: &Ins, ty: Type) -> Option<LaneFn> {
    match ins.root() {
        "add" | "sub" | "min" | "max" if matches!(ty, Type::U16x2 | Type::S16x2) => {
            packed_integers(ins, ty)
        }
        "add" | "sub" => sum(ins, ty),
        "mul" if ins.has("wide") => {
            by_type!(ty, T, [U16 => u16, S16 => i16, U32 => u32, S32 => i32], binary(T::multiply_wide))
        }
        "mul" if ins.has("hi") => by_integer!(ty, T, binary(T::multiply_high)),
        "mul" => by_width!(ty, T, binary(|a: T, b: T| a.wrapping_mul(b))),
        "mul24" => multiply_24(ins, ty),
        "div" => by_integer!(ty, T, binary(T::divide)),
        "rem" => by_integer!(ty, T, binary(T::remainder)),
        "min" => by_integer!(ty, T, binary(|a: T, b: T| a.min(b))),
        "max" => by_integer!(ty, T, binary(|a: T, b: T| a.max(b))),
        _ => two_bit_strings(ins, ty),
    }
}

fn sum(ins: &Ins, ty: Type) -> Option<LaneFn> {
    match (ins.root(), ins.has("sat")) {
        ("add", true) => {
            by_type!(ty, T, [S32 => i32], binary(|a: T, b: T| a.saturating_add(b)))
        }
        (_, true) => by_type!(ty, T, [S32 => i32], binary(|a: T, b: T| a.saturating_sub(b))),
        ("add", false) => by_width!(ty, T, binary(|a: T, b: T| a.wrapping_add(b))),
        (_, false) => by_width!(ty, T, binary(|a: T, b: T| a.wrapping_sub(b))),
    }
}

fn two_bit_strings(ins: &Ins, ty: Type) -> Option<LaneFn> {
    match ins.root() {
        "and" => by_width!(ty, T, binary(|a: T, b: T| a & b)),
        "or" => by_width!(ty, T, binary(|a: T, b: T| a | b)),
        "xor" => by_width!(ty, T, binary(|a: T, b: T| a ^ b)),
        "shl" => by_width!(ty, T, binary(T::shift_left)),
        "shr" => by_integer!(ty, T, binary(T::shift_right)),
        "bmsk" => Some(bit_mask(ins)),
        "szext" => {
            by_type!(ty, T, [U32 => u32, S32 => i32], binary(|a: T, b: u32| T::extract(a, 0, b.min(32))))
        }
        _ => None,
    }
}

fn bit_mask(ins: &Ins) -> LaneFn {
    if ins.has("wrap") {
        binary(|a: u32, b: u32| u32::shift_left(u32::shift_left(1, b & 31).wrapping_sub(1), a & 31))
    } else {
        binary(|a: u32, b: u32| {
            let field = if b > 31 { !0 } else { (1 << b) - 1 };
            u32::shift_left(field, a)
        })
    }
}

/// `add.u16x2` and its kin.
fn packed_integers(ins: &Ins, ty: Type) -> Option<LaneFn> {
    macro_rules! halves {
        ($T:ty, $f:expr) => {
            Some(binary(|a: u32, b: u32| {
                let f: fn($T, $T) -> $T = $f;
                let low = f(a as $T, b as $T) as u16;
                let high = f((a >> 16) as $T, (b >> 16) as $T) as u16;
                u32::from(low) | u32::from(high) << 16
            }))
        };
    }
    match (ins.root(), ty) {
        ("add", _) => halves!(u16, |a, b| a.wrapping_add(b)),
        ("sub", _) => halves!(u16, |a, b| a.wrapping_sub(b)),
        ("min", Type::U16x2) => halves!(u16, |a, b| a.min(b)),
        ("max", Type::U16x2) => halves!(u16, |a, b| a.max(b)),
        ("min", _) => halves!(i16, |a, b| a.min(b)),
        _ => halves!(i16, |a, b| a.max(b)),
    }
}

fn multiply_24(ins: &Ins, ty: Type) -> Option<LaneFn> {
    match (ty, ins.has("hi")) {
        (Type::U32, false) => Some(binary(|a: u32, b: u32| {
            (a & 0xff_ffff).wrapping_mul(b & 0xff_ffff)
        })),
        (Type::U32, true) => Some(binary(|a: u32, b: u32| {
            ((u64::from(a & 0xff_ffff) * u64::from(b & 0xff_ffff)) >> 16) as u32
        })),
        (Type::S32, false) => Some(binary(|a: i32, b: i32| {
            ((a << 8) >> 8).wrapping_mul((b << 8) >> 8)
        })),
        (Type::S32, true) => Some(binary(|a: i32, b: i32| {
            ((i64::from((a << 8) >> 8) * i64::from((b << 8) >> 8)) >> 16) as i32
        })),
        _ => None,
    }
}

fn three_sources(ins: &Ins, ty: Type) -> Option<LaneFn> {
    match ins.root() {
        "mad" => multiply_add(ins, ty),
        "mad24" if ins.has("lo") && ty == Type::U32 => Some(ternary(|a: u32, b: u32, c: u32| {
            (a & 0xff_ffff).wrapping_mul(b & 0xff_ffff).wrapping_add(c)
        })),
        "mad24" if ins.has("lo") && ty == Type::S32 => Some(ternary(|a: i32, b: i32, c: i32| {
            ((a << 8) >> 8).wrapping_mul((b << 8) >> 8).wrapping_add(c)
        })),
        "sad" => by_integer!(ty, T, ternary(T::absolute_difference)),
        "bfe" => {
            by_type!(ty, T, [U32 => u32, S32 => i32, U64 => u64, S64 => i64], ternary(T::extract))
        }
        "prmt" => (ins.parts.len() == 2).then(|| ternary(permute)),
        "shf" => funnel_shift(ins),
        "dp4a" => dot_of_four(ins),
        "dp2a" => dot_of_two(ins),
        _ => None,
    }
}

fn multiply_add(ins: &Ins, ty: Type) -> Option<LaneFn> {
    if ins.has("wide") {
        by_type!(ty, T, [U16 => u16, S16 => i16, U32 => u32, S32 => i32], {
            ternary(|a: T, b: T, c: <T as Integer>::Wide| T::multiply_wide(a, b).wrapping_add(c))
        })
    } else if ins.has("hi") {
        by_integer!(
            ty,
            T,
            ternary(|a: T, b: T, c: T| T::multiply_high(a, b).wrapping_add(c))
        )
    } else {
        by_width!(
            ty,
            T,
            ternary(|a: T, b: T, c: T| a.wrapping_mul(b).wrapping_add(c))
        )
    }
}

fn four_sources(ins: &Ins, ty: Type) -> Option<LaneFn> {
    match (ins.root(), ty) {
        ("bfi", Type::B32) => Some(quaternary(insert32)),
        ("bfi", Type::B64) => Some(quaternary(insert64)),
        ("lop3", Type::B32) => Some(quaternary(lookup)),
        _ => None,
    }
}

fn funnel_shift(ins: &Ins) -> Option<LaneFn> {
    Some(match (ins.has("l"), ins.has("wrap")) {
        (true, true) => ternary(|a: u32, b: u32, n: u32| (pair(a, b) << (n & 31) >> 32) as u32),
        (true, false) => ternary(|a: u32, b: u32, n: u32| (pair(a, b) << n.min(32) >> 32) as u32),
        (false, true) => ternary(|a: u32, b: u32, n: u32| (pair(a, b) >> (n & 31)) as u32),
        (false, false) => ternary(|a: u32, b: u32, n: u32| (pair(a, b) >> n.min(32)) as u32),
    })
}

#[inline(always)]
fn pair(low: u32, high: u32) -> u64 {
    u64::from(high) << 32 | u64::from(low)
}

/// `dp4a.s32.u32`: four bytes by four bytes.
fn dot_of_four(ins: &Ins) -> Option<LaneFn> {
    macro_rules! dot {
        ($A:ty, $B:ty) => {
            ternary(|a: u32, b: u32, c: u32| {
                (0..4).fold(c, |sum, k| {
                    let (x, y) = ((a >> (8 * k)) as $A as i32, (b >> (8 * k)) as $B as i32);
                    sum.wrapping_add((x * y) as u32)
                })
            })
        };
    }
    Some(match ins.types()[..] {
        [Type::U32, Type::U32] => dot!(u8, u8),
        [Type::U32, Type::S32] => dot!(u8, i8),
        [Type::S32, Type::U32] => dot!(i8, u8),
        [Type::S32, Type::S32] => dot!(i8, i8),
        _ => return None,
    })
}

/// `dp2a.lo.s32.u32`: two halves by the lower two bytes; by the upper ones without `.lo`.
fn dot_of_two(ins: &Ins) -> Option<LaneFn> {
    macro_rules! dot {
        ($A:ty, $B:ty) => {
            if ins.has("lo") {
                dot!($A, $B, 0)
            } else {
                dot!($A, $B, 16)
            }
        };
        ($A:ty, $B:ty, $shift:expr) => {
            ternary(|a: u32, b: u32, c: u32| {
                (0..2).fold(c, |sum, k| {
                    let x = (a >> (16 * k)) as $A as i32;
                    let y = (b >> (8 * k + $shift)) as $B as i32;
                    sum.wrapping_add((x * y) as u32)
                })
            })
        };
    }
    Some(match ins.types()[..] {
        [Type::U32, Type::U32] => dot!(u16, u8),
        [Type::U32, Type::S32] => dot!(u16, i8),
        [Type::S32, Type::U32] => dot!(i16, u8),
        [Type::S32, Type::S32] => dot!(i16, i8),
        _ => return None,
    })
}

/// Comparison by name; `None` if there is none for the type.
// Negations make a comparison true for NaN.
#[allow(
    clippy::neg_cmp_op_on_partial_ord,
    clippy::double_comparisons,
    clippy::eq_op,
    clippy::nonminimal_bool
)]
fn comparison(name: &str, ty: Type, ftz: bool) -> Option<LaneFn> {
    let unsigned = matches!(name, "lo" | "ls" | "hi" | "hs");
    match ty {
        Type::F32 if ftz => {
            float_comparison!(name, f32, |x: f32| crate::numeric::approximate::flush(x))
        }
        Type::F32 => float_comparison!(name, f32, |x: f32| x),
        Type::F64 => float_comparison!(name, f64, |x: f64| x),
        Type::S16 | Type::S32 | Type::S64 if unsigned => None,
        _ if matches!(name, "eq" | "ne") => {
            by_width!(
                ty,
                T,
                if name == "eq" {
                    compare(|a: T, b: T| a == b)
                } else {
                    compare(|a: T, b: T| a != b)
                }
            )
        }
        _ => by_integer!(
            ty,
            T,
            match name {
                "lt" | "lo" => compare(|a: T, b: T| a < b),
                "le" | "ls" => compare(|a: T, b: T| a <= b),
                "gt" | "hi" => compare(|a: T, b: T| a > b),
                "ge" | "hs" => compare(|a: T, b: T| a >= b),
                _ => return None,
            }
        ),
    }
}

/// All operands of a list or a single one, as registers of one type.
impl Decoder<'_> {
    pub(super) fn sources(&mut self, operand: &Operand, ty: Type) -> Result<Vec<u32>> {
        parts(operand)
            .iter()
            .map(|part| self.source(part, ty))
            .collect()
    }

    /// The first two sources, of one type.
    pub(super) fn lhs_rhs(&mut self, ins: &Ins, ty: Type) -> Result<(u32, u32)> {
        Ok((
            self.source(ins.operand(1)?, ty)?,
            self.source(ins.operand(2)?, ty)?,
        ))
    }

    pub(super) fn targets(&mut self, operand: &Operand, ty: Type) -> Result<Vec<u32>> {
        parts(operand)
            .iter()
            .map(|part| self.target(part, ty))
            .collect()
    }
}
