//! Matrix instructions: `ldmatrix`, `stmatrix`, `mma.sync`, `wgmma`.

use super::{
    Decoder, Ins, malformed,
    memory::space,
    program::{Action, MatrixAccess, Mma, NONE, Shape, Wgmma},
    unsupported,
};
use crate::{fault::Result, parse::ast::Operand, types::Type};

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
        self.emit_action(action);
        Ok(())
    }

    fn mma(&mut self, ins: &Ins<'a>) -> Result<()> {
        ins.expect_operands(4)?;
        let shape = shape(ins)?;
        let [accumulator, a, b] = mma_types(ins)?;
        check_mma_shape(shape, a, b)?;
        let d = self.targets(ins.operand(0)?, fragment_register(accumulator))?;
        let fragments = [
            self.sources(ins.operand(1)?, fragment_register(a))?,
            self.sources(ins.operand(2)?, fragment_register(b))?,
            self.sources(ins.operand(3)?, fragment_register(accumulator))?,
        ];
        let wanted = [
            fragment_registers(shape.m * shape.k, a),
            fragment_registers(shape.k * shape.n, b),
            fragment_registers(shape.m * shape.n, accumulator),
        ];
        if fragments.iter().map(Vec::len).ne(wanted) || d.len() != wanted[2] || d.contains(&NONE) {
            return Err(malformed(format!(
                "expected {wanted:?} registers for a, b and c"
            )));
        }
        let mma = Mma {
            shape,
            a,
            b,
            accumulator,
            saturates: ins.has("satfinite"),
            d,
            fragments,
        };
        self.emit_action(Action::Mma(Box::new(mma)));
        Ok(())
    }

    fn wgmma(&mut self, ins: &Ins<'a>) -> Result<bool> {
        match ins.parts[1] {
            "fence" => self.emit_action(Action::Nothing),
            "commit_group" => self.emit_action(Action::WgmmaCommit),
            "wait_group" => {
                let Operand::Integer(n) = *ins.operand(0)? else {
                    return Err(malformed("expected a number"));
                };
                self.emit_action(Action::WgmmaWait(n as u32));
            }
            "mma_async" if !ins.has("sp") => self.wgmma_product(ins)?,
            _ => return Ok(false),
        }
        Ok(true)
    }

    fn wgmma_product(&mut self, ins: &Ins<'a>) -> Result<()> {
        let shape = shape(ins)?;
        let [accumulator, a, b] = wgmma_types(ins, shape)?;
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
        let (a_registers, a_descriptor) = self.wgmma_lhs(ins.operand(1)?)?;
        let b_descriptor = self.source(ins.operand(2)?, Type::B64)?;
        let scale_d = match ins.operands.get(3) {
            Some(condition) => self.condition(condition)?,
            None => (NONE, 0),
        };
        let (negate, transposed) = wgmma_modifiers(ins, !a_registers.is_empty())?;
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
        self.emit_action(Action::Wgmma(Box::new(wgmma)));
        Ok(())
    }

    /// Registers of the left-hand side, or its descriptor.
    fn wgmma_lhs(&mut self, operand: &Operand) -> Result<(Vec<u32>, u32)> {
        match operand {
            Operand::Vector(list) if list.len() == 4 => {
                Ok((self.sources(operand, Type::B32)?, NONE))
            }
            Operand::Vector(_) => Err(malformed("expected four registers for a")),
            descriptor => Ok((vec![], self.source(descriptor, Type::B64)?)),
        }
    }
}

pub(super) fn immediate(operand: &Operand) -> Result<u64> {
    match operand {
        Operand::Integer(value) => Ok(*value),
        _ => Err(malformed("expected a number")),
    }
}

/// Types of the operands of `mma`.
const MMA_TYPES: [Type; 8] = [
    Type::F16,
    Type::BF16,
    Type::TF32,
    Type::F64,
    Type::U8,
    Type::S8,
    Type::E4M3,
    Type::E5M2,
];

/// Types of the accumulator, before and after, `a` and `b`.
fn mma_types(ins: &Ins) -> Result<[Type; 3]> {
    let [accumulator, a, b, last] = ins.types()[..] else {
        return Err(malformed("expected four types"));
    };
    let known = MMA_TYPES.contains(&a) && MMA_TYPES.contains(&b) && accumulator == last;
    if !known || !ins.has("row") || !ins.has("col") {
        return Err(unsupported("these types and layouts"));
    }
    Ok([accumulator, a, b])
}

fn check_mma_shape(shape: Shape, a: Type, b: Type) -> Result<()> {
    // Elements in 256 bits of a row; twice as many for doubles, whose rows are spread over more registers.
    let most = if a == Type::F64 {
        16
    } else {
        32 / a.size_bytes().max(b.size_bytes())
    };
    let is_tall = (shape.m, shape.n) == (16, 8);
    let is_square = (shape.m, shape.n) == (8, 8) && a != Type::F16;
    if shape.k <= most && (is_tall || is_square) {
        Ok(())
    } else {
        Err(unsupported("this shape"))
    }
}

/// Type of the registers of a fragment.
fn fragment_register(ty: Type) -> Type {
    if ty == Type::F64 {
        Type::F64
    } else {
        Type::B32
    }
}

/// Registers of each lane for so many elements of a warp.
fn fragment_registers(elements: usize, ty: Type) -> usize {
    elements * ty.size_bytes() / fragment_register(ty).size_bytes() / 32
}

/// Types of accumulator, `a` and `b`, which go with the shape.
fn wgmma_types(ins: &Ins, shape: Shape) -> Result<[Type; 3]> {
    let [accumulator, a, b] = ins.types()[..] else {
        return Err(malformed("expected three types"));
    };
    let k = match a {
        Type::F16 | Type::BF16 => 16,
        Type::TF32 => 8,
        Type::E4M3 | Type::E5M2 | Type::U8 | Type::S8 => 32,
        _ => return Err(unsupported("these types")),
    };
    let fits =
        shape.m == 64 && shape.k == k && shape.n.is_multiple_of(8) && (8..=256).contains(&shape.n);
    if !fits
        || a.size_bytes() != b.size_bytes()
        || !matches!(accumulator, Type::F32 | Type::F16 | Type::S32)
    {
        return Err(unsupported("this shape"));
    }
    Ok([accumulator, a, b])
}

/// Negations and transpositions of `a` and `b`.
fn wgmma_modifiers(ins: &Ins, a_in_registers: bool) -> Result<([bool; 2], [bool; 2])> {
    // Scales of 1 or -1, then transpositions: of both operands, or of `b` if `a` is in registers.
    let immediates: Vec<u64> = ins.operands[4.min(ins.operands.len())..]
        .iter()
        .map(immediate)
        .collect::<Result<_>>()?;
    let at = |k: usize| immediates.get(k).copied();
    let negate = [at(0), at(1)].map(|scale| scale == Some(u64::MAX));
    let transposed = if a_in_registers {
        [None, at(2)]
    } else {
        [at(2), at(3)]
    };
    Ok((negate, transposed.map(|t| t == Some(1))))
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
