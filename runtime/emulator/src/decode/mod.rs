//! Parsed functions to programs: operands become register slots, opcodes become actions, calls are inlined.
//!
//! A kernel is refused before it runs, with every instruction that the emulator lacks, each with its PTX line.

mod arithmetic;
mod asynchronous;
mod control;
mod convert;
mod float;
mod memory;
mod operands;
pub(crate) mod program;
mod tensor;

use std::collections::HashMap;

use program::{Action, Constant, Guard, Instruction, NONE, ParamLayout, Program};

use crate::{
    fault::{Fault, FaultKind, Result},
    lanes::{LaneFn, Slots},
    parse::ast::{Function, Operand, Source, Space, Statement},
    types::Type,
};

/// Instructions of one kernel with its functions inlined, at most.
const MAX_INSTRUCTIONS: usize = 4 << 20;
/// Local memory of one thread in bytes, at most: CUDA's limit.
const MAX_LOCAL_BYTES: usize = 512 << 10;
/// Registers of a kernel, at most: far more than compiled code has.
const MAX_UNITS: u32 = 1 << 17;
/// Unsupported instructions that a message lists, at most.
const MAX_LISTED: usize = 20;

/// Decodes the entry `name`.
pub(crate) fn decode(source: &Source, name: &str) -> Result<Program> {
    let entry = source
        .functions
        .get(name)
        .filter(|f| f.is_entry)
        .ok_or_else(|| no_kernel(source, name))?;
    let mut decoder = Decoder::new(source);
    decoder.lay_out_shared(entry);
    let params = decoder.lay_out_params(entry);
    decoder.function(entry)?;
    decoder.emit(Action::Exit, Slots::default());
    decoder.patch_branches()?;
    if !decoder.unsupported.is_empty() {
        return Err(decoder.unsupported_fault(name));
    }
    decoder.check_sizes(name)?;
    let param_bytes = params.last().map_or(0, |p| p.offset + p.size_bytes);
    Ok(Program {
        name: name.to_owned(),
        code: decoder.code,
        units: decoder.units as usize,
        predicates: decoder.predicates as usize,
        constants: decoder.constants,
        params,
        param_bytes,
        shared_static_bytes: decoder.shared_bytes,
        shared_dynamic_offset: decoder.dynamic_shared,
        local_bytes: decoder.local_bytes,
        shared_grain: decoder.shared_grain,
        bounds: entry.bounds,
    })
}

fn no_kernel(source: &Source, name: &str) -> Fault {
    let mut names: Vec<&str> = source
        .functions
        .values()
        .filter(|f| f.is_entry)
        .map(|f| f.name.as_str())
        .collect();
    names.sort_unstable();
    Fault::new(
        FaultKind::InvalidCall,
        format!(
            "no kernel `{name}` in the module, which has [{}]",
            names.join(", ")
        ),
    )
}

/// Where a variable's bytes are.
#[derive(Clone, Copy)]
enum Place {
    Param(usize),
    Shared(usize),
    Local(usize),
}

/// Registers and variables of one function, shared by all places that call it.
#[derive(Clone, Default)]
struct Frame {
    /// Slot of each virtual register.
    registers: Vec<u32>,
    /// Place of each variable that is not a module variable.
    places: Vec<Option<Place>>,
}

/// A branch whose target is known when its function is complete.
struct Fixup {
    at: usize,
    entry: usize,
    label: usize,
}

struct Decoder<'a> {
    source: &'a Source,
    code: Vec<Instruction>,
    units: u32,
    predicates: u32,
    constants: Vec<(u32, Constant)>,
    /// Registers of constants that exist already, by their contents.
    known: HashMap<String, u32>,
    frames: HashMap<String, Frame>,
    /// Functions that are being inlined, outermost first.
    stack: Vec<&'a Function>,
    /// Code index of each label, one list per inlined call.
    labels: Vec<Vec<u32>>,
    label_list: usize,
    fixups: Vec<Fixup>,
    shared: HashMap<String, usize>,
    shared_bytes: usize,
    dynamic_shared: usize,
    local_bytes: usize,
    shared_grain: usize,
    /// Statement that is being decoded: its guard, line and CUDA line.
    guard: Guard,
    line: u32,
    loc: Option<(u32, u32)>,
    unsupported: Vec<(u32, String)>,
    /// The condition code of `add.cc` and its kin.
    carry: u32,
}

impl<'a> Decoder<'a> {
    fn new(source: &'a Source) -> Decoder<'a> {
        Decoder {
            source,
            code: vec![],
            units: 0,
            // Predicate 0 is the carry, predicate 1 a scratch register.
            predicates: 2,
            constants: vec![],
            known: HashMap::new(),
            frames: HashMap::new(),
            stack: vec![],
            labels: vec![],
            label_list: 0,
            fixups: vec![],
            shared: HashMap::new(),
            shared_bytes: 0,
            dynamic_shared: 0,
            local_bytes: 0,
            shared_grain: 4,
            guard: Guard::ALWAYS,
            line: 0,
            loc: None,
            unsupported: vec![],
            carry: 0,
        }
    }

    /// Refuses kernels that no device would run, before memory is asked for.
    fn check_sizes(&self, name: &str) -> Result<()> {
        if self.local_bytes > MAX_LOCAL_BYTES {
            let message = format!(
                "kernel `{name}` needs {} bytes of local memory per thread; {MAX_LOCAL_BYTES} are possible",
                self.local_bytes
            );
            return Err(unsupported(message));
        }
        if self.units > MAX_UNITS {
            let message = format!(
                "kernel `{name}` has registers for {} words per thread; {MAX_UNITS} are possible",
                self.units
            );
            return Err(unsupported(message));
        }
        Ok(())
    }

    /// Places module-level shared variables; those without a length share the dynamic part.
    fn lay_out_shared(&mut self, entry: &Function) {
        let in_functions = self
            .source
            .functions
            .values()
            .filter(|f| !f.is_entry)
            .flat_map(|f| &f.variables);
        let variables: Vec<_> = self
            .source
            .variables
            .iter()
            .chain(&entry.variables)
            .chain(in_functions)
            .filter(|v| v.space == Space::Shared)
            .collect();
        for variable in variables.iter().filter(|v| v.size_bytes > 0) {
            let offset = self.shared_bytes.next_multiple_of(variable.align);
            self.shared.insert(variable.name.clone(), offset);
            self.shared_bytes = offset + variable.size_bytes;
        }
        let dynamic = || variables.iter().filter(|v| v.size_bytes == 0);
        let align = dynamic().map(|v| v.align).max().unwrap_or(16).max(16);
        self.dynamic_shared = self.shared_bytes.next_multiple_of(align);
        for variable in dynamic() {
            self.shared
                .insert(variable.name.clone(), self.dynamic_shared);
        }
    }

    fn lay_out_params(&mut self, entry: &Function) -> Vec<ParamLayout> {
        let mut offset = 0;
        let place = |k: &usize| {
            let variable = &entry.variables[*k];
            let at = usize::next_multiple_of(offset, variable.align);
            offset = at + variable.size_bytes;
            ParamLayout {
                offset: at,
                size_bytes: variable.size_bytes,
            }
        };
        entry.params.iter().map(place).collect()
    }

    /// Decodes a function's body at the end of the code.
    fn function(&mut self, function: &'a Function) -> Result<()> {
        if self.stack.iter().any(|f| f.name == function.name) {
            let message = format!(
                "function `{}` calls itself, which the emulator does not support",
                function.name
            );
            return Err(Fault::at(FaultKind::Unsupported, function.line, message));
        }
        self.add_frame(function);
        let outer = std::mem::replace(&mut self.label_list, self.labels.len());
        // One label more than the function has: its end, where `ret` leads.
        self.labels.push(vec![0; function.labels.len() + 1]);
        self.stack.push(function);
        let mut by_position: Vec<usize> = (0..function.labels.len()).collect();
        by_position.sort_by_key(|k| function.labels[*k].1);
        let mut next = by_position.into_iter().peekable();
        for (k, statement) in function.body.iter().enumerate() {
            while let Some(label) = next.next_if(|label| function.labels[*label].1 == k) {
                self.set_label(label);
            }
            self.statement(statement)?;
        }
        for label in next {
            self.set_label(label);
        }
        self.set_label(function.labels.len());
        self.stack.pop();
        self.label_list = outer;
        Ok(())
    }

    fn add_frame(&mut self, function: &Function) {
        if !self.frames.contains_key(&function.name) {
            let frame = self.new_frame(function);
            self.frames.insert(function.name.clone(), frame);
        }
    }

    fn set_label(&mut self, label: usize) {
        let here = self.code.len() as u32;
        self.labels[self.label_list][label] = here;
    }

    fn new_frame(&mut self, function: &Function) -> Frame {
        let mut frame = Frame::default();
        for ty in &function.registers {
            let slot = self.new_register(*ty);
            frame.registers.push(slot);
        }
        let mut param_offset = 0;
        for (k, variable) in function.variables.iter().enumerate() {
            let place = match variable.space {
                Space::Param if function.is_entry && function.params.contains(&k) => {
                    let at = usize::next_multiple_of(param_offset, variable.align);
                    param_offset = at + variable.size_bytes;
                    Some(Place::Param(at))
                }
                Space::Param | Space::Local => {
                    let at = self.local_bytes.next_multiple_of(variable.align.max(8));
                    self.local_bytes = at + variable.size_bytes;
                    Some(Place::Local(at))
                }
                Space::Shared => self.shared.get(&variable.name).map(|at| Place::Shared(*at)),
                Space::Global | Space::Const => None,
            };
            frame.places.push(place);
        }
        frame
    }

    fn new_register(&mut self, ty: Type) -> u32 {
        if ty == Type::Pred {
            self.predicates += 1;
            return self.predicates - 1;
        }
        let units = ty.units().max(1);
        self.units += units;
        self.units - units
    }

    fn statement(&mut self, statement: &'a Statement) -> Result<()> {
        self.line = statement.line;
        self.loc = statement.loc;
        self.guard = self.guard_of(statement)?;
        if self.code.len() > MAX_INSTRUCTIONS {
            return Err(unsupported(
                "the kernel is too long once its functions are inlined",
            ));
        }
        let ins = Ins {
            parts: statement.opcode.split('.').collect(),
            operands: &statement.operands,
        };
        let lacks = match self.instruction(&ins) {
            Ok(true) => return Ok(()),
            Ok(false) => statement.opcode.clone(),
            Err(fault) if fault.ptx_line().is_some() => return Err(fault),
            Err(fault) => {
                let what = format!("{}: {fault}", statement.opcode);
                if fault.kind() != FaultKind::Unsupported {
                    return Err(Fault::at(fault.kind(), statement.line, what));
                }
                what
            }
        };
        self.unsupported.push((statement.line, lacks));
        Ok(())
    }

    fn guard_of(&mut self, statement: &Statement) -> Result<Guard> {
        let Some((register, negated)) = statement.guard else {
            return Ok(Guard::ALWAYS);
        };
        Ok(Guard {
            predicate: self.predicate(&Operand::Register(register))?,
            flip: if negated { u32::MAX } else { 0 },
        })
    }

    /// Decodes into actions; `false` if there is no such instruction.
    fn instruction(&mut self, ins: &Ins<'a>) -> Result<bool> {
        Ok(self.tensor(ins)?
            || self.asynchronous(ins)?
            || self.control(ins)?
            || self.memory(ins)?
            || self.convert(ins)?
            || self.float(ins)?
            || self.arithmetic(ins)?)
    }

    /// Appends an instruction with the statement's guard.
    fn emit(&mut self, action: Action, slots: Slots) {
        // Arithmetic whose result goes to `_` has no effect.
        if matches!(action, Action::Lanes(_)) && (slots.d == NONE || slots.p == NONE) {
            return;
        }
        self.code.push(Instruction {
            action,
            slots,
            guard: self.guard,
            line: self.line,
            loc: self.loc,
        });
    }

    /// Appends an instruction without registers in its slots.
    fn emit_action(&mut self, action: Action) {
        self.emit(action, Slots::default());
    }

    fn emit_lane_fn(&mut self, run: LaneFn, slots: Slots) {
        self.emit(Action::Lanes(run), slots);
    }

    fn patch_branches(&mut self) -> Result<()> {
        for fixup in &self.fixups {
            let target = self.labels[fixup.entry][fixup.label];
            match &mut self.code[fixup.at].action {
                Action::Branch(to) => *to = target,
                _ => return Err(unsupported("a branch that is none")),
            }
        }
        Ok(())
    }

    fn unsupported_fault(&self, name: &str) -> Fault {
        let mut lines: Vec<String> = self
            .unsupported
            .iter()
            .take(MAX_LISTED)
            .map(|(line, what)| format!("PTX line {line}: {what}"))
            .collect();
        if self.unsupported.len() > MAX_LISTED {
            lines.push(format!("and {} more", self.unsupported.len() - MAX_LISTED));
        }
        let message = format!(
            "kernel `{name}` has instructions that the emulator lacks:\n  {}",
            lines.join("\n  ")
        );
        Fault::new(FaultKind::Unsupported, message)
    }
}

/// A statement with its opcode taken apart.
struct Ins<'a> {
    parts: Vec<&'a str>,
    operands: &'a [Operand],
}

impl<'a> Ins<'a> {
    fn root(&self) -> &'a str {
        self.parts[0]
    }

    fn has(&self, modifier: &str) -> bool {
        self.parts[1..].contains(&modifier)
    }

    /// The last type suffix.
    fn ty(&self) -> Result<Type> {
        let mut suffixes = self.parts.iter().rev();
        suffixes
            .find_map(|p| Type::parse(p))
            .ok_or_else(|| malformed("no type suffix"))
    }

    fn first_type(&self) -> Result<Type> {
        let mut suffixes = self.parts.iter();
        suffixes
            .find_map(|p| Type::parse(p))
            .ok_or_else(|| malformed("no type suffix"))
    }

    /// All type suffixes.
    fn types(&self) -> Vec<Type> {
        self.parts.iter().filter_map(|p| Type::parse(p)).collect()
    }

    fn operand(&self, k: usize) -> Result<&'a Operand> {
        self.operands
            .get(k)
            .ok_or_else(|| malformed(format!("operand {} is missing", k + 1)))
    }

    /// Refuses more operands than an instruction has.
    fn expect_operands(&self, count: usize) -> Result<()> {
        if self.operands.len() == count {
            return Ok(());
        }
        Err(malformed(format!(
            "expected {count} operands, found {}",
            self.operands.len()
        )))
    }
}

/// A fault of the statement that is being decoded; its line is added on the way up.
fn malformed(message: impl Into<String>) -> Fault {
    Fault::new(FaultKind::Syntax, message)
}

/// A form of an instruction that the emulator lacks.
fn unsupported(message: impl Into<String>) -> Fault {
    Fault::new(FaultKind::Unsupported, message)
}
