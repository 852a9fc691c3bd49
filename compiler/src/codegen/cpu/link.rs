//! Functions under construction as position-independent text: machine code whose calls go through a table of imports.

use crate::error::{Error, Result};
use cranelift_codegen::binemit::Reloc;
use cranelift_codegen::ir::{
    ExtFuncData, ExternalName, FuncRef, Function, Signature, UserExternalName,
};
use cranelift_codegen::isa::OwnedTargetIsa;
use cranelift_codegen::{Context, FinalizedMachReloc, FinalizedRelocTarget};
use gristmill_kernels::Isa;
use gristmill_runtime::text::{Function as Linked, Text, table_offset};
use std::collections::HashMap;
use std::sync::Arc;

/// Alignment of functions in bytes: a line of the cache, and the largest that their constants need.
const ALIGN: usize = 64;

/// Machine code of a program, and the names of the functions that it calls.
pub(super) struct Linker {
    pub(super) isa: OwnedTargetIsa,
    /// The instruction set of the kernels that it calls.
    kernels: Isa,
    /// The text as functions know it, which is linked at the end.
    made: Arc<Text>,
    text: Vec<u8>,
    /// Names of the entries of the table.
    imports: Vec<&'static str>,
    of_import: HashMap<&'static str, u32>,
    fixups: Vec<Fixup>,
}

/// A place in the text that holds its distance from an entry of the table.
struct Fixup {
    at: usize,
    kind: Reloc,
    addend: i64,
    import: u32,
}

pub(super) fn internal(problem: impl std::fmt::Display) -> Error {
    Error::internal(format!("cranelift: {problem}"))
}

impl Linker {
    pub(super) fn new(isa: OwnedTargetIsa, kernels: Isa) -> Linker {
        Linker {
            isa,
            kernels,
            made: Arc::default(),
            text: Vec::new(),
            imports: Vec::new(),
            of_import: HashMap::new(),
            fixups: Vec::new(),
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

    /// Compiles the function in a context; gives it, and its size.
    pub(super) fn define(&mut self, context: &mut Context) -> Result<(Linked, usize)> {
        let compiled = context.compile(&*self.isa, &mut Default::default());
        compiled.map_err(|e| internal(format!("{:?}", e.inner)))?;
        let code = context.compiled_code();
        let code = code.ok_or_else(|| internal("no code"))?;
        let at = self.text.len().next_multiple_of(ALIGN);
        for reloc in code.buffer.relocs() {
            let import = import_of(&context.func, reloc)?;
            self.fixups.push(Fixup {
                at: at + reloc.offset as usize,
                kind: reloc.kind,
                addend: reloc.addend,
                import,
            });
        }
        self.text.resize(at, 0);
        let bytes = code.buffer.data();
        self.text.extend_from_slice(bytes);
        // SAFETY: every function of the text is emitted with the signature of kernels, for the buffers that its plan names, whose sizes
        // follow from the graph's types; imports are linked by name, and declared with the types that the emitter calls them with.
        let function = unsafe { self.made.function(at) };
        Ok((function, bytes.len()))
    }

    /// Puts the text into memory, linked to the functions of this process.
    pub(super) fn finish(mut self) -> Result<()> {
        let table = table_offset(self.text.len());
        for fixup in &self.fixups {
            fixup.apply(&mut self.text, table)?;
        }
        let imports = self.imports.iter().map(|&name| name.to_owned());
        Ok(self
            .made
            .link(&self.text, imports.collect(), self.kernels)?)
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

impl Fixup {
    /// Writes the distance, for a table at an offset from the start of the text.
    fn apply(&self, text: &mut [u8], table: usize) -> Result<()> {
        let slot = (table + self.import as usize * size_of::<usize>()) as i64;
        let place = &mut text[self.at..self.at + 4];
        let word = u32::from_le_bytes([place[0], place[1], place[2], place[3]]);
        let written = match self.kind {
            Reloc::X86GOTPCRel4 => {
                let distance = i32::try_from(slot + self.addend - self.at as i64);
                distance.map_err(|_| internal("text of over 2 GiB"))? as u32
            }
            // ADRP, then LDR (immediate) of 8 bytes: Arm Architecture Reference Manual, C6.2.
            Reloc::Aarch64AdrGotPage21 => {
                let pages = (slot >> 12) - (self.at as i64 >> 12);
                word | ((pages & 3) as u32) << 29 | (((pages >> 2) & 0x7_ffff) as u32) << 5
            }
            Reloc::Aarch64Ld64GotLo12Nc => word | (((slot & 0xfff) >> 3) as u32) << 10,
            other => return Err(internal(format!("a relocation of kind {other:?}"))),
        };
        place.copy_from_slice(&written.to_le_bytes());
        Ok(())
    }
}
