//! The JIT module of one graph: declares, defines and links functions, and owns their memory.

use super::emit::Emitter;
use super::reuse::{CodeStore, Constants, Form, Skeleton};
use crate::error::{Error, Result};
use crate::target::TargetCpu;
use cranelift_codegen::Context;
use cranelift_codegen::ir::{AbiParam, Function, Signature, UserFuncName, Value, types};
use cranelift_codegen::isa::OwnedTargetIsa;
use cranelift_codegen::settings::{self, Configurable};
use cranelift_frontend::FunctionBuilderContext;
use cranelift_jit::{ArenaMemoryProvider, JITBuilder, JITModule};
use cranelift_module::{FuncId, Linkage, Module, default_libcall_names};
use gristmill_runtime::program::KernelFn;
use std::collections::HashMap;
use std::fmt::Write;
use std::sync::{Arc, Mutex};

/// Address space reserved per graph; only used pages are backed by memory.
const ARENA_BYTES: usize = 64 << 20;

/// Functions under construction and their module.
pub(super) struct Jit {
    module: JITModule,
    context: Context,
    builder: FunctionBuilderContext,
    listings: Option<(String, String)>,
    /// Machine code of the functions defined so far.
    code_bytes: usize,
    /// All functions, of this module and of other programs.
    functions: Vec<Linked>,
    /// Functions of this module by what they have but constants.
    defined: HashMap<Skeleton, Vec<Defined>>,
    /// Functions of the programs of the same model.
    store: Option<Arc<CodeStore>>,
}

/// A function that is defined in this module, for comparison with later ones.
struct Defined {
    form: Form,
    function: FunctionId,
    name: String,
}

/// Index of a function among those of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FunctionId(usize);

/// The code of a function.
enum Linked {
    /// In this module.
    Here(FuncId),
    /// In that of another program.
    There(KernelFn, Arc<Code>),
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
    /// Owners of their code.
    pub(super) code: Vec<Arc<Code>>,
    /// The functions with the owners of theirs.
    functions: Vec<(Option<KernelFn>, Arc<Code>)>,
    pub(super) clif: String,
    pub(super) asm: String,
}

impl Finished {
    pub(super) fn entry(&self, function: FunctionId) -> Option<KernelFn> {
        self.functions[function.0].0
    }

    /// A function, and the owner of its code.
    pub(super) fn function(&self, function: FunctionId) -> Option<(KernelFn, &Arc<Code>)> {
        let (entry, owner) = &self.functions[function.0];
        Some(((*entry)?, owner))
    }
}

/// Keeps generated code mapped; frees it when dropped.
pub(super) struct Code(Mutex<Option<JITModule>>);

impl Drop for Code {
    fn drop(&mut self) {
        let module = self
            .0
            .get_mut()
            .unwrap_or_else(|poisoned| poisoned.into_inner())
            .take();
        if let Some(module) = module {
            // SAFETY: `CompiledKernels::code` is documented to outlive every use of the entry points, and this is its last owner.
            unsafe { module.free_memory() };
        }
    }
}

fn internal(problem: impl std::fmt::Display) -> Error {
    Error::internal(format!("cranelift: {problem}"))
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

fn flags() -> Result<settings::Flags> {
    let mut flags = settings::builder();
    let verifier = match cfg!(debug_assertions) {
        true => "true",
        false => "false",
    };
    for (name, value) in [
        ("opt_level", "speed"),
        ("is_pic", "false"),
        ("use_colocated_libcalls", "false"),
        ("enable_verifier", verifier),
        ("enable_probestack", "false"),
    ] {
        flags.set(name, value).map_err(internal)?;
    }
    Ok(settings::Flags::new(flags))
}

impl Jit {
    /// An empty module for a CPU that this machine can stand in for.
    pub(super) fn new(
        target: TargetCpu,
        listings: bool,
        store: Option<Arc<CodeStore>>,
    ) -> Result<Jit> {
        let mut builder = JITBuilder::with_isa(target_isa(target)?, default_libcall_names());
        let arena = ArenaMemoryProvider::new_with_size(ARENA_BYTES).map_err(|e| {
            let message = format!("cannot reserve code memory: {e}");
            Error::new(crate::ErrorKind::OutOfMemory, message)
        })?;
        builder.memory_provider(Box::new(arena));
        let symbols = gristmill_kernels::symbols()
            .iter()
            .chain(gristmill_kernels::scalar_math::symbols())
            .chain(gristmill_kernels::sorting::symbols());
        builder.symbols(symbols.map(|s| (s.name, s.address)));
        let module = JITModule::new(builder);
        let context = module.make_context();
        let listings = listings.then(Default::default);
        Ok(Jit {
            module,
            context,
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
        let callees = self.callees();
        let constants = Constants::of(&self.context.func);
        let skeleton = constants.skeleton(&mut self.context.func, (callees, base.is_some()));
        let found = self.find(skeleton, &constants.values, name);
        let (function, form) = match found {
            Some(found) => found,
            None => self.define(name, skeleton, &constants, base)?,
        };
        self.module.clear_context(&mut self.context);
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
        let function = self.add_function(Linked::There(found.entry, found.code));
        Some((function, found.form))
    }

    /// Adds a function of another program.
    pub(super) fn add_kept(&mut self, entry: KernelFn, code: Arc<Code>) -> FunctionId {
        self.add_function(Linked::There(entry, code))
    }

    /// The address of a function of another program.
    pub(super) fn kept_entry(&self, function: FunctionId) -> Option<usize> {
        match &self.functions[function.0] {
            Linked::There(entry, _) => Some(*entry as usize),
            Linked::Here(_) => None,
        }
    }

    fn add_function(&mut self, linked: Linked) -> FunctionId {
        self.functions.push(linked);
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
        let frontend_config = self.module.isa().frontend_config();
        let mut emitter = Emitter::new(function, &mut self.builder, &mut self.module);
        let base = reads_constants.then(|| emitter.take_first_arg());
        body(&mut emitter)?;
        emitter.finish(frontend_config);
        Ok(base)
    }

    /// Names of the functions that the function in the context calls.
    fn callees(&self) -> Vec<String> {
        let declared = self.module.declarations();
        let name = |index: u32| {
            declared
                .get_function_decl(FuncId::from_u32(index))
                .linkage_name(FuncId::from_u32(index))
                .into_owned()
        };
        let called = self.context.func.params.user_named_funcs().values();
        called.map(|c| name(c.index)).collect()
    }

    /// The signature of [`KernelFn`].
    fn signature(&self) -> Signature {
        let mut signature = Signature::new(self.module.isa().default_call_conv());
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
        let id = self.compile(name)?;
        let function = self.add_function(Linked::Here(id));
        self.defined.entry(skeleton).or_default().push(Defined {
            form: form.clone(),
            function,
            name: name.to_owned(),
        });
        Ok((function, form))
    }

    /// Compiles the function in the context.
    fn compile(&mut self, name: &str) -> Result<FuncId> {
        let signature = self.signature();
        let declared = self
            .module
            .declare_function(name, Linkage::Export, &signature);
        let id = declared.map_err(internal)?;
        self.context.func.name = UserFuncName::user(0, id.as_u32());
        if let Some((clif, _)) = &mut self.listings {
            let _ = writeln!(clif, "; {name}\n{}", self.context.func.display());
            self.context.set_disasm(true);
        }
        let defined = self.module.define_function(id, &mut self.context);
        defined.map_err(|e| internal(format!("{e:?}")).context(name))?;
        let compiled = self.context.compiled_code();
        self.code_bytes += compiled.map_or(0, |c| c.code_info().total_size as usize);
        if let Some((_, asm)) = &mut self.listings {
            let compiled = self.context.compiled_code();
            let code = compiled.and_then(|c| c.vcode.as_deref()).unwrap_or("");
            let _ = writeln!(asm, "; {name}\n{code}");
        }
        Ok(id)
    }

    /// Bytes of machine code so far.
    pub(super) fn code_bytes(&self) -> usize {
        self.code_bytes
    }

    /// Links everything. A module without functions is dropped.
    pub(super) fn finish(mut self) -> Result<Finished> {
        self.module.finalize_definitions().map_err(internal)?;
        let entry = |linked: &Linked| match linked {
            Linked::Here(id) => self.entry(*id),
            Linked::There(entry, _) => Some(*entry),
        };
        let entries: Vec<Option<KernelFn>> = self.functions.iter().map(entry).collect();
        let own = Arc::new(Code(Mutex::new(Some(self.module))));
        if let Some(store) = &self.store {
            publish(store, self.defined, &entries, &own);
        }
        let owner = |linked| match linked {
            Linked::Here(_) => own.clone(),
            Linked::There(_, owner) => owner,
        };
        let owners = self.functions.into_iter().map(owner);
        let functions: Vec<_> = entries.into_iter().zip(owners).collect();
        let (clif, asm) = self.listings.unwrap_or_default();
        Ok(Finished {
            code: owners_of(&functions),
            functions,
            clif,
            asm,
        })
    }

    fn entry(&self, id: FuncId) -> Option<KernelFn> {
        let declared = self.module.declarations().get_function_decl(id);
        if declared.linkage != Linkage::Export {
            return None;
        }
        let address = self.module.get_finalized_function(id);
        // SAFETY: `kernel` gives every exported function exactly this signature.
        Some(unsafe { std::mem::transmute::<*const u8, KernelFn>(address) })
    }
}

/// Adds the functions of a module to those that other programs can have.
fn publish(
    store: &CodeStore,
    defined: HashMap<Skeleton, Vec<Defined>>,
    entries: &[Option<KernelFn>],
    code: &Arc<Code>,
) {
    for (skeleton, functions) in defined {
        for Defined { form, function, .. } in functions {
            if let Some(entry) = entries[function.0] {
                store.add(skeleton, form, entry, code);
            }
        }
    }
}

/// Owners of the code of some functions, each once.
fn owners_of(functions: &[(Option<KernelFn>, Arc<Code>)]) -> Vec<Arc<Code>> {
    let mut owners: Vec<Arc<Code>> = Vec::new();
    for (_, owner) in functions {
        if !owners.iter().any(|known| Arc::ptr_eq(known, owner)) {
            owners.push(owner.clone());
        }
    }
    owners
}
