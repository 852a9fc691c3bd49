//! Building blocks of generated functions: index arithmetic, loops, loads and stores, faults, calls.

use crate::error::{Error, Result};
use cranelift_codegen::ir::condcodes::IntCC;
use cranelift_codegen::ir::{
    AbiParam, Block, BlockArg, FuncRef, Function, InstBuilder, MemFlagsData, Signature, Type, Value, types,
};
use cranelift_codegen::isa::TargetFrontendConfig;
use cranelift_frontend::{FunctionBuilder, FunctionBuilderContext};
use cranelift_jit::JITModule;
use cranelift_module::{Linkage, Module};
use gristmill_runtime::DType;
use std::collections::BTreeMap;

/// An index, an offset or an extent: `i64`, folded while it is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Ix {
    /// Known now.
    C(i64),
    /// Known when the code runs.
    V(Value),
}

/// A function being emitted.
pub(super) struct Emitter<'a> {
    pub(super) b: FunctionBuilder<'a>,
    module: &'a mut JITModule,
    imports: BTreeMap<&'static str, FuncRef>,
    faults: BTreeMap<u32, Block>,
    /// Address of the argument array, first and last item.
    pub(super) args: Value,
    pub(super) begin: Value,
    pub(super) end: Value,
}

/// Register type of an element. Half types are held as their bits.
pub(super) fn clif_type(dtype: DType) -> Type {
    match dtype {
        DType::F32 => types::F32,
        DType::F64 => types::F64,
        DType::I8 | DType::U8 | DType::Bool => types::I8,
        DType::F16 | DType::BF16 | DType::I16 | DType::U16 => types::I16,
        DType::I32 | DType::U32 => types::I32,
        DType::I64 | DType::U64 => types::I64,
    }
}

impl<'a> Emitter<'a> {
    pub(super) fn new(
        func: &'a mut Function,
        context: &'a mut FunctionBuilderContext,
        module: &'a mut JITModule,
    ) -> Emitter<'a> {
        let mut b = FunctionBuilder::new(func, context);
        let entry = b.create_block();
        b.append_block_params_for_function_params(entry);
        b.switch_to_block(entry);
        let params = b.block_params(entry);
        let (args, begin, end) = (params[0], params[1], params[2]);
        Emitter { b, module, imports: BTreeMap::new(), faults: BTreeMap::new(), args, begin, end }
    }

    /// Returns status 0 and closes the function.
    pub(super) fn finish(mut self, config: TargetFrontendConfig) {
        self.return_status(0);
        for (status, block) in std::mem::take(&mut self.faults) {
            self.b.switch_to_block(block);
            self.return_status(status);
        }
        self.b.seal_all_blocks();
        self.b.finalize(config);
    }

    fn return_status(&mut self, status: u32) {
        let s = self.b.ins().iconst(types::I32, i64::from(status));
        self.b.ins().return_(&[s]);
    }

    /// Leaves the function with `status` when `condition` is true.
    pub(super) fn fault_if(&mut self, condition: Value, status: u32) {
        let fault = match self.faults.get(&status) {
            Some(&block) => block,
            None => {
                let block = self.b.create_block();
                self.b.set_cold_block(block);
                self.faults.insert(status, block);
                block
            }
        };
        let next = self.b.create_block();
        self.b.ins().brif(condition, fault, &[], next, &[]);
        self.b.switch_to_block(next);
    }

    /// Address of argument `i`.
    pub(super) fn arg(&mut self, i: usize) -> Value {
        self.b.ins().load(types::I64, MemFlagsData::trusted(), self.args, (i * 8) as i32)
    }

    pub(super) fn iconst(&mut self, v: i64) -> Value {
        self.b.ins().iconst(types::I64, v)
    }

    /// The value of an index.
    pub(super) fn val(&mut self, x: Ix) -> Value {
        match x {
            Ix::C(c) => self.iconst(c),
            Ix::V(v) => v,
        }
    }

    pub(super) fn add(&mut self, x: Ix, y: Ix) -> Ix {
        match (x, y) {
            (Ix::C(a), Ix::C(b)) => Ix::C(a.wrapping_add(b)),
            (Ix::C(0), z) | (z, Ix::C(0)) => z,
            (Ix::V(v), Ix::C(c)) | (Ix::C(c), Ix::V(v)) => Ix::V(self.b.ins().iadd_imm_s(v, c)),
            (Ix::V(a), Ix::V(b)) => Ix::V(self.b.ins().iadd(a, b)),
        }
    }

    pub(super) fn mul(&mut self, x: Ix, factor: i64) -> Ix {
        match (x, factor) {
            (Ix::C(a), f) => Ix::C(a.wrapping_mul(f)),
            (_, 0) => Ix::C(0),
            (x, 1) => x,
            (Ix::V(v), f) => Ix::V(self.b.ins().imul_imm_s(v, f)),
        }
    }

    /// `x / d` and `x % d` for `x >= 0`.
    pub(super) fn div_rem(&mut self, x: Ix, d: usize) -> (Ix, Ix) {
        match (x, d.max(1) as i64) {
            (Ix::C(a), d) => (Ix::C(a / d), Ix::C(a % d)),
            (x, 1) => (x, Ix::C(0)),
            (Ix::V(v), d) => {
                let q = self.b.ins().udiv_imm_s(v, d);
                let back = self.b.ins().imul_imm_s(q, d);
                (Ix::V(q), Ix::V(self.b.ins().isub(v, back)))
            }
        }
    }

    /// Coordinates in `shape` of the element at row-major position `linear`.
    pub(super) fn delinearise(&mut self, linear: Ix, shape: &[usize]) -> Vec<Ix> {
        let mut coords = vec![Ix::C(0); shape.len()];
        let mut rest = linear;
        // The outermost axis that is not 1 takes what is left without a division.
        let first = shape.iter().position(|&d| d != 1);
        for i in (0..shape.len()).rev() {
            if Some(i) == first {
                coords[i] = rest;
            } else if shape[i] != 1 {
                (rest, coords[i]) = self.div_rem(rest, shape[i]);
            }
        }
        coords
    }

    /// Row-major position of `coords` in `shape`.
    pub(super) fn linearise(&mut self, coords: &[Ix], shape: &[usize]) -> Ix {
        let mut at = Ix::C(0);
        for (&c, &d) in coords.iter().zip(shape) {
            at = self.mul(at, d as i64);
            at = self.add(at, c);
        }
        at
    }

    /// The element at index `at` behind `base`.
    pub(super) fn load(&mut self, dtype: DType, base: Value, at: Ix) -> Value {
        let (address, offset) = self.address(dtype, base, at);
        self.b.ins().load(clif_type(dtype), MemFlagsData::new().with_notrap(), address, offset)
    }

    /// Writes the element at index `at` behind `base`.
    pub(super) fn store(&mut self, dtype: DType, value: Value, base: Value, at: Ix) {
        let (address, offset) = self.address(dtype, base, at);
        self.b.ins().store(MemFlagsData::new().with_notrap(), value, address, offset);
    }

    fn address(&mut self, dtype: DType, base: Value, at: Ix) -> (Value, i32) {
        let size = dtype.size_bytes() as i64;
        match at {
            Ix::C(c) => match i32::try_from(c.wrapping_mul(size)) {
                Ok(offset) => (base, offset),
                Err(_) => (self.b.ins().iadd_imm_s(base, c.wrapping_mul(size)), 0),
            },
            Ix::V(v) => {
                let bytes = if size == 1 { v } else { self.b.ins().ishl_imm_s(v, i64::from(size.trailing_zeros())) };
                (self.b.ins().iadd(base, bytes), 0)
            }
        }
    }

    /// `for i in start..end step by step`, carrying values round; gives the carried values after the loop.
    pub(super) fn for_loop(
        &mut self,
        start: Ix,
        end: Ix,
        step: i64,
        carried: &[Value],
        body: impl FnOnce(&mut Self, Value, &[Value]) -> Result<Vec<Value>>,
    ) -> Result<Vec<Value>> {
        let (start, end) = (self.val(start), self.val(end));
        let (head, inside, exit) = (self.b.create_block(), self.b.create_block(), self.b.create_block());
        let i = self.b.append_block_param(head, types::I64);
        let mut state = Vec::new();
        for &c in carried {
            let ty = self.b.func.dfg.value_type(c);
            state.push(self.b.append_block_param(head, ty));
        }
        let enter = block_args(start, carried);
        self.b.ins().jump(head, &enter);
        self.b.switch_to_block(head);
        let more = self.b.ins().icmp(IntCC::SignedLessThan, i, end);
        self.b.ins().brif(more, inside, &[], exit, &[]);
        self.b.switch_to_block(inside);
        let next = body(self, i, &state)?;
        let i_next = self.b.ins().iadd_imm_s(i, step);
        let again = block_args(i_next, &next);
        self.b.ins().jump(head, &again);
        self.b.switch_to_block(exit);
        Ok(state)
    }

    /// `while i < end`; the body gives the next `i` and carried values.
    pub(super) fn while_less(
        &mut self,
        start: Value,
        end: Value,
        carried: &[Value],
        body: impl FnOnce(&mut Self, Value, &[Value]) -> Result<(Value, Vec<Value>)>,
    ) -> Result<()> {
        let (head, inside, exit) = (self.b.create_block(), self.b.create_block(), self.b.create_block());
        let i = self.b.append_block_param(head, types::I64);
        let state: Vec<Value> = carried.iter().map(|_| self.b.append_block_param(head, types::I64)).collect();
        let enter = block_args(start, carried);
        self.b.ins().jump(head, &enter);
        self.b.switch_to_block(head);
        let more = self.b.ins().icmp(IntCC::SignedLessThan, i, end);
        self.b.ins().brif(more, inside, &[], exit, &[]);
        self.b.switch_to_block(inside);
        let (i_next, next) = body(self, i, &state)?;
        let again = block_args(i_next, &next);
        self.b.ins().jump(head, &again);
        self.b.switch_to_block(exit);
        Ok(())
    }

    /// A value of type `ty` computed by `yes` when `condition` holds, else by `no`; only one of them runs.
    pub(super) fn branch<S>(
        &mut self,
        condition: Value,
        types: &[Type],
        state: &mut S,
        yes: impl FnOnce(&mut S, &mut Self) -> Result<Vec<Value>>,
        no: impl FnOnce(&mut S, &mut Self) -> Result<Vec<Value>>,
    ) -> Result<Vec<Value>> {
        let (then, other, join) = (self.b.create_block(), self.b.create_block(), self.b.create_block());
        let results: Vec<Value> = types.iter().map(|&ty| self.b.append_block_param(join, ty)).collect();
        self.b.ins().brif(condition, then, &[], other, &[]);
        self.b.switch_to_block(then);
        let values: Vec<BlockArg> = yes(state, self)?.into_iter().map(BlockArg::from).collect();
        self.b.ins().jump(join, &values);
        self.b.switch_to_block(other);
        let values: Vec<BlockArg> = no(state, self)?.into_iter().map(BlockArg::from).collect();
        self.b.ins().jump(join, &values);
        self.b.switch_to_block(join);
        Ok(results)
    }

    /// Calls a precompiled function by its linker name.
    pub(super) fn call(&mut self, name: &'static str, args: &[Value], result: Option<Type>) -> Result<Option<Value>> {
        let callee = match self.imports.get(name) {
            Some(&f) => f,
            None => {
                let mut signature = Signature::new(self.module.isa().default_call_conv());
                signature.params.extend(args.iter().map(|&a| AbiParam::new(self.b.func.dfg.value_type(a))));
                signature.returns.extend(result.map(AbiParam::new));
                let id = self
                    .module
                    .declare_function(name, Linkage::Import, &signature)
                    .map_err(|e| Error::internal(format!("cranelift: {e}")))?;
                let f = self.module.declare_func_in_func(id, self.b.func);
                self.imports.insert(name, f);
                f
            }
        };
        let inst = self.b.ins().call(callee, args);
        Ok(self.b.inst_results(inst).first().copied())
    }
}

fn block_args(first: Value, rest: &[Value]) -> Vec<BlockArg> {
    std::iter::once(first).chain(rest.iter().copied()).map(BlockArg::from).collect()
}
