//! The interface of a library in other languages: a header for C and C++, a module for Python.

use gristmill_runtime::DType;
use gristmill_runtime::command::given::{dims_text, type_text};
use gristmill_runtime::command::state::{Variable, variables};
use gristmill_runtime::image::{About, Fixed};
use gristmill_runtime::program::{IoSpec, Program};
use std::collections::BTreeSet;
use std::fmt::Display;
use std::sync::Arc;

/// A compiled model as its callers see it.
pub(super) struct Interface<'m> {
    /// The start of all names: an identifier.
    pub prefix: &'m str,
    pub about: &'m About,
    pub programs: &'m [Arc<Program>],
}

/// The name as an identifier of C: letters, digits and lines.
pub(super) fn identifier(name: &str) -> String {
    let plain = |c: char| match c.is_ascii_alphanumeric() {
        true => c,
        false => '_',
    };
    let text: String = name.chars().map(plain).collect();
    match text.chars().next() {
        None => "model".to_owned(),
        Some(first) if first.is_ascii_digit() => format!("_{text}"),
        Some(_) => text,
    }
}

/// The type of an element in C, and in NumPy. Floats that these do not have are their bits.
fn element(dtype: DType) -> (&'static str, &'static str) {
    match dtype {
        DType::F32 => ("float", "float32"),
        DType::F64 => ("double", "float64"),
        DType::F16 => ("uint16_t", "float16"),
        DType::I8 => ("int8_t", "int8"),
        DType::I16 => ("int16_t", "int16"),
        DType::I32 => ("int32_t", "int32"),
        DType::I64 => ("int64_t", "int64"),
        DType::U16 | DType::BF16 => ("uint16_t", "uint16"),
        DType::U32 => ("uint32_t", "uint32"),
        DType::U64 => ("uint64_t", "uint64"),
        DType::Bool => ("uint8_t", "bool_"),
        _ => ("uint8_t", "uint8"),
    }
}

/// Text for a comment or a string literal, on one line.
fn plain(text: &str) -> String {
    let kept = |c: char| match c {
        '*' | '"' | '\\' | '\'' => '_',
        c if c.is_control() => '_',
        c => c,
    };
    text.chars().map(kept).collect()
}

/// Names of C and C++ that are no names of arguments, and those that functions use themselves.
const TAKEN: &str = " alignas alignof and asm auto bitand bitor bool break case catch char class compl concept const \
    constexpr continue decltype default delete do double else enum explicit export extern false float for friend goto if inline inputs int long \
    model mutable namespace new noexcept not nullptr operator or outputs private protected public register requires restrict return short signed \
    sizeof static struct switch template this throw true try typedef typeid typename union unsigned using virtual void volatile wchar_t while \
    xor ";

/// Names of arguments for the inputs and outputs of a program, distinct also in capitals.
fn arguments(program: &Program) -> Vec<String> {
    let mut known = BTreeSet::new();
    let specs = program.inputs.iter().chain(&program.outputs);
    specs.map(|spec| argument(&spec.name, &mut known)).collect()
}

fn argument(name: &str, known: &mut BTreeSet<String>) -> String {
    let mut name = identifier(name);
    while TAKEN.contains(&format!(" {name} ")) || !known.insert(name.to_uppercase()) {
        name.push('_');
    }
    name
}

/// Between a prefix and a name: the sizes of a variant, or its number.
fn infix(index: usize, fixed: &Fixed) -> String {
    if fixed.dims.is_empty() {
        return format!("_{index}");
    }
    let dims = fixed.dims.iter();
    dims.map(|(d, n)| format!("_{}_{n}", identifier(d)))
        .collect()
}

/// A variant with the names of its arguments.
struct Variant<'m> {
    index: usize,
    fixed: &'m Fixed,
    program: &'m Program,
    /// Of its inputs, then its outputs.
    names: Vec<String>,
    /// Between the prefix and a name; empty where there is one variant.
    infix: String,
}

impl Variant<'_> {
    /// Inputs, then outputs, with the names of their arguments.
    fn values(&self) -> impl Iterator<Item = (&IoSpec, &String)> {
        let specs = self.program.inputs.iter().chain(&self.program.outputs);
        specs.zip(&self.names)
    }

    /// A comment of sizes and types.
    fn comment(&self) -> String {
        let dims = plain(&dims_text(self.fixed.dims.iter()));
        let line = |(spec, name): (&IoSpec, &String)| {
            format!(
                " * {name}: \"{}\", {}\n",
                plain(&spec.name),
                type_text(spec)
            )
        };
        let lines: String = self.values().map(line).collect();
        format!("/* Variant {}: {dims}.\n{lines} */\n", self.index)
    }

    /// Definitions of the numbers of elements.
    fn lengths(&self, prefix: &str) -> String {
        let start = format!("{prefix}{}", self.infix).to_uppercase();
        let line = |(spec, name): (&IoSpec, &String)| {
            let n = spec.shape.iter().product::<usize>();
            format!("#define {start}_{}_LEN {n}\n", name.to_uppercase())
        };
        self.values().map(line).collect()
    }

    /// Parameters of the function that runs it, behind that of the model.
    fn parameters(&self) -> String {
        let n_inputs = self.program.inputs.len();
        let parameter = |(i, (spec, name)): (usize, (&IoSpec, &String))| {
            let constant = if i < n_inputs { "const " } else { "" };
            format!(", {constant}{} *{name}", element(spec.dtype).0)
        };
        self.values().enumerate().map(parameter).collect()
    }

    /// The function that runs it.
    fn function(&self, p: &str) -> String {
        let (infix, index, parameters) = (&self.infix, self.index, self.parameters());
        let (inputs, outputs) = self.names.split_at(self.program.inputs.len());
        let inputs = list("const void *", "inputs", inputs);
        let outputs = list("void *", "outputs", outputs);
        format!(
            "static inline {p}_status {p}_run{infix}({p}_model *model{parameters})\n{{\n{inputs}{outputs}    \
             return {p}_run_variant(model, {index}, inputs, outputs);\n}}\n"
        )
    }

    /// A row of the module's table.
    fn row(&self) -> String {
        let (inputs, outputs) = (tuples(&self.program.inputs), tuples(&self.program.outputs));
        format!("    ([{inputs}], [{outputs}]),\n")
    }
}

/// Name, dtype and shape of values as Python has them.
fn tuples(specs: &[IoSpec]) -> String {
    let tuple = |spec: &IoSpec| {
        let (name, dtype) = (literal(&spec.name), element(spec.dtype).1);
        let shape = python_tuple(spec.shape.iter());
        format!("({name}, {dtype:?}, {shape})")
    };
    specs.iter().map(tuple).collect::<Vec<_>>().join(", ")
}

/// A string of Python: its escapes are those of JSON, and more.
fn literal(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

fn python_tuple(items: impl Iterator<Item = impl Display>) -> String {
    let items: String = items.map(|item| format!("{item}, ")).collect();
    format!("({})", items.trim_end_matches(' '))
}

/// Names that a module for Python cannot have: keywords, built-in modules, and those that the module or NumPy imports.
const PYTHON_NAMES: &str = " False None True and as assert async await break class continue def del elif else except \
    finally for from global if import in is lambda nonlocal not or pass raise return try while with yield \
    abc argparse array ast asyncio atexit base64 binascii builtins cmath code codecs collections contextlib copy \
    ctypes datetime decimal enum errno faulthandler fcntl fnmatch fractions functools gc glob grp hashlib heapq html \
    importlib inspect io itertools json keyword locale logging marshal math mmap numbers numpy operator os pathlib \
    pickle platform posix pprint pwd pyexpat queue random re reprlib resource secrets select shutil signal site socket \
    stat statistics string struct subprocess sys syslog tempfile termios textwrap threading time token tokenize \
    traceback types typing unicodedata unittest urllib uuid warnings weakref zipfile zipimport zlib ";

/// True for a name that Python has for itself.
pub(super) fn is_of_python(name: &str) -> bool {
    PYTHON_NAMES.contains(&format!(" {name} "))
}

impl Interface<'_> {
    fn variants(&self) -> impl Iterator<Item = Variant<'_>> {
        let fixed = self.about.variants.iter();
        let programs = self.programs.iter().zip(fixed).enumerate();
        programs.map(|(index, (program, fixed))| Variant {
            index,
            fixed,
            program,
            names: arguments(program),
            infix: match self.programs.len() {
                1 => String::new(),
                _ => infix(index, fixed),
            },
        })
    }

    /// The header of C and C++.
    pub(super) fn header(&self) -> String {
        let p = self.prefix;
        let mut text = HEADER
            .replace("@UPPER@", &p.to_uppercase())
            .replace("@P@", p)
            .replace("@NAME@", &plain(&self.about.name))
            .replace("@VERSION@", &plain(&self.about.version))
            .replace("@VARIABLES@", &self.variables(" * "));
        for v in self.variants() {
            text += &format!("\n{}{}{}", v.comment(), v.lengths(p), v.function(p));
        }
        text + &FOOTER.replace("@UPPER@", &p.to_uppercase())
    }

    /// A line for each variable.
    fn variables(&self, indent: &str) -> String {
        let found = self.programs.first().map(|p| variables(p));
        let found = found.unwrap_or_default();
        let lines: BTreeSet<String> = found
            .iter()
            .map(|v| format!("{indent}\"{}\": {}\n", plain(&v.label), v.type_text))
            .collect();
        match lines.is_empty() {
            true => format!("{indent}none\n"),
            false => lines.into_iter().collect(),
        }
    }

    /// A row of the module's table for each variable.
    fn types(&self) -> String {
        let found = self.programs.iter().flat_map(|p| variables(p));
        let row = |v: Variable| {
            let extent = |n: &Option<usize>| n.map_or("None".to_owned(), |n| n.to_string());
            let shape = python_tuple(v.dims.iter().map(extent));
            let (label, dtype) = (literal(&v.label), element(v.dtype).1);
            format!("    {label}: ({dtype:?}, {shape}),\n")
        };
        found
            .map(row)
            .collect::<BTreeSet<_>>()
            .into_iter()
            .collect()
    }

    /// The module for Python.
    pub(super) fn python(&self, library: &str) -> String {
        let rows: String = self.variants().map(|v| v.row()).collect();
        PYTHON
            .replace("@ROWS@", &rows)
            .replace("@TYPES@", &self.types())
            .replace("@P@", self.prefix)
            .replace("@LIBRARY@", &plain(library))
            .replace("@NAME@", &plain(&self.about.name))
            .replace("@VERSION@", &plain(&self.about.version))
            .replace("@VARIABLES@", &self.variables("    "))
    }
}

/// An array of addresses, which C has none of without elements.
fn list(ty: &str, name: &str, values: &[String]) -> String {
    match values.is_empty() {
        true => format!("    {ty}*{name} = 0;\n"),
        false => format!("    {ty}{name}[] = {{{}}};\n", values.join(", ")),
    }
}

const HEADER: &str = include_str!("interface/header.h");
const FOOTER: &str = "\n#ifdef __cplusplus\n}\n#endif\n#endif /* @UPPER@_H */\n";
const PYTHON: &str = include_str!("interface/module.py");
