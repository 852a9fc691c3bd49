//! Bodies of functions: scopes, registers, labels, instructions and their operands.

use std::collections::HashMap;

use super::{
    Parser,
    ast::{Function, Operand, Space, Statement},
    lexer::Token,
    number,
};
use crate::{
    fault::{Fault, FaultKind, Result},
    types::Type,
};

/// Registers of one declaration `%r<N>`, at most.
const MAX_REGISTERS: u64 = 1 << 20;
/// Operands nest no deeper than a list of vectors of registers.
const MAX_NESTING: usize = 4;

/// Meaning of a name inside `{ }`.
#[derive(Clone, Copy)]
enum Name {
    Register(u32),
    /// First of several registers that differ in the number behind the name, and how many.
    Variable(usize),
    Label(usize),
}

/// Names of one pair of braces.
#[derive(Default)]
struct Scope {
    names: HashMap<String, Name>,
    /// `%r<100>`: prefix, first register, how many.
    ranges: Vec<(String, u32, u32)>,
    parent: Option<usize>,
}

/// The body as read; names are looked up at the end, since labels may come later than their use.
struct Body {
    scopes: Vec<Scope>,
    /// Scope of each statement.
    scope_of: Vec<usize>,
    guards: Vec<Option<(String, bool)>>,
}

impl Parser<'_> {
    /// From behind `{` to behind the `}` that matches.
    pub(super) fn body(&mut self, function: &mut Function) -> Result<()> {
        let mut body = Body {
            scopes: vec![Scope::default()],
            scope_of: vec![],
            guards: vec![],
        };
        for (k, variable) in function.variables.iter().enumerate() {
            body.scopes[0]
                .names
                .insert(variable.name.clone(), Name::Variable(k));
        }
        let mut loc = None;
        let mut current = 0;
        loop {
            if self.take('{') {
                body.scopes.push(Scope {
                    parent: Some(current),
                    ..Scope::default()
                });
                current = body.scopes.len() - 1;
            } else if self.take('}') {
                match body.scopes[current].parent {
                    Some(parent) => current = parent,
                    None => break,
                }
            } else if !self.take(';') {
                self.body_item(function, &mut body, current, &mut loc)?;
            }
        }
        body.resolve(function)
    }

    fn body_item(
        &mut self,
        f: &mut Function,
        body: &mut Body,
        scope: usize,
        loc: &mut Option<(u32, u32)>,
    ) -> Result<()> {
        let line = self.line();
        if self.peek_is('@') {
            return self.statement(f, body, scope, *loc);
        }
        let word = self.word("an instruction")?;
        let names = &mut body.scopes[scope];
        match word {
            ".reg" => self.registers(f, names),
            ".shared" => self.locals(Space::Shared, f, names),
            ".local" => self.locals(Space::Local, f, names),
            ".param" => self.locals(Space::Param, f, names),
            ".const" => self.locals(Space::Const, f, names),
            ".global" => self.locals(Space::Global, f, names),
            ".loc" => {
                *loc = Some(self.source_line()?);
                self.skip_line(line);
                Ok(())
            }
            ".pragma" => self.skip_to(';'),
            _ if word.starts_with('.') => {
                let what = format!("unsupported directive `{word}`");
                Err(Fault::at(FaultKind::Unsupported, line, what))
            }
            _ if self.take(':') => {
                let label = Name::Label(f.labels.len());
                names.names.insert(word.to_owned(), label);
                f.labels.push((word.to_owned(), f.body.len()));
                Ok(())
            }
            _ => {
                self.at -= 1;
                self.statement(f, body, scope, *loc)
            }
        }
    }

    /// File and line behind `.loc`.
    fn source_line(&mut self) -> Result<(u32, u32)> {
        let file = self.integer("a file number")? as u32;
        Ok((file, self.integer("a line")? as u32))
    }

    /// `.reg .b32 %r<100>, %x;` behind `.reg`.
    fn registers(&mut self, f: &mut Function, scope: &mut Scope) -> Result<()> {
        let (ty, vector, _) = self.type_and_alignment()?;
        if vector != 1 {
            return Err(self.unsupported("vector registers"));
        }
        loop {
            let name = self.word("a register name")?.to_owned();
            let first = f.registers.len() as u32;
            let mut count = 1;
            if self.take('<') {
                count = self.integer("a number of registers")?;
                self.expect('>')?;
                if count > MAX_REGISTERS {
                    return Err(self.unsupported(&format!("{count} registers")));
                }
                scope.ranges.push((name, first, count as u32));
            } else {
                scope.names.insert(name, Name::Register(first));
            }
            f.registers.extend(std::iter::repeat_n(ty, count as usize));
            if f.registers.len() as u64 > MAX_REGISTERS {
                return Err(self.unsupported("more than a million registers"));
            }
            if !self.take(',') {
                return self.expect(';');
            }
        }
    }

    fn locals(&mut self, space: Space, f: &mut Function, scope: &mut Scope) -> Result<()> {
        let first = f.variables.len();
        self.variables(space, &mut f.variables)?;
        for (k, variable) in f.variables.iter().enumerate().skip(first) {
            scope.names.insert(variable.name.clone(), Name::Variable(k));
        }
        Ok(())
    }

    fn statement(
        &mut self,
        f: &mut Function,
        body: &mut Body,
        scope: usize,
        loc: Option<(u32, u32)>,
    ) -> Result<()> {
        let line = self.line();
        let mut guard = None;
        if self.take('@') {
            let negated = self.take('!');
            guard = Some((self.word("a predicate")?.to_owned(), negated));
        }
        let opcode = self.word("an opcode")?.to_owned();
        let mut operands = Vec::new();
        while !self.take(';') {
            if !operands.is_empty() {
                self.expect(',')?;
            }
            operands.push(self.operand(0)?);
        }
        f.body.push(Statement {
            line,
            loc,
            guard: None,
            opcode,
            operands,
        });
        body.scope_of.push(scope);
        body.guards.push(guard);
        Ok(())
    }

    /// One operand; names stay [`Operand::Global`] until the scopes are complete.
    fn operand(&mut self, depth: usize) -> Result<Operand> {
        if depth > MAX_NESTING {
            return Err(self.unexpected("operands that nest less deeply"));
        }
        let first = match self.peek() {
            Some(Token::Mark('{')) => Operand::Vector(self.operands('}', depth)?),
            Some(Token::Mark('(')) => Operand::List(self.operands(')', depth)?),
            Some(Token::Mark('[')) => self.memory(depth)?,
            Some(Token::Mark('!')) => {
                self.at += 1;
                return Ok(Operand::Negated(self.word("a predicate")?.to_owned()));
            }
            _ => match self.value()? {
                Operand::Global(name, _) => Operand::Global(name, self.offset()?),
                value => value,
            },
        };
        if self.take('|') {
            let second = self.operand(depth + 1)?;
            return Ok(Operand::Pair(Box::new(first), Box::new(second)));
        }
        Ok(first)
    }

    /// From the opening bracket to behind `close`.
    fn operands(&mut self, close: char, depth: usize) -> Result<Vec<Operand>> {
        self.at += 1;
        let mut found = Vec::new();
        while !self.take(close) {
            if !found.is_empty() {
                self.expect(',')?;
            }
            found.push(self.operand(depth + 1)?);
        }
        Ok(found)
    }

    /// `[base]`, `[base+4]`, `[map, {x, y}]`.
    fn memory(&mut self, depth: usize) -> Result<Operand> {
        self.expect('[')?;
        let base = Box::new(self.value()?);
        let offset = self.offset()?;
        if self.take(',') {
            let Operand::Vector(coordinates) = self.operand(depth + 1)? else {
                return Err(self.unexpected("coordinates between braces"));
            };
            self.expect(']')?;
            return Ok(Operand::Tensor(base, coordinates));
        }
        self.expect(']')?;
        Ok(Operand::Memory(base, offset))
    }

    /// `+4`, `+-4`, `-4` or nothing.
    fn offset(&mut self) -> Result<i64> {
        if self.take('+') {
            return Ok(self.integer("an offset")? as i64);
        }
        if self.peek_is('-') {
            Ok(self.integer("an offset")? as i64)
        } else {
            Ok(0)
        }
    }

    /// A literal or a name, with an optional offset behind the name of a variable.
    fn value(&mut self) -> Result<Operand> {
        if self.peek_is('-') {
            return Ok(Operand::Integer(self.integer("a number")?));
        }
        let word = self.word("an operand")?;
        if word == "_" {
            return Ok(Operand::Sink);
        }
        if word.starts_with(|c: char| c.is_ascii_digit()) {
            let bits = number(word, Type::F64).ok_or_else(|| {
                self.at -= 1;
                self.unexpected("a number")
            })?;
            let is_hexadecimal = word.starts_with("0x") || word.starts_with("0X");
            return Ok(match word.as_bytes().get(1) {
                Some(b'f' | b'F') => Operand::Float32(bits as u32),
                Some(b'd' | b'D') => Operand::Float64(bits),
                _ if !is_hexadecimal && (word.contains('.') || word.contains(['e', 'E'])) => {
                    Operand::Float64(bits)
                }
                _ => Operand::Integer(bits),
            });
        }
        Ok(Operand::Global(word.to_owned(), 0))
    }
}

impl Body {
    /// Replaces names by the operands that they stand for.
    fn resolve(self, f: &mut Function) -> Result<()> {
        let mut statements = std::mem::take(&mut f.body);
        for ((statement, scope), guard) in
            statements.iter_mut().zip(&self.scope_of).zip(&self.guards)
        {
            for operand in &mut statement.operands {
                self.resolve_operand(operand, *scope, statement.line)?;
            }
            if let Some((name, negated)) = guard {
                let register = self.predicate(name, *scope, statement.line)?;
                statement.guard = Some((register, *negated));
            }
        }
        f.body = statements;
        Ok(())
    }

    fn resolve_operand(&self, operand: &mut Operand, scope: usize, line: u32) -> Result<()> {
        match operand {
            Operand::Global(name, offset) => {
                if let Some(found) = self.resolve_name(name, *offset, scope) {
                    *operand = found;
                }
            }
            Operand::Negated(name) => {
                *operand = Operand::Not(self.predicate(name, scope, line)?);
            }
            Operand::Pair(first, second) => {
                self.resolve_operand(first, scope, line)?;
                self.resolve_operand(second, scope, line)?;
            }
            Operand::Memory(base, _) => self.resolve_operand(base, scope, line)?,
            Operand::Tensor(base, coordinates) => {
                self.resolve_operand(base, scope, line)?;
                for coordinate in coordinates {
                    self.resolve_operand(coordinate, scope, line)?;
                }
            }
            Operand::Vector(parts) | Operand::List(parts) => {
                for part in parts {
                    self.resolve_operand(part, scope, line)?;
                }
            }
            _ => {}
        }
        Ok(())
    }

    fn resolve_name(&self, name: &str, offset: i64, scope: usize) -> Option<Operand> {
        match self.find(name, scope) {
            Some(Name::Register(register)) => Some(Operand::Register(register)),
            Some(Name::Variable(variable)) => Some(Operand::Variable(variable, offset)),
            Some(Name::Label(label)) => Some(Operand::Label(label)),
            None => {
                let is_special = name.starts_with('%') || name == "WARP_SZ";
                is_special.then(|| Operand::Special(name.to_owned()))
            }
        }
    }

    fn predicate(&self, name: &str, scope: usize, line: u32) -> Result<u32> {
        match self.find(name, scope) {
            Some(Name::Register(register)) => Ok(register),
            _ => {
                let what = format!("unknown predicate `{name}`");
                Err(Fault::at(FaultKind::Syntax, line, what))
            }
        }
    }

    fn find(&self, name: &str, scope: usize) -> Option<Name> {
        let mut next = Some(scope);
        while let Some(at) = next {
            let scope = &self.scopes[at];
            if let Some(found) = scope.names.get(name) {
                return Some(*found);
            }
            let split = name.trim_end_matches(|c: char| c.is_ascii_digit()).len();
            if let Ok(number) = name[split..].parse::<u32>() {
                let range = scope
                    .ranges
                    .iter()
                    .find(|(prefix, _, count)| prefix == &name[..split] && number < *count);
                if let Some((_, first, _)) = range {
                    return Some(Name::Register(first + number));
                }
            }
            next = scope.parent;
        }
        None
    }
}
