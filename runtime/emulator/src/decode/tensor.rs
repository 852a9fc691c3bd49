//! Matrix instructions: `ldmatrix`, `stmatrix`, `mma.sync`, `wgmma`.

use super::{
    Decoder, Ins, malformed,
    memory::space,
    program::{Action, MatrixAccess, Mma, NONE, Shape, Wgmma},
    unsupported,
};
use crate::{fault::Result, lanes::Slots, parse::ast::Operand, types::Type};

impl<'a> Decoder<'a> {
    /// `false` if the opcode is none of these.
    pub(super) fn tensor(&mut self, ins: &Ins<'a>) -> Result<bool> {
        match ins.root() {
            "ldmatrix" | "stmatrix" => self.matrix_access(ins)?,
            "mma" if ins.has("sync") && !ins.has("sp") => self.mma(ins)?,
            "wgmma" => return self.wgmma(ins),
            _ => return Ok(false),
        }
        Ok(true)
    }

    fn matrix_access(&mut self, ins: &Ins<'a>) -> Result<()> {
        let is_load = ins.root() == "ldmatrix";
        if !ins.has("m8n8") || !ins.has("b16") {
            return Err(unsupported("shapes other than m8n8.b16"));
        }
        let (address, list) = if is_load { (1, 0) } else { (0, 1) };
        let address = self.address(ins.operand(address)?, space(ins))?;
        let operand = ins.operand(list)?;
        let registers = if is_load {
            self.targets(operand, Type::B32)?
        } else {
            self.sources(operand, Type::B32)?
        };
        let expected = if ins.has("x4") {
            4
        } else if ins.has("x2") {
            2
        } else {
            1
        };
        if registers.len() != expected {
            return Err(malformed(format!(
                "expected {expected} registers, found {}",
                registers.len()
            )));
        }
        let access = Box::new(MatrixAccess {
            address,
            transposed: ins.has("trans"),
            registers,
        });
        let action = if is_load {
            Action::LoadMatrix(access)
        } else {
            Action::StoreMatrix(access)
        };
        self.emit(action, Slots::default());
        Ok(())
    }

    fn mma(&mut self, ins: &Ins<'a>) -> Result<()> {
        ins.expect_operands(4)?;
        let shape = shape(ins)?;
        let types: Vec<Type> = ins.parts.iter().filter_map(|p| Type::parse(p)).collect();
        let [accumulator, a, b, last] = types[..] else {
            return Err(malformed("expected four types"));
        };
        let known = [
            Type::F16,
            Type::BF16,
            Type::TF32,
            Type::F64,
            Type::U8,
            Type::S8,
            Type::E4M3,
            Type::E5M2,
        ];
        if !known.contains(&a)
            || !known.contains(&b)
            || accumulator != last
            || !ins.has("row")
            || !ins.has("col")
        {
            return Err(unsupported("these types and layouts"));
        }
        // Elements in 256 bits of a row; twice as many for doubles, whose rows are spread over more registers.
        let most = if a == Type::F64 {
            16
        } else {
            32 / a.size_bytes().max(b.size_bytes())
        };
        if shape.k > most
            || (shape.m, shape.n) != (16, 8) && (shape.m != 8 || shape.n != 8 || a == Type::F16)
        {
            return Err(unsupported("this shape"));
        }
        let register = |ty: Type| {
            if ty == Type::F64 {
                Type::F64
            } else {
                Type::B32
            }
        };
        let d = self.targets(ins.operand(0)?, register(accumulator))?;
        let fragments = [
            self.sources(ins.operand(1)?, register(a))?,
            self.sources(ins.operand(2)?, register(b))?,
            self.sources(ins.operand(3)?, register(last))?,
        ];
        let per_lane = |elements: usize, ty: Type| {
            elements * ty.size_bytes() / if ty == Type::F64 { 8 } else { 4 } / 32
        };
        let wanted = [
            per_lane(shape.m * shape.k, a),
            per_lane(shape.k * shape.n, b),
            per_lane(shape.m * shape.n, accumulator),
        ];
        if fragments.iter().map(Vec::len).ne(wanted) || d.len() != wanted[2] || d.contains(&NONE) {
            return Err(malformed(format!(
                "expected {wanted:?} registers for a, b and c"
            )));
        }
        let saturates = ins.has("satfinite");
        let mma = Mma {
            shape,
            a,
            b,
            accumulator,
            saturates,
            d,
            fragments,
        };
        self.emit(Action::Mma(Box::new(mma)), Slots::default());
        Ok(())
    }

    fn wgmma(&mut self, ins: &Ins<'a>) -> Result<bool> {
        match ins.parts[1] {
            "fence" => self.emit(Action::Nothing, Slots::default()),
            "commit_group" => self.emit(Action::WgmmaCommit, Slots::default()),
            "wait_group" => {
                let Operand::Integer(n) = *ins.operand(0)? else {
                    return Err(malformed("expected a number"));
                };
                self.emit(Action::WgmmaWait(n as u32), Slots::default());
            }
            "mma_async" if !ins.has("sp") => self.wgmma_product(ins)?,
            _ => return Ok(false),
        }
        Ok(true)
    }

    fn wgmma_product(&mut self, ins: &Ins<'a>) -> Result<()> {
        let shape = shape(ins)?;
        let types: Vec<Type> = ins.parts.iter().filter_map(|p| Type::parse(p)).collect();
        let [accumulator, a, b] = types[..] else {
            return Err(malformed("expected three types"));
        };
        let k = match a {
            Type::F16 | Type::BF16 => 16,
            Type::TF32 => 8,
            Type::E4M3 | Type::E5M2 | Type::U8 | Type::S8 => 32,
            _ => return Err(unsupported("these types")),
        };
        let fits = shape.m == 64
            && shape.k == k
            && shape.n.is_multiple_of(8)
            && (8..=256).contains(&shape.n);
        if !fits
            || a.size_bytes() != b.size_bytes()
            || !matches!(accumulator, Type::F32 | Type::F16 | Type::S32)
        {
            return Err(unsupported("this shape"));
        }
        let d = self.targets(ins.operand(0)?, Type::B32)?;
        let expected = if accumulator == Type::F16 {
            shape.n / 4
        } else {
            shape.n / 2
        };
        if d.len() != expected || d.contains(&NONE) {
            return Err(malformed(format!(
                "expected {expected} accumulator registers, found {}",
                d.len()
            )));
        }
        let (a_registers, a_descriptor) = match ins.operand(1)? {
            Operand::Vector(list) if list.len() == 4 => {
                (self.sources(ins.operand(1)?, Type::B32)?, NONE)
            }
            Operand::Vector(_) => return Err(malformed("expected four registers for a")),
            descriptor => (vec![], self.source(descriptor, Type::B64)?),
        };
        let b_descriptor = self.source(ins.operand(2)?, Type::B64)?;
        let scale_d = match ins.operands.get(3) {
            Some(condition) => self.condition(condition)?,
            None => (NONE, 0),
        };
        // Scales of 1 or -1, then transpositions: of both operands, or of `b` if `a` is in registers.
        let immediates: Vec<u64> = ins.operands[4.min(ins.operands.len())..]
            .iter()
            .map(immediate)
            .collect::<Result<_>>()?;
        let at = |k: usize| immediates.get(k).copied();
        let negate = [at(0), at(1)].map(|scale| scale == Some(u64::MAX));
        let transposed = if a_registers.is_empty() {
            [at(2), at(3)]
        } else {
            [None, at(2)]
        }
        .map(|t| t == Some(1));
        if transposed.contains(&true) && a.size_bytes() != 2 {
            return Err(unsupported("transposed operands that are not 16 bits wide"));
        }
        let wgmma = Wgmma {
            shape,
            a,
            b,
            accumulator,
            d,
            a_registers,
            a_descriptor,
            b_descriptor,
            scale_d,
            negate,
            transposed,
        };
        self.emit(Action::Wgmma(Box::new(wgmma)), Slots::default());
        Ok(())
    }
}

pub(super) fn immediate(operand: &Operand) -> Result<u64> {
    match operand {
        Operand::Integer(value) => Ok(*value),
        _ => Err(malformed("expected a number")),
    }
}

/// `m16n8k16`
fn shape(ins: &Ins) -> Result<Shape> {
    let parse = |part: &str| {
        let (m, rest) = part.strip_prefix('m')?.split_once('n')?;
        let (n, k) = rest.split_once('k')?;
        Some(Shape {
            m: m.parse().ok()?,
            n: n.parse().ok()?,
            k: k.parse().ok()?,
        })
    };
    let shape = ins
        .parts
        .iter()
        .find_map(|p| parse(p))
        .ok_or_else(|| malformed("no shape"))?;
    if [shape.m, shape.n, shape.k]
        .iter()
        .all(|s| (1..=256).contains(s))
    {
        Ok(shape)
    } else {
        Err(unsupported("this shape"))
    }
}
