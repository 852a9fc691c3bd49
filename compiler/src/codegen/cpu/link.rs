//! Functions under construction as position-independent text: machine code whose calls go through a table of imports.

use crate::codegen::workers::Workers;
use crate::error::{Error, Result};
use cranelift_codegen::binemit::Reloc;
use cranelift_codegen::ir::{
    ExtFuncData, ExternalName, FuncRef, Function, Signature, Type, UserExternalName, types,
};
use cranelift_codegen::isa::{OwnedTargetIsa, TargetIsa};
use cranelift_codegen::{Context, FinalizedMachReloc, FinalizedRelocTarget};
use gristmill_kernels::Isa;
use gristmill_runtime::text::{Call, Code, FUNCTION_ALIGN, Form, Function as Linked, Text};
use std::collections::HashMap;
use std::sync::Arc;

/// Machine code of a program, and the names of the functions that it calls.
pub(super) struct Linker {
    pub(super) isa: OwnedTargetIsa,
    /// True for an x86 CPU without AVX, whose arithmetic takes vectors from memory at multiples of 16 bytes alone.
    needs_aligned_operands: bool,
    /// The instruction set of the kernels that it calls.
    kernels: Isa,
    /// The text as functions know it, which is linked at the end.
    made: Arc<Text>,
    /// Functions to be compiled, by number.
    added: Vec<Added>,
    /// Names of the entries of the table.
    imports: Vec<&'static str>,
    of_import: HashMap<&'static str, u32>,
}

pub(super) fn internal(problem: impl std::fmt::Display) -> Error {
    Error::internal(format!("cranelift: {problem}"))
}

impl Linker {
    pub(super) fn new(isa: OwnedTargetIsa, kernels: Isa) -> Linker {
        let avx = isa.isa_flags().into_iter().find(|f| f.name == "has_avx");
        Linker {
            needs_aligned_operands: avx.is_some_and(|flag| flag.as_bool() == Some(false)),
            isa,
            kernels,
            made: Arc::default(),
            added: Vec::new(),
            imports: Vec::new(),
            of_import: HashMap::new(),
        }
    }

    /// The type to load a vector as, which is then cast to `ty`.
    ///
    /// Cranelift 0.135 folds a load of floats into `cmpps` and `cmppd` at any address, which traps without AVX; it does
    /// not look through a cast.
    pub(super) fn load_type(&self, ty: Type) -> Type {
        match ty {
            types::F32X4 if self.needs_aligned_operands => types::I32X4,
            ty => ty,
        }
    }

    /// Declares a function that is linked by name in a function under construction.
    pub(super) fn import(
        &mut self,
        name: &'static str,
        signature: Signature,
        func: &mut Function,
    ) -> FuncRef {
        let index = *self.of_import.entry(name).or_insert_with(|| {
            self.imports.push(name);
            self.imports.len() as u32 - 1
        });
        // Functions of the text have namespace 0.
        let user = UserExternalName::new(1, index);
        let name = func.declare_imported_user_function(user);
        let signature = func.import_signature(signature);
        func.import_function(ExtFuncData {
            name: ExternalName::user(name),
            signature,
            colocated: false,
            patchable: false,
        })
    }

    /// Names of the functions that a function calls.
    pub(super) fn callees(&self, func: &Function) -> Vec<&'static str> {
        let called = func.params.user_named_funcs().values();
        called
            .map(|name| self.imports[name.index as usize])
            .collect()
    }

    /// Adds a function, to be compiled with all others.
    pub(super) fn add(&mut self, name: String, function: Function) -> Linked {
        self.added.push(Added { name, function });
        // SAFETY: every function of the text is emitted with the signature of kernels, for the buffers that its plan names, whose sizes
        // follow from the graph's types; imports are linked by name, and declared with the types that the emitter calls them with.
        unsafe { self.made.numbered(self.added.len() - 1) }
    }

    /// Compiles all functions, and puts the text into memory, linked to the functions of this process. Gives the size of the code in bytes
    /// and the disassembly of each function, if that is asked for.
    pub(super) fn finish(self, workers: Workers, lists: bool) -> Result<(usize, Vec<String>)> {
        let isa = &*self.isa;
        // Functions of a small program are compiled sooner than a thread starts.
        let n_instructions: usize = self.added.iter().map(Added::n_instructions).sum();
        let workers = match n_instructions < SMALL_INSTRUCTIONS {
            true => Workers::default(),
            false => workers,
        };
        let compiled = workers.map(self.added, |added| added.compiled(isa, lists));
        let mut code = Code {
            imports: self.imports.iter().map(|&name| name.to_owned()).collect(),
            ..Code::default()
        };
        let (mut starts, mut n_bytes, mut listings) = (Vec::new(), 0, Vec::new());
        for function in compiled {
            let function = function?;
            let start = code.bytes.len().next_multiple_of(FUNCTION_ALIGN);
            code.bytes.resize(start, 0);
            code.bytes.extend_from_slice(&function.bytes);
            let moved = |call: Call| Call {
                at: start + call.at,
                ..call
            };
            code.calls.extend(function.calls.into_iter().map(moved));
            starts.push(start);
            n_bytes += function.bytes.len();
            listings.extend(function.listing);
        }
        self.made.link(code, starts, self.kernels)?;
        Ok((n_bytes, listings))
    }
}

/// Instructions of Cranelift's IR below which one thread compiles all functions.
const SMALL_INSTRUCTIONS: usize = 2000;

/// A function to be compiled.
struct Added {
    name: String,
    function: Function,
}

/// The code of a function.
struct Compiled {
    bytes: Vec<u8>,
    /// Calls, with offsets from the function's start.
    calls: Vec<Call>,
    /// Disassembly.
    listing: Option<String>,
}

impl Added {
    fn n_instructions(&self) -> usize {
        self.function.dfg.num_insts()
    }

    fn compiled(self, isa: &dyn TargetIsa, lists: bool) -> Result<Compiled> {
        let name = self.name;
        let mut context = Context::for_function(self.function);
        context.set_disasm(lists);
        let made = context.compile(isa, &mut Default::default());
        let made = made.map_err(|e| internal(format!("{:?}", e.inner)).context(&name))?;
        let listing = made.vcode.as_deref().unwrap_or("");
        let listing = lists.then(|| format!("; {name}\n{listing}\n"));
        let bytes = made.buffer.data().to_vec();
        let relocs = made.buffer.relocs().to_vec();
        let call = |reloc: &FinalizedMachReloc| {
            Ok(Call {
                at: reloc.offset as usize,
                form: form_of(reloc)?,
                import: import_of(&context.func, reloc)?,
            })
        };
        let calls = relocs.iter().map(call).collect::<Result<_>>();
        Ok(Compiled {
            bytes,
            calls: calls.map_err(|e| e.context(&name))?,
            listing,
        })
    }
}

/// The import that a relocation is to. No other target is there: code is made without calls of Cranelift's own library.
fn import_of(func: &Function, reloc: &FinalizedMachReloc) -> Result<u32> {
    match &reloc.target {
        FinalizedRelocTarget::ExternalName(ExternalName::User(name)) => {
            Ok(func.params.user_named_funcs()[*name].index)
        }
        other => Err(internal(format!("a relocation to {other:?}"))),
    }
}

/// The way in which an instruction holds a distance to the table.
fn form_of(reloc: &FinalizedMachReloc) -> Result<Form> {
    let unknown = || internal(format!("a relocation of kind {:?}", reloc.kind));
    match (reloc.kind, reloc.addend) {
        (Reloc::X86GOTPCRel4, addend) => {
            let addend = i32::try_from(addend).map_err(|_| unknown())?;
            Ok(Form::X86 { addend })
        }
        (Reloc::Aarch64AdrGotPage21, 0) => Ok(Form::Aarch64Page),
        (Reloc::Aarch64Ld64GotLo12Nc, 0) => Ok(Form::Aarch64Low),
        _ => Err(unknown()),
    }
}
