//! The JIT module of one graph: declares, defines and links functions, and owns their memory.

use super::emit::Emitter;
use crate::error::{Error, Result};
use crate::target::TargetCpu;
use cranelift_codegen::Context;
use cranelift_codegen::ir::function::FunctionStencil;
use cranelift_codegen::ir::{AbiParam, Function, Signature, UserExternalName, UserFuncName, types};
use cranelift_codegen::isa::OwnedTargetIsa;
use cranelift_codegen::settings::{self, Configurable};
use cranelift_frontend::FunctionBuilderContext;
use cranelift_jit::{ArenaMemoryProvider, JITBuilder, JITModule};
use cranelift_module::{FuncId, Linkage, Module, default_libcall_names};
use gristmill_runtime::program::KernelFn;
use std::collections::HashMap;
use std::fmt::Write;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Mutex;

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
    /// Functions defined so far, by hash of their code and callees.
    defined: HashMap<u64, Vec<Defined>>,
}

/// A function that is defined, for comparison with later ones.
struct Defined {
    stencil: FunctionStencil,
    calls: Vec<UserExternalName>,
    id: FuncId,
    name: String,
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
    pub(super) fn new(target: TargetCpu, listings: bool) -> Result<Jit> {
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
            defined: HashMap::new(),
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
    /// that come out alike, as those of repeated layers do, are one function.
    pub(super) fn kernel(
        &mut self,
        name: &str,
        body: impl FnOnce(&mut Emitter) -> Result<()>,
    ) -> Result<FuncId> {
        let (stencil, calls) = self.emitted(body)?;
        let mut hasher = DefaultHasher::new();
        (&stencil, &calls).hash(&mut hasher);
        let hash = hasher.finish();
        let alike = self.defined.get(&hash).map_or(&[][..], Vec::as_slice);
        let same = alike
            .iter()
            .find(|d| d.stencil == stencil && d.calls == calls);
        let id = match same {
            Some(same) => {
                if let Some((clif, _)) = &mut self.listings {
                    let _ = writeln!(clif, "; {name} is {}\n", same.name);
                }
                same.id
            }
            None => {
                let id = self.define(name)?;
                let name = name.to_owned();
                let defined = Defined {
                    stencil,
                    calls,
                    id,
                    name,
                };
                self.defined.entry(hash).or_default().push(defined);
                id
            }
        };
        self.module.clear_context(&mut self.context);
        Ok(id)
    }

    /// Emits a kernel into the context; gives its code and its callees.
    fn emitted(
        &mut self,
        body: impl FnOnce(&mut Emitter) -> Result<()>,
    ) -> Result<(FunctionStencil, Vec<UserExternalName>)> {
        let signature = self.signature();
        let function = &mut self.context.func;
        *function = Function::with_name_signature(UserFuncName::default(), signature);
        let frontend_config = self.module.isa().frontend_config();
        let mut emitter = Emitter::new(function, &mut self.builder, &mut self.module);
        body(&mut emitter)?;
        emitter.finish(frontend_config);
        let function = &self.context.func;
        let calls = function.params.user_named_funcs().values().cloned();
        Ok((function.stencil.clone(), calls.collect()))
    }

    /// The signature of [`KernelFn`].
    fn signature(&self) -> Signature {
        let mut signature = Signature::new(self.module.isa().default_call_conv());
        signature.params.extend([types::I64; 3].map(AbiParam::new));
        signature.returns.push(AbiParam::new(types::I32));
        signature
    }

    /// Compiles the function in the context.
    fn define(&mut self, name: &str) -> Result<FuncId> {
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

    /// Links everything; gives the owner of the code, a resolver of entry points, and the listings.
    pub(super) fn finish(mut self) -> Result<(Code, Vec<Option<KernelFn>>, String, String)> {
        self.module.finalize_definitions().map_err(internal)?;
        let n = self.module.declarations().get_functions().count();
        let entries = (0..n as u32)
            .map(|i| self.entry(FuncId::from_u32(i)))
            .collect();
        let (clif, asm) = self.listings.unwrap_or_default();
        Ok((Code(Mutex::new(Some(self.module))), entries, clif, asm))
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
