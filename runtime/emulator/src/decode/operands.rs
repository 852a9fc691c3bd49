//! Operands to slots: registers, constants, special registers, addresses.

use super::{
    Decoder, Place, malformed,
    program::{Address, AddressSpace, Base, Constant, NONE},
    unsupported,
};
use crate::{
    fault::Result,
    memory::window,
    parse::ast::{Operand, Space},
    special::Special,
    types::Type,
};

impl Decoder<'_> {
    /// The register of an operand that is read as a `ty`.
    pub(super) fn source(&mut self, operand: &Operand, ty: Type) -> Result<u32> {
        match operand {
            Operand::Register(register) => self.register(*register, ty),
            Operand::Integer(bits) => self.constant(*bits, ty),
            Operand::Float32(bits) if ty == Type::F64 => {
                self.constant(f64::from(f32::from_bits(*bits)).to_bits(), ty)
            }
            Operand::Float32(bits) => self.constant(u64::from(*bits), ty),
            Operand::Float64(bits) if ty.units() == 1 => {
                self.constant(u64::from((f64::from_bits(*bits) as f32).to_bits()), ty)
            }
            Operand::Float64(bits) => self.constant(*bits, ty),
            Operand::Special(name) => self.special(name, ty),
            Operand::Variable(..) | Operand::Global(..) => self.address_of(operand, ty),
            other => Err(malformed(format!(
                "expected a value of type {}, found {}",
                ty.name(),
                describe(other)
            ))),
        }
    }

    /// The register that a `ty` is written to; [`NONE`] for `_`.
    pub(super) fn target(&mut self, operand: &Operand, ty: Type) -> Result<u32> {
        match operand {
            Operand::Register(register) => self.register(*register, ty),
            Operand::Sink => Ok(NONE),
            other => Err(malformed(format!(
                "expected a register of type {}, found {}",
                ty.name(),
                describe(other)
            ))),
        }
    }

    /// The slot of a register, which must be of the size of `ty`.
    fn register(&self, register: u32, ty: Type) -> Result<u32> {
        let found = self.register_type(register);
        let fits = if ty == Type::Pred || found == Type::Pred {
            found == ty
        } else {
            found.units() == ty.units()
        };
        if fits {
            return Ok(self.slot_of(register));
        }
        Err(malformed(format!(
            "expected a register for {}, found one for {}",
            ty.name(),
            found.name()
        )))
    }

    pub(super) fn register_type(&self, register: u32) -> Type {
        self.function_now().registers[register as usize]
    }

    pub(super) fn slot_of(&self, register: u32) -> u32 {
        self.frames[&self.function_now().name].registers[register as usize]
    }

    pub(super) fn function_now(&self) -> &crate::parse::ast::Function {
        self.stack
            .last()
            .expect("statements are decoded inside a function")
    }

    /// A register, not an immediate, of predicate type.
    pub(super) fn predicate(&mut self, operand: &Operand) -> Result<u32> {
        match operand {
            Operand::Register(register) => self.register(*register, Type::Pred),
            Operand::Integer(value) => self.predicate_constant(*value != 0),
            Operand::Sink => Ok(NONE),
            other => Err(malformed(format!(
                "expected a predicate, found {}",
                describe(other)
            ))),
        }
    }

    /// A predicate that may be negated: its slot, and a mask for its bits, by exclusive or.
    pub(super) fn condition(&mut self, operand: &Operand) -> Result<(u32, u32)> {
        match operand {
            Operand::Not(register) => Ok((self.register(*register, Type::Pred)?, u32::MAX)),
            Operand::Sink => Err(malformed("expected a predicate, found `_`")),
            other => Ok((self.predicate(other)?, 0)),
        }
    }

    fn predicate_constant(&mut self, value: bool) -> Result<u32> {
        let key = format!("p{value}");
        if let Some(slot) = self.known.get(&key) {
            return Ok(*slot);
        }
        Ok(self.new_constant(key, Constant::Predicate(value), Type::Pred))
    }

    /// A register that holds `bits`.
    pub(super) fn constant(&mut self, bits: u64, ty: Type) -> Result<u32> {
        let value = match ty.units() {
            1 => Constant::Narrow(match ty.size_bytes() {
                1 => bits as u8 as u32,
                2 => bits as u16 as u32,
                _ => bits as u32,
            }),
            2 => Constant::Wide(bits),
            _ => return Err(malformed(format!("no constants of type {}", ty.name()))),
        };
        Ok(self.known_constant(value, ty))
    }

    fn known_constant(&mut self, value: Constant, ty: Type) -> u32 {
        let key = format!("{value:?}{}", ty.units());
        if let Some(slot) = self.known.get(&key) {
            return *slot;
        }
        let ty = if ty.units() == 2 {
            Type::B64
        } else {
            Type::B32
        };
        self.new_constant(key, value, ty)
    }

    fn new_constant(&mut self, key: String, value: Constant, ty: Type) -> u32 {
        let slot = self.new_register(ty);
        self.constants.push((slot, value));
        self.known.insert(key, slot);
        slot
    }

    fn special(&mut self, name: &str, ty: Type) -> Result<u32> {
        let special = Special::parse(name)
            .ok_or_else(|| unsupported(format!("special register `{name}`")))?;
        if ty.units() != 1 {
            return Err(unsupported(format!(
                "special register `{name}` as {}",
                ty.name()
            )));
        }
        Ok(self.known_constant(Constant::Special(special), ty))
    }

    /// A register with the address of a variable in its own state space.
    fn address_of(&mut self, operand: &Operand, ty: Type) -> Result<u32> {
        match self.place(operand)? {
            (Some(Place::Param(at) | Place::Shared(at) | Place::Local(at)), offset) => {
                self.constant((at as i64 + offset) as u64, ty)
            }
            (None, offset) => {
                let name = self.global_name(operand)?;
                Ok(self.known_constant(Constant::Address(name, offset), ty))
            }
        }
    }

    /// Where a variable is, and the bytes added; no place for those in global memory.
    fn place(&self, operand: &Operand) -> Result<(Option<Place>, i64)> {
        match operand {
            Operand::Variable(k, offset) => {
                Ok((self.frames[&self.function_now().name].places[*k], *offset))
            }
            Operand::Global(name, offset) => {
                Ok((self.shared.get(name).map(|at| Place::Shared(*at)), *offset))
            }
            other => Err(malformed(format!(
                "expected a variable, found {}",
                describe(other)
            ))),
        }
    }

    /// Name of a module variable in global memory.
    fn global_name(&self, operand: &Operand) -> Result<String> {
        let name = match operand {
            Operand::Variable(k, _) => &self.function_now().variables[*k].name,
            Operand::Global(name, _) => name,
            other => {
                return Err(malformed(format!(
                    "expected a variable, found {}",
                    describe(other)
                )));
            }
        };
        let in_function = self.source.functions.values().flat_map(|f| &f.variables);
        let mut known = self.source.variables.iter().chain(in_function);
        match known.find(|v| &v.name == name && matches!(v.space, Space::Global | Space::Const)) {
            Some(_) => Ok(name.clone()),
            None => Err(malformed(format!("unknown name `{name}`"))),
        }
    }

    /// An address operand in the state space that the opcode names.
    pub(super) fn address(&mut self, operand: &Operand, space: AddressSpace) -> Result<Address> {
        let Operand::Memory(base, offset) = operand else {
            return Err(malformed(format!(
                "expected an address, found {}",
                describe(operand)
            )));
        };
        let (base, offset) = match &**base {
            Operand::Register(register) => (self.address_register(*register)?, *offset),
            Operand::Integer(at) => (Base::Zero, (*at as i64).wrapping_add(*offset)),
            symbol => return self.symbol_address(symbol, *offset, space),
        };
        Ok(Address {
            space,
            base,
            offset,
        })
    }

    fn address_register(&self, register: u32) -> Result<Base> {
        let slot = self.slot_of(register);
        match self.register_type(register).units() {
            1 => Ok(Base::Narrow(slot)),
            2 => Ok(Base::Wide(slot)),
            _ => Err(malformed("an address is 32 or 64 bits wide")),
        }
    }

    /// Address of a variable, in the variable's own state space if the emulator knows it.
    fn symbol_address(
        &mut self,
        symbol: &Operand,
        offset: i64,
        space: AddressSpace,
    ) -> Result<Address> {
        let fixed = |space, at: usize, more: i64| Address {
            space,
            base: Base::Zero,
            offset: at as i64 + more + offset,
        };
        Ok(match self.place(symbol)? {
            (Some(Place::Param(at)), more) => fixed(AddressSpace::Param, at, more),
            (Some(Place::Local(at)), more) => fixed(AddressSpace::Local, at, more),
            (Some(Place::Shared(at)), more) if space == AddressSpace::Generic => {
                fixed(space, at + window::SHARED as usize, more)
            }
            (Some(Place::Shared(at)), more) => fixed(AddressSpace::Shared, at, more),
            (None, _) => Address {
                space,
                base: Base::Wide(self.address_of(symbol, Type::U64)?),
                offset,
            },
        })
    }

    /// Where a `.param` or `.local` variable is in a thread's local memory.
    pub(super) fn local_variable(&self, operand: &Operand) -> Result<(usize, usize)> {
        if let (Operand::Variable(k, 0), (Some(Place::Local(at)), 0)) =
            (operand, self.place(operand)?)
        {
            return Ok((at, self.function_now().variables[*k].size_bytes));
        }
        Err(malformed(format!(
            "expected a `.param` variable, found {}",
            describe(operand)
        )))
    }
}

/// Operands of vector instructions: the parts of `{a, b}`, or the operand itself.
pub(super) fn parts(operand: &Operand) -> &[Operand] {
    match operand {
        Operand::Vector(parts) => parts,
        other => std::slice::from_ref(other),
    }
}

/// Description of an operand in a message.
pub(super) fn describe(operand: &Operand) -> String {
    match operand {
        Operand::Register(_) => "a register".to_owned(),
        Operand::Not(_) | Operand::Negated(_) => "a negated predicate".to_owned(),
        Operand::Special(name) | Operand::Global(name, _) => format!("`{name}`"),
        Operand::Integer(value) => format!("`{}`", *value as i64),
        Operand::Float32(_) | Operand::Float64(_) => "a floating-point number".to_owned(),
        Operand::Variable(..) => "a variable".to_owned(),
        Operand::Label(_) => "a label".to_owned(),
        Operand::Memory(..) | Operand::Tensor(..) => "an address".to_owned(),
        Operand::Vector(_) | Operand::List(_) => "a list".to_owned(),
        Operand::Pair(..) => "a pair".to_owned(),
        Operand::Sink => "`_`".to_owned(),
    }
}
