//! Loads, stores and atomics.

use super::{
    Decoder, Ins, malformed,
    operands::parts,
    program::{Access, Action, Address, AddressSpace, Atomic, AtomicOp, Extend, NONE},
    unsupported,
};
use crate::{fault::Result, parse::ast::Operand, types::Type};

impl<'a> Decoder<'a> {
    /// `false` if the opcode is none of these.
    pub(super) fn memory(&mut self, ins: &Ins<'a>) -> Result<bool> {
        match ins.root() {
            "ld" | "ldu" => self.load(ins)?,
            "st" => self.store(ins)?,
            "atom" | "red" if !ins.has("async") => self.atomic(ins)?,
            _ => return Ok(false),
        }
        Ok(true)
    }

    fn load(&mut self, ins: &Ins<'a>) -> Result<()> {
        ins.expect_operands(2)?;
        let access = self.access(ins, ins.operand(1)?, ins.operand(0)?)?;
        self.emit_action(Action::Load(Box::new(access)));
        Ok(())
    }

    fn store(&mut self, ins: &Ins<'a>) -> Result<()> {
        ins.expect_operands(2)?;
        let access = self.access(ins, ins.operand(0)?, ins.operand(1)?)?;
        if access.address.space == AddressSpace::Param {
            return Err(malformed("a store to the parameters of an entry"));
        }
        self.emit_action(Action::Store(Box::new(access)));
        Ok(())
    }

    fn access(&mut self, ins: &Ins<'a>, address: &Operand, values: &Operand) -> Result<Access> {
        let ty = ins.ty()?;
        let space = space(ins);
        let mut list = Vec::new();
        for part in parts(values) {
            list.push(self.element(part, ty)?);
        }
        let expected = vector_length(ins);
        if list.len() != expected {
            return Err(malformed(format!(
                "expected {expected} registers, found {}",
                list.len()
            )));
        }
        let address = self.address(address, space)?;
        let strong = ["volatile", "relaxed", "acquire", "release", "mmio"];
        self.note_grain(address, ty);
        Ok(Access {
            address,
            size_bytes: ty.size_bytes(),
            extend: if ty.is_signed() {
                Extend::Sign
            } else {
                Extend::Zero
            },
            is_strong: strong.iter().any(|s| ins.has(s)),
            parts: list,
        })
    }

    /// The race check must tell the smallest accesses to shared memory apart.
    fn note_grain(&mut self, address: Address, ty: Type) {
        if matches!(address.space, AddressSpace::Shared | AddressSpace::Generic) {
            self.shared_grain = self.shared_grain.min(ty.size_bytes());
        }
    }

    /// The register of one element, which may be wider than the element.
    fn element(&mut self, part: &Operand, ty: Type) -> Result<(u32, bool)> {
        match part {
            Operand::Sink => Ok((NONE, false)),
            Operand::Register(register) => {
                let found = self.register_type(*register);
                if found == Type::Pred
                    || found.units() < ty.units()
                    || (ty.units() == 4) != (found.units() == 4)
                {
                    return Err(malformed(format!(
                        "a register for {} holds no {}",
                        found.name(),
                        ty.name()
                    )));
                }
                Ok((self.slot_of(*register), found.units() == 2))
            }
            constant => Ok((self.source(constant, ty)?, ty.units() == 2)),
        }
    }

    fn atomic(&mut self, ins: &Ins<'a>) -> Result<()> {
        let is_red = ins.root() == "red";
        let first = usize::from(!is_red);
        let op = operation(ins).ok_or_else(|| unsupported("this operation"))?;
        let ty = ins.ty()?;
        if !is_atomic(op, ty) {
            return Err(unsupported(format!("operands of type {}", ty.name())));
        }
        let d = if is_red {
            vec![]
        } else {
            self.targets(ins.operand(0)?, ty)?
        };
        let address = self.address(ins.operand(first)?, space(ins))?;
        let b = self.sources(ins.operand(first + 1)?, ty)?;
        let c = if op == AtomicOp::CompareAndSwap {
            self.source(ins.operand(first + 2)?, ty)?
        } else {
            NONE
        };
        self.note_grain(address, ty);
        let atomic = Atomic {
            op,
            ty,
            address,
            d,
            b,
            c,
        };
        self.emit_action(Action::Atomic(Box::new(atomic)));
        Ok(())
    }
}

fn vector_length(ins: &Ins) -> usize {
    let length = ins.parts.iter().find_map(|p| match *p {
        "v2" => Some(2),
        "v4" => Some(4),
        "v8" => Some(8),
        _ => None,
    });
    length.unwrap_or(1)
}

fn is_atomic(op: AtomicOp, ty: Type) -> bool {
    match ty {
        Type::F32 | Type::F64 | Type::F16 | Type::BF16 | Type::F16x2 | Type::BF16x2 => {
            matches!(op, AtomicOp::Add | AtomicOp::Min | AtomicOp::Max)
        }
        Type::B16 => op == AtomicOp::CompareAndSwap,
        Type::B128 => false,
        other => matches!(other.size_bytes(), 4 | 8),
    }
}

pub(super) fn operation(ins: &Ins) -> Option<AtomicOp> {
    ins.parts[1..].iter().find_map(|part| {
        Some(match *part {
            "add" => AtomicOp::Add,
            "min" => AtomicOp::Min,
            "max" => AtomicOp::Max,
            "and" => AtomicOp::And,
            "or" => AtomicOp::Or,
            "xor" => AtomicOp::Xor,
            "exch" => AtomicOp::Exchange,
            "cas" => AtomicOp::CompareAndSwap,
            "inc" => AtomicOp::Increment,
            "dec" => AtomicOp::Decrement,
            _ => return None,
        })
    })
}

/// The state space that an opcode names; generic without one.
pub(super) fn space(ins: &Ins) -> AddressSpace {
    for part in &ins.parts[1..] {
        match *part {
            "global" | "const" => return AddressSpace::Global,
            "shared" | "shared::cta" | "shared::cluster" => return AddressSpace::Shared,
            "local" => return AddressSpace::Local,
            "param" | "param::entry" | "param::func" => return AddressSpace::Param,
            _ => {}
        }
    }
    AddressSpace::Generic
}
