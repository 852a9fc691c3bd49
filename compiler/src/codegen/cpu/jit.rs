//! The functions of a program: emits them for all of its partitions and regions, tells which are alike, and links them.

use super::Options;
use super::emit::Emitter;
use super::link::{Linker, internal};
use super::plan_cache::NewPlans;
use super::reuse::{CodeStore, Constants, Form, Skeleton, most_similar};
use crate::codegen::workers::Workers;
use crate::error::{Error, Result};
use crate::target::TargetCpu;
use cranelift_codegen::Context;
use cranelift_codegen::ir::{AbiParam, Function, Signature, UserFuncName, Value, types};
use cranelift_codegen::isa::OwnedTargetIsa;
use cranelift_codegen::settings::{self, Configurable};
use cranelift_frontend::FunctionBuilderContext;
use gristmill_runtime::text::Function as Linked;
use std::collections::HashMap;
use std::fmt::Write;
use std::sync::Arc;

/// Functions under construction and their text.
pub(super) struct Jit {
    linker: Linker,
    context: Context,
    builder: FunctionBuilderContext,
    /// Text of the functions, if listings are collected.
    clif: Option<String>,
    workers: Workers,
    n_functions: usize,
    /// Plans that are kept once the text is linked.
    kept: Vec<NewPlans>,
    /// Functions of this text by what they have but constants.
    defined: HashMap<Skeleton, Vec<Defined>>,
    /// Functions of the programs of the session.
    store: Option<Arc<CodeStore>>,
    is_one_of_many: bool,
    target: TargetCpu,
}

/// A function that is defined in this text, for comparison with later ones.
struct Defined {
    form: Form,
    function: Linked,
    name: String,
}

/// A function of a program.
#[derive(Clone)]
pub(super) struct Kernel {
    pub(super) function: Linked,
    /// The constants that it reads, where it has an argument for them, the first.
    pub(super) constants: Option<Vec<i64>>,
}

/// Listings and size of the code of a program.
#[derive(Default)]
pub struct Listing {
    /// Cranelift IR, if listings are collected.
    pub clif: String,
    /// Disassembly, if listings are collected.
    pub asm: String,
    /// Bytes of machine code.
    pub code_bytes: usize,
}

/// The target with the features that its CPU has, which need not be those of this one.
fn target_isa(target: TargetCpu) -> Result<OwnedTargetIsa> {
    let is_native = target == TargetCpu::Native;
    let builder = cranelift_native::builder_with_options(is_native);
    let mut builder =
        builder.map_err(|m| Error::unsupported(format!("no code for this CPU: {m}")))?;
    if !is_native {
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

/// Kernels that may be alike but for constants, which one function for all of them then reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Variants {
    /// It has none.
    None,
    /// The programs of other shapes may have some.
    OfPrograms,
    /// So may this program: kernels of parts of one result.
    OfParts,
}

impl Jit {
    /// An empty text.
    pub(super) fn new(options: &Options) -> Result<Jit> {
        let target = options.target;
        let linker = Linker::new(target_isa(target)?, target.isa());
        Ok(Jit {
            linker,
            context: Context::new(),
            builder: FunctionBuilderContext::new(),
            clif: options.listings.then(String::new),
            workers: options.workers,
            n_functions: 0,
            kept: Vec::new(),
            defined: HashMap::new(),
            store: options.code.clone(),
            is_one_of_many: options.is_one_of_many,
            target,
        })
    }

    /// Puts lines before the next function of the listing.
    pub(super) fn note(&mut self, lines: impl std::fmt::Display) {
        let Some(clif) = &mut self.clif else {
            return;
        };
        for line in lines.to_string().lines() {
            let _ = writeln!(clif, "; {line}");
        }
    }

    /// Defines a kernel; `body` emits it into an [`Emitter`] placed after the entry, and the function then returns status 0. Kernels
    /// that come out alike, as those of repeated layers do, are one function.
    pub(super) fn kernel(
        &mut self,
        name: &str,
        variants: Variants,
        body: impl FnOnce(&mut Emitter) -> Result<()>,
    ) -> Result<Kernel> {
        let reads_constants = match variants {
            Variants::None => false,
            Variants::OfPrograms => self.is_one_of_many,
            Variants::OfParts => true,
        };
        let base = self.emit(reads_constants, body)?;
        let callees = self.linker.callees(&self.context.func);
        let constants = Constants::of(&self.context.func);
        let skeleton = constants.skeleton(
            &mut self.context.func,
            (self.target, callees, base.is_some()),
        );
        let found = self.find(skeleton, &constants.values, name);
        let (function, form) = match found {
            Some(found) => found,
            None => {
                let common = self.common_form(variants, skeleton, &constants.values);
                let form = base.zip(common).map(|(base, common)| {
                    constants.read_from(&mut self.context.func, &common, base);
                    common
                });
                let form = form.unwrap_or_else(|| Form::written(&constants.values));
                (self.define(name, skeleton, &form), form)
            }
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
    ) -> Option<(Linked, Form)> {
        let here = self.defined.get(&skeleton).map_or(&[][..], Vec::as_slice);
        if let Some(same) = here.iter().find(|d| d.form.fits(constants)) {
            if let Some(clif) = &mut self.clif {
                let _ = writeln!(clif, "; {name} is {}\n", same.name);
            }
            return Some((same.function.clone(), same.form.clone()));
        }
        let found = self.store.as_ref()?.find(skeleton, constants)?;
        Some((found.function, found.form))
    }

    /// Keeps plans when their functions are linked.
    pub(super) fn keep(&mut self, plans: NewPlans) {
        self.kept.push(plans);
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

    /// Defines the function in the context, of this form.
    fn define(&mut self, name: &str, skeleton: Skeleton, form: &Form) -> Linked {
        let mut function = std::mem::replace(&mut self.context.func, Function::new());
        function.name = UserFuncName::user(0, self.n_functions as u32);
        self.n_functions += 1;
        if let Some(clif) = &mut self.clif {
            let _ = writeln!(clif, "; {name}\n{}", function.display());
        }
        let function = self.linker.add(name.to_owned(), function);
        self.defined.entry(skeleton).or_default().push(Defined {
            form: form.clone(),
            function: function.clone(),
            name: name.to_owned(),
        });
        function
    }

    /// The form of a function that can stand for one with these constants and for a variant that is there.
    fn common_form(
        &self,
        variants: Variants,
        skeleton: Skeleton,
        constants: &[i64],
    ) -> Option<Form> {
        if variants == Variants::OfParts
            && let Some(alike) = self.defined.get(&skeleton)
        {
            return most_similar(alike.iter().map(|d| &d.form), constants);
        }
        self.store.as_ref()?.common_form(skeleton, constants)
    }

    /// Compiles and links everything, and lets other programs have it.
    pub(super) fn finish(self) -> Result<Listing> {
        let (code_bytes, asm) = self.linker.finish(self.workers, self.clif.is_some())?;
        if let Some(store) = &self.store {
            publish(store, self.defined);
        }
        self.kept.into_iter().for_each(NewPlans::keep);
        Ok(Listing {
            clif: self.clif.unwrap_or_default(),
            asm: asm.concat(),
            code_bytes,
        })
    }
}

/// Adds the functions of a text to those that other programs can have.
fn publish(store: &CodeStore, defined: HashMap<Skeleton, Vec<Defined>>) {
    for (skeleton, alike) in defined {
        for Defined { form, function, .. } in alike {
            store.add(skeleton, form, &function);
        }
    }
}
