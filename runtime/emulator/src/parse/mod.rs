//! PTX text to [`Source`]: module level.
//!
//! Covers the output of NVRTC, with the blocks that inline assembly adds. Errors name the PTX line.

pub(crate) mod ast;
mod body;
mod lexer;

use ast::{Function, LaunchBounds, Source, Space, Variable};
use lexer::Token;

use crate::{
    fault::{Fault, FaultKind, Result},
    types::Type,
};

/// Bytes that one variable may have: more is a broken file, not a kernel.
const MAX_VARIABLE_BYTES: usize = 1 << 32;

/// Braces of an initialiser nest no deeper.
const MAX_NESTING: usize = 8;

/// Parses a module.
pub(crate) fn parse(text: &str) -> Result<Source> {
    let mut parser = Parser {
        tokens: lexer::tokens(text)?,
        at: 0,
    };
    let mut source = Source::default();
    while parser.at < parser.tokens.len() {
        parser.module_item(&mut source)?;
    }
    Ok(source)
}

/// A cursor over the tokens.
struct Parser<'a> {
    tokens: Vec<(Token<'a>, u32)>,
    at: usize,
}

impl<'a> Parser<'a> {
    fn module_item(&mut self, source: &mut Source) -> Result<()> {
        let line = self.line();
        match self.word("a directive")? {
            ".version" | ".target" | ".address_size" => self.skip_line(line),
            ".visible" | ".weak" | ".common" | ".extern" => {}
            ".file" => self.file(source, line)?,
            ".section" => self.skip_section()?,
            ".entry" => self.function(source, line, true)?,
            ".func" => self.function(source, line, false)?,
            ".global" => self.variables(Space::Global, &mut source.variables)?,
            ".const" => self.variables(Space::Const, &mut source.variables)?,
            ".shared" => self.variables(Space::Shared, &mut source.variables)?,
            ".pragma" => self.skip_to(';')?,
            other => {
                return Err(Fault::at(
                    FaultKind::Unsupported,
                    line,
                    format!("unsupported module directive `{other}`"),
                ));
            }
        }
        Ok(())
    }

    /// `.file 1 "kernel.cu"`, with an optional time and size.
    fn file(&mut self, source: &mut Source, line: u32) -> Result<()> {
        let number = self.integer("a file number")? as u32;
        let Some(Token::Text(name)) = self.peek() else {
            return Err(self.unexpected("a file name"));
        };
        source.files.insert(number, name.to_owned());
        self.skip_line(line);
        Ok(())
    }

    fn skip_section(&mut self) -> Result<()> {
        self.skip_to('{')?;
        self.skip_to('}')
    }

    /// From behind `.entry` or `.func` to the end of the body, or of a declaration without one.
    fn function(&mut self, source: &mut Source, line: u32, is_entry: bool) -> Result<()> {
        let mut function = Function {
            line,
            is_entry,
            ..Function::default()
        };
        if !is_entry && self.peek_is('(') {
            function.returns = self.parameters(&mut function.variables)?;
        }
        function.name = self.word("a function name")?.to_owned();
        if self.peek_is('(') {
            function.params = self.parameters(&mut function.variables)?;
        }
        function.bounds = self.launch_bounds()?;
        if self.take(';') {
            return Ok(());
        }
        self.expect('{')?;
        self.body(&mut function)?;
        source.functions.insert(function.name.clone(), function);
        Ok(())
    }

    fn launch_bounds(&mut self) -> Result<LaunchBounds> {
        let mut bounds = LaunchBounds::default();
        while let Some(Token::Word(word)) = self.peek() {
            self.at += 1;
            match word {
                ".maxntid" => bounds.max_threads = Some(self.triple()?),
                ".reqntid" => bounds.required_threads = Some(self.triple()?),
                ".reqnctapercluster" => bounds.cluster = Some(self.triple()?),
                ".minnctapersm" | ".maxnreg" | ".maxclusterrank" => drop(self.integer("a number")?),
                ".noreturn" | ".explicitcluster" | ".blocksareclusters" => {}
                ".pragma" => self.skip_to(';')?,
                _ => {
                    self.at -= 1;
                    return Err(self.unexpected("`{` or a performance directive"));
                }
            }
        }
        Ok(bounds)
    }

    /// One to three numbers; those left out are 1.
    fn triple(&mut self) -> Result<[u32; 3]> {
        let mut sizes = [1; 3];
        for (k, size) in sizes.iter_mut().enumerate() {
            if k > 0 && !self.take(',') {
                break;
            }
            *size = self.integer("a number of threads or blocks")? as u32;
        }
        Ok(sizes)
    }

    /// `( .param .u64 a, .param .align 64 .b8 b[128] )`; appends to `into` and returns the indices.
    fn parameters(&mut self, into: &mut Vec<Variable>) -> Result<Vec<usize>> {
        let first = into.len();
        self.expect('(')?;
        while !self.take(')') {
            if into.len() > first {
                self.expect(',')?;
            }
            match self.word("`.param`")? {
                ".param" => {}
                ".reg" => return Err(self.unsupported("parameters in registers")),
                _ => return Err(self.unexpected("`.param`")),
            }
            let declaration = self.type_and_alignment()?;
            let variable = self.declarator(Space::Param, declaration)?;
            into.push(variable);
        }
        Ok((first..into.len()).collect())
    }

    /// `.align 4 .b8 name[16] = {..}, other;` behind the state space.
    fn variables(&mut self, space: Space, into: &mut Vec<Variable>) -> Result<()> {
        let declaration = self.type_and_alignment()?;
        loop {
            let variable = self.declarator(space, declaration)?;
            into.push(variable);
            if !self.take(',') {
                return self.expect(';');
            }
        }
    }

    /// Element type, elements of a vector, and alignment in bytes.
    fn type_and_alignment(&mut self) -> Result<(Type, usize, usize)> {
        let (mut found, mut vector, mut align) = (None, 1, 0);
        while let Some(Token::Word(word)) = self.peek() {
            let Some(name) = word.strip_prefix('.') else {
                break;
            };
            self.at += 1;
            match name {
                "align" => align = self.alignment()?,
                "ptr" | "global" | "const" | "shared" | "local" | "managed" => {}
                "v2" => vector = 2,
                "v4" => vector = 4,
                "attribute" => self.skip_to(')')?,
                _ => {
                    found = Some(
                        Type::parse(name)
                            .ok_or_else(|| self.unsupported(&format!("type `{word}`")))?,
                    )
                }
            }
        }
        let found = found.ok_or_else(|| self.unexpected("a type"))?;
        Ok((found, vector, align))
    }

    fn alignment(&mut self) -> Result<usize> {
        let align = self.integer("an alignment")? as usize;
        if align.is_power_of_two() && align <= 1 << 20 {
            Ok(align)
        } else {
            Err(self.unexpected("a power of two"))
        }
    }

    /// A name, an optional length and an optional initialiser. An alignment inside `.ptr` is that of the pointee: it only
    /// makes the layout stricter than it would be, which `parameters` undoes by the size of the type.
    fn declarator(
        &mut self,
        space: Space,
        (ty, vector, align): (Type, usize, usize),
    ) -> Result<Variable> {
        let name = self.word("a variable name")?.to_owned();
        let element = ty.size_bytes() * vector;
        let mut count = 1u64;
        let mut is_array = false;
        while self.take('[') {
            is_array = true;
            let length = if self.peek_is(']') {
                0
            } else {
                self.integer("an array length")?
            };
            count = count.saturating_mul(length);
            self.expect(']')?;
        }
        let size_bytes = (element as u64).saturating_mul(count);
        if size_bytes > MAX_VARIABLE_BYTES as u64 {
            return Err(self.unsupported(&format!("a variable of {size_bytes} bytes")));
        }
        let align = if space == Space::Param && !is_array {
            element
        } else {
            align.max(element)
        };
        let mut variable = Variable {
            name,
            space,
            align: align.max(1),
            size_bytes: size_bytes as usize,
            init: vec![],
            pointers: vec![],
        };
        if self.take('=') {
            self.initialiser(&mut variable, ty, 0)?;
        }
        Ok(variable)
    }

    /// A value, or values between (nested) braces.
    fn initialiser(&mut self, variable: &mut Variable, ty: Type, depth: usize) -> Result<()> {
        if depth < MAX_NESTING && self.take('{') {
            while !self.take('}') {
                self.initialiser(variable, ty, depth + 1)?;
                self.take(',');
            }
            return Ok(());
        }
        if variable.init.len() + ty.size_bytes() > variable.size_bytes {
            return Err(self.unexpected("no more values than the variable holds"));
        }
        let negative = self.take('-');
        let word = self.word("a value")?;
        let bits = match number(word, ty) {
            Some(bits) if negative => bits.wrapping_neg(),
            Some(bits) => bits,
            None => {
                self.pointer(variable, word)?;
                0
            }
        };
        variable
            .init
            .extend_from_slice(&bits.to_le_bytes()[..ty.size_bytes().min(8)]);
        Ok(())
    }

    /// `name`, `name+4` or `generic(name)+4`, stored as a pointer once addresses are known.
    fn pointer(&mut self, variable: &mut Variable, word: &str) -> Result<()> {
        let name = if word == "generic" {
            self.expect('(')?;
            let name = self.word("a variable name")?.to_owned();
            self.expect(')')?;
            name
        } else {
            word.to_owned()
        };
        let addend = if self.take('+') {
            self.integer("an offset")? as i64
        } else {
            0
        };
        variable.pointers.push((variable.init.len(), name, addend));
        Ok(())
    }

    fn peek(&self) -> Option<Token<'a>> {
        self.tokens.get(self.at).map(|(token, _)| *token)
    }

    fn peek_is(&self, mark: char) -> bool {
        self.peek() == Some(Token::Mark(mark))
    }

    /// Line of the next token, or of the last one.
    fn line(&self) -> u32 {
        self.tokens
            .get(self.at)
            .or(self.tokens.last())
            .map_or(1, |(_, line)| *line)
    }

    fn take(&mut self, mark: char) -> bool {
        let found = self.peek_is(mark);
        self.at += usize::from(found);
        found
    }

    fn expect(&mut self, mark: char) -> Result<()> {
        if self.take(mark) {
            Ok(())
        } else {
            Err(self.unexpected(&format!("`{mark}`")))
        }
    }

    fn word(&mut self, what: &str) -> Result<&'a str> {
        let Some(Token::Word(word)) = self.peek() else {
            return Err(self.unexpected(what));
        };
        self.at += 1;
        Ok(word)
    }

    /// A non-negative or negative integer literal.
    fn integer(&mut self, what: &str) -> Result<u64> {
        let negative = self.take('-');
        let value = match self.peek() {
            Some(Token::Word(word)) => {
                number(word, Type::U64).ok_or_else(|| self.unexpected(what))?
            }
            _ => return Err(self.unexpected(what)),
        };
        self.at += 1;
        Ok(if negative {
            value.wrapping_neg()
        } else {
            value
        })
    }

    fn skip_line(&mut self, line: u32) {
        while self.tokens.get(self.at).is_some_and(|(_, l)| *l == line) {
            self.at += 1;
        }
    }

    /// Moves behind the next `mark`.
    fn skip_to(&mut self, mark: char) -> Result<()> {
        while !self.take(mark) {
            if self.peek().is_none() {
                return Err(self.unexpected(&format!("`{mark}`")));
            }
            self.at += 1;
        }
        Ok(())
    }

    fn unexpected(&self, expected: &str) -> Fault {
        let found = match self.peek() {
            Some(Token::Word(word)) => format!("`{word}`"),
            Some(Token::Text(text)) => format!("\"{text}\""),
            Some(Token::Mark(mark)) => format!("`{mark}`"),
            None => "the end of the text".to_owned(),
        };
        Fault::at(
            FaultKind::Syntax,
            self.line(),
            format!("expected {expected}, found {found}"),
        )
    }

    fn unsupported(&self, what: &str) -> Fault {
        Fault::at(
            FaultKind::Unsupported,
            self.line(),
            format!("unsupported: {what}"),
        )
    }
}

/// The bits of a literal as a value of type `ty`; `None` if `word` is no number.
pub(crate) fn number(word: &str, ty: Type) -> Option<u64> {
    let digit = word.chars().next().filter(char::is_ascii_digit)?;
    if let Some(bits) = word.strip_prefix("0f").or(word.strip_prefix("0F")) {
        return u32::from_str_radix(bits, 16).ok().map(u64::from);
    }
    if let Some(bits) = word.strip_prefix("0d").or(word.strip_prefix("0D")) {
        return u64::from_str_radix(bits, 16).ok();
    }
    let digits = word.trim_end_matches('U');
    if let Some(hex) = digits.strip_prefix("0x").or(digits.strip_prefix("0X")) {
        return u64::from_str_radix(hex, 16).ok();
    }
    if let Some(binary) = digits.strip_prefix("0b").or(digits.strip_prefix("0B")) {
        return u64::from_str_radix(binary, 2).ok();
    }
    if digits.len() > 1 && digit == '0' && digits.chars().all(|c| c.is_digit(8)) {
        return u64::from_str_radix(digits, 8).ok();
    }
    digits.parse().ok().or_else(|| decimal(digits, ty))
}

/// The bits of a decimal fraction, in single precision for that type and else in double.
fn decimal(digits: &str, ty: Type) -> Option<u64> {
    let value: f64 = digits.parse().ok()?;
    Some(if ty == Type::F32 {
        u64::from((value as f32).to_bits())
    } else {
        value.to_bits()
    })
}
