//! The functions of one graph: emits them, tells which are alike, and links them.

use super::emit::Emitter;
use super::link::{Linker, internal};
use super::reuse::{CodeStore, Constants, Form, Skeleton};
use crate::error::{Error, Result};
use crate::target::TargetCpu;
use cranelift_codegen::Context;
use cranelift_codegen::ir::{AbiParam, Function, Signature, UserFuncName, Value, types};
use cranelift_codegen::isa::OwnedTargetIsa;
use cranelift_codegen::settings::{self, Configurable};
use cranelift_frontend::FunctionBuilderContext;
use gristmill_runtime::text::{Function as Linked, Text};
use std::collections::HashMap;
use std::fmt::Write;
use std::sync::Arc;

/// Functions under construction and their text.
pub(super) struct Jit {
    linker: Linker,
    context: Context,
    builder: FunctionBuilderContext,
    listings: Option<(String, String)>,
    /// Machine code of the functions defined so far.
    code_bytes: usize,
    /// All functions, of this text and of other programs.
    functions: Vec<Place>,
    /// Functions of this text by what they have but constants.
    defined: HashMap<Skeleton, Vec<Defined>>,
    /// Functions of the programs of the same model.
    store: Option<Arc<CodeStore>>,
}

/// A function that is defined in this text, for comparison with later ones.
struct Defined {
    form: Form,
    function: FunctionId,
    name: String,
}

/// Index of a function among those of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FunctionId(usize);

/// Where the code of a function is.
enum Place {
    /// At an offset of this text.
    Here(usize),
    /// In that of another program.
    There(Linked),
}

/// A function of a program.
#[derive(Clone)]
pub(super) struct Kernel {
    pub(super) function: FunctionId,
    /// The constants that it reads, where it has an argument for them, the first.
    pub(super) constants: Option<Vec<i64>>,
}

/// Linked functions.
pub(super) struct Finished {
    functions: Vec<Linked>,
    pub(super) clif: String,
    pub(super) asm: String,
}

impl Finished {
    pub(super) fn function(&self, function: FunctionId) -> &Linked {
        &self.functions[function.0]
    }
}

/// The target with the features that its CPU has.
fn target_isa(target: TargetCpu) -> Result<OwnedTargetIsa> {
    let is_native = target == TargetCpu::Native;
    let builder = cranelift_native::builder_with_options(is_native);
    let mut builder =
        builder.map_err(|m| Error::unsupported(format!("no code for this CPU: {m}")))?;
    if !is_native {
        target.check_runs_here()?;
        for feature in target.features() {
            builder.enable(feature).map_err(internal)?;
        }
    }
    builder.finish(flags()?).map_err(internal)
}

/// Features of a CPU that code for a target may use, by Cranelift's names.
pub fn required_features(target: TargetCpu) -> Result<Vec<String>> {
    let isa = target_isa(target)?;
    let enabled = isa.isa_flags().into_iter();
    let enabled =
        enabled.filter(|flag| flag.as_bool() == Some(true) && flag.name.starts_with("has_"));
    Ok(enabled.map(|flag| flag.name.to_owned()).collect())
}

fn flags() -> Result<settings::Flags> {
    let mut flags = settings::builder();
    let verifier = match cfg!(debug_assertions) {
        true => "true",
        false => "false",
    };
    for (name, value) in [
        ("opt_level", "speed"),
        ("is_pic", "true"),
        ("use_colocated_libcalls", "false"),
        ("enable_verifier", verifier),
        ("enable_probestack", "false"),
    ] {
        flags.set(name, value).map_err(internal)?;
    }
    Ok(settings::Flags::new(flags))
}

impl Jit {
    /// An empty text for a CPU that this machine can stand in for.
    pub(super) fn new(
        target: TargetCpu,
        listings: bool,
        store: Option<Arc<CodeStore>>,
    ) -> Result<Jit> {
        let linker = Linker::new(target_isa(target)?);
        let listings = listings.then(Default::default);
        Ok(Jit {
            linker,
            context: Context::new(),
            builder: FunctionBuilderContext::new(),
            listings,
            code_bytes: 0,
            functions: Vec::new(),
            defined: HashMap::new(),
            store,
        })
    }

    /// Puts lines before the next function of the listing.
    pub(super) fn note(&mut self, lines: impl std::fmt::Display) {
        let Some((clif, _)) = &mut self.listings else {
            return;
        };
        for line in lines.to_string().lines() {
            let _ = writeln!(clif, "; {line}");
        }
    }

    /// Defines a kernel; `body` emits it into an [`Emitter`] placed after the entry, and the function then returns status 0. Kernels
    /// that come out alike, as those of repeated layers do, are one function. `may_differ` says that the programs of other shapes may have
    /// it with other constants.
    pub(super) fn kernel(
        &mut self,
        name: &str,
        may_differ: bool,
        body: impl FnOnce(&mut Emitter) -> Result<()>,
    ) -> Result<Kernel> {
        let base = self.emit(may_differ && self.store.is_some(), body)?;
        let callees = self.linker.callees(&self.context.func);
        let constants = Constants::of(&self.context.func);
        let skeleton = constants.skeleton(&mut self.context.func, (callees, base.is_some()));
        let found = self.find(skeleton, &constants.values, name);
        let (function, form) = match found {
            Some(found) => found,
            None => self.define(name, skeleton, &constants, base)?,
        };
        self.context.clear();
        Ok(Kernel {
            function,
            constants: base.map(|_| form.read(&constants.values)),
        })
    }

    /// A function that can stand for one with these constants.
    fn find(
        &mut self,
        skeleton: Skeleton,
        constants: &[i64],
        name: &str,
    ) -> Option<(FunctionId, Form)> {
        let here = self.defined.get(&skeleton).map_or(&[][..], Vec::as_slice);
        if let Some(same) = here.iter().find(|d| d.form.fits(constants)) {
            if let Some((clif, _)) = &mut self.listings {
                let _ = writeln!(clif, "; {name} is {}\n", same.name);
            }
            return Some((same.function, same.form.clone()));
        }
        let found = self.store.as_ref()?.find(skeleton, constants)?;
        let function = self.add_function(Place::There(found.function));
        Some((function, found.form))
    }

    /// Adds a function of another program.
    pub(super) fn add_kept(&mut self, function: Linked) -> FunctionId {
        self.add_function(Place::There(function))
    }

    /// A function of another program.
    pub(super) fn kept(&self, function: FunctionId) -> Option<&Linked> {
        match &self.functions[function.0] {
            Place::There(linked) => Some(linked),
            Place::Here(_) => None,
        }
    }

    fn add_function(&mut self, place: Place) -> FunctionId {
        self.functions.push(place);
        FunctionId(self.functions.len() - 1)
    }

    /// Emits a function into the context; gives the address of the constants that it can read.
    fn emit(
        &mut self,
        reads_constants: bool,
        body: impl FnOnce(&mut Emitter) -> Result<()>,
    ) -> Result<Option<Value>> {
        let signature = self.signature();
        let function = &mut self.context.func;
        *function = Function::with_name_signature(UserFuncName::default(), signature);
        let frontend_config = self.linker.isa.frontend_config();
        let mut emitter = Emitter::new(function, &mut self.builder, &mut self.linker);
        let base = reads_constants.then(|| emitter.take_first_arg());
        body(&mut emitter)?;
        emitter.finish(frontend_config);
        Ok(base)
    }

    /// The signature of kernels: [`KernelFn`](gristmill_runtime::program::KernelFn).
    fn signature(&self) -> Signature {
        let mut signature = Signature::new(self.linker.isa.default_call_conv());
        signature.params.extend([types::I64; 3].map(AbiParam::new));
        signature.returns.push(AbiParam::new(types::I32));
        signature
    }

    /// Defines the function in the context: one that reads the constants in which it differs from
    /// those of other programs.
    fn define(
        &mut self,
        name: &str,
        skeleton: Skeleton,
        constants: &Constants,
        base: Option<Value>,
    ) -> Result<(FunctionId, Form)> {
        let mut form = Form::written(&constants.values);
        if let (Some(store), Some(base)) = (&self.store, base)
            && let Some(common) = store.common_form(skeleton, &constants.values)
        {
            constants.read_from(&mut self.context.func, &common, base);
            form = common;
        }
        let offset = self.compile(name)?;
        let function = self.add_function(Place::Here(offset));
        self.defined.entry(skeleton).or_default().push(Defined {
            form: form.clone(),
            function,
            name: name.to_owned(),
        });
        Ok((function, form))
    }

    /// Compiles the function in the context; gives its offset.
    fn compile(&mut self, name: &str) -> Result<usize> {
        self.context.func.name = UserFuncName::user(0, self.functions.len() as u32);
        if let Some((clif, _)) = &mut self.listings {
            let _ = writeln!(clif, "; {name}\n{}", self.context.func.display());
            self.context.set_disasm(true);
        }
        let defined = self.linker.define(&mut self.context);
        let (offset, n_bytes) = defined.map_err(|e| e.context(name))?;
        self.code_bytes += n_bytes;
        if let Some((_, asm)) = &mut self.listings {
            let compiled = self.context.compiled_code();
            let code = compiled.and_then(|c| c.vcode.as_deref()).unwrap_or("");
            let _ = writeln!(asm, "; {name}\n{code}");
        }
        Ok(offset)
    }

    /// Bytes of machine code so far.
    pub(super) fn code_bytes(&self) -> usize {
        self.code_bytes
    }

    /// Links everything.
    pub(super) fn finish(self) -> Result<Finished> {
        let text = self.linker.load()?;
        let linked = |place| match place {
            Place::Here(offset) => linked_in(&text, offset),
            Place::There(function) => Ok(function),
        };
        let functions: Vec<Linked> = self
            .functions
            .into_iter()
            .map(linked)
            .collect::<Result<_>>()?;
        if let Some(store) = &self.store {
            publish(store, self.defined, &functions);
        }
        let (clif, asm) = self.listings.unwrap_or_default();
        Ok(Finished {
            functions,
            clif,
            asm,
        })
    }
}

/// The function at an offset that [`Linker::define`] gave.
fn linked_in(text: &Arc<Text>, offset: usize) -> Result<Linked> {
    // SAFETY: every function of the text was emitted with the signature of kernels, for the buffers that its plan names, whose sizes follow
    // from the graph's types; imports are linked by name, and declared with the types that the emitter calls them with.
    let function = unsafe { text.function(offset) };
    function.ok_or_else(|| internal("a function beyond its text"))
}

/// Adds the functions of a text to those that other programs can have.
fn publish(store: &CodeStore, defined: HashMap<Skeleton, Vec<Defined>>, functions: &[Linked]) {
    for (skeleton, alike) in defined {
        for Defined { form, function, .. } in alike {
            store.add(skeleton, form, &functions[function.0]);
        }
    }
}
