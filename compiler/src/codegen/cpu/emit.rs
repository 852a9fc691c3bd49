//! Building blocks of generated functions in Cranelift's terms: index arithmetic, loops, loads and stores, faults, calls.

use super::pull::{Emit, Ix, Kind, Order};
use crate::error::{Error, Result};
use crate::ir::ScalarOp;
use cranelift_codegen::ir::condcodes::{FloatCC, IntCC};
use cranelift_codegen::ir::{
    AbiParam, Block, BlockArg, FuncRef, Function, InstBuilder, MemFlagsData, Signature, Type,
    Value, types,
};
use cranelift_codegen::isa::TargetFrontendConfig;
use cranelift_frontend::{FunctionBuilder, FunctionBuilderContext};
use cranelift_jit::JITModule;
use cranelift_module::{Linkage, Module};
use gristmill_runtime::DType;
use std::collections::BTreeMap;

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

/// Register type of an element. Narrow floats are held as their bits.
pub(super) fn clif_type(dtype: DType) -> Type {
    match dtype {
        DType::F32 => types::F32,
        DType::F64 => types::F64,
        DType::F16 | DType::BF16 | DType::I16 | DType::U16 => types::I16,
        DType::I32 | DType::U32 => types::I32,
        DType::I64 | DType::U64 => types::I64,
        _ => types::I8,
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
        Emitter {
            b,
            module,
            imports: BTreeMap::new(),
            faults: BTreeMap::new(),
            args,
            begin,
            end,
        }
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

    /// Address of argument `i`.
    pub(super) fn arg(&mut self, i: usize) -> Value {
        self.b.ins().load(
            types::I64,
            MemFlagsData::trusted(),
            self.args,
            (i * 8) as i32,
        )
    }

    pub(super) fn iconst(&mut self, v: i64) -> Value {
        self.b.ins().iconst(types::I64, v)
    }

    fn address(&mut self, dtype: DType, base: Value, at: Ix<Value>) -> (Value, i32) {
        let size = dtype.size_bytes() as i64;
        match at {
            Ix::C(c) => match i32::try_from(c.wrapping_mul(size)) {
                Ok(offset) => (base, offset),
                Err(_) => (self.b.ins().iadd_imm_s(base, c.wrapping_mul(size)), 0),
            },
            Ix::V(v) => {
                let bytes = if size == 1 {
                    v
                } else {
                    self.b.ins().ishl_imm_s(v, i64::from(size.trailing_zeros()))
                };
                (self.b.ins().iadd(base, bytes), 0)
            }
        }
    }

    /// `while i < end`; the body gives the next `i` and carried values.
    pub(super) fn while_less(
        &mut self,
        start: Value,
        end: Value,
        carried: &[Value],
        body: impl FnOnce(&mut Self, Value, &[Value]) -> Result<(Value, Vec<Value>)>,
    ) -> Result<()> {
        let (head, inside, exit) = (
            self.b.create_block(),
            self.b.create_block(),
            self.b.create_block(),
        );
        let i = self.b.append_block_param(head, types::I64);
        let state: Vec<Value> = carried
            .iter()
            .map(|_| self.b.append_block_param(head, types::I64))
            .collect();
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

    /// Calls a precompiled function by its linker name.
    pub(super) fn call(
        &mut self,
        name: &'static str,
        args: &[Value],
        result: Option<Type>,
    ) -> Result<Option<Value>> {
        let callee = match self.imports.get(name) {
            Some(&f) => f,
            None => {
                let mut signature = Signature::new(self.module.isa().default_call_conv());
                signature.params.extend(
                    args.iter()
                        .map(|&a| AbiParam::new(self.b.func.dfg.value_type(a))),
                );
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

impl Emit for Emitter<'_> {
    type Value = Value;

    fn constant(&mut self, dtype: DType, bits: u64) -> Value {
        self.scalar_constant(dtype, bits)
    }

    fn primitive(&mut self, op: ScalarOp, from: DType, to: DType, args: &[Value]) -> Result<Value> {
        self.scalar_primitive(op, from, to, args)
    }

    fn quotient(&mut self, dtype: DType, a: Value, b: Value) -> Value {
        if dtype == DType::U64 {
            self.b.ins().udiv(a, b)
        } else {
            self.b.ins().sdiv(a, b)
        }
    }

    fn is_nan(&mut self, x: Value) -> Value {
        self.b.ins().fcmp(FloatCC::Unordered, x, x)
    }

    fn is_number(&mut self, x: Value) -> Value {
        self.b.ins().fcmp(FloatCC::Ordered, x, x)
    }

    fn choose(&mut self, condition: Value, yes: Value, no: Value) -> Value {
        self.b.ins().select(condition, yes, no)
    }

    fn index(&mut self, i: i64) -> Value {
        self.iconst(i)
    }

    fn index_to_i64(&mut self, i: Value) -> Value {
        i
    }

    fn i64_to_index(&mut self, x: Value) -> Value {
        x
    }

    fn truth_to_index(&mut self, x: Value) -> Value {
        self.b.ins().uextend(types::I64, x)
    }

    fn index_add(&mut self, a: Value, b: Value) -> Value {
        self.b.ins().iadd(a, b)
    }

    fn index_add_const(&mut self, a: Value, b: i64) -> Value {
        self.b.ins().iadd_imm_s(a, b)
    }

    fn index_sub(&mut self, a: Value, b: Value) -> Value {
        self.b.ins().isub(a, b)
    }

    fn index_neg(&mut self, a: Value) -> Value {
        self.b.ins().ineg(a)
    }

    fn index_mul(&mut self, a: Value, b: Value) -> Value {
        self.b.ins().imul(a, b)
    }

    fn index_mul_const(&mut self, a: Value, b: i64) -> Value {
        self.b.ins().imul_imm_s(a, b)
    }

    fn index_div(&mut self, a: Value, b: Value) -> Value {
        // A negative dividend is a huge unsigned one, whose quotient no extent reaches.
        self.b.ins().udiv(a, b)
    }

    fn index_div_const(&mut self, a: Value, b: i64) -> Value {
        self.b.ins().udiv_imm_s(a, b)
    }

    fn index_min(&mut self, a: Value, b: Value) -> Value {
        self.b.ins().smin(a, b)
    }

    fn index_max(&mut self, a: Value, b: Value) -> Value {
        self.b.ins().smax(a, b)
    }

    fn index_compare(&mut self, order: Order, a: Value, b: Value) -> Value {
        let condition = match order {
            Order::Less => IntCC::SignedLessThan,
            Order::AtLeast => IntCC::SignedGreaterThanOrEqual,
            // A negative position is a large unsigned one.
            Order::Within => IntCC::UnsignedLessThan,
            Order::Equal => IntCC::Equal,
        };
        self.b.ins().icmp(condition, a, b)
    }

    fn load(&mut self, dtype: DType, buffer: Value, at: Ix<Value>) -> Value {
        let (address, offset) = self.address(dtype, buffer, at);
        self.b.ins().load(
            clif_type(dtype),
            MemFlagsData::new().with_notrap(),
            address,
            offset,
        )
    }

    fn store(&mut self, dtype: DType, value: Value, buffer: Value, at: Ix<Value>) {
        let (address, offset) = self.address(dtype, buffer, at);
        self.b
            .ins()
            .store(MemFlagsData::new().with_notrap(), value, address, offset);
    }

    fn fault_if(&mut self, condition: Value, status: u32) {
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

    fn for_loop(
        &mut self,
        start: Ix<Value>,
        end: Ix<Value>,
        step: i64,
        carried: &[Value],
        body: impl FnOnce(&mut Self, Value, &[Value]) -> Result<Vec<Value>>,
    ) -> Result<Vec<Value>> {
        let (start, end) = (self.val(start), self.val(end));
        let (head, inside, exit) = (
            self.b.create_block(),
            self.b.create_block(),
            self.b.create_block(),
        );
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

    fn branch<S>(
        &mut self,
        condition: Value,
        kinds: &[Kind],
        state: &mut S,
        yes: impl FnOnce(&mut S, &mut Self) -> Result<Vec<Value>>,
        no: impl FnOnce(&mut S, &mut Self) -> Result<Vec<Value>>,
    ) -> Result<Vec<Value>> {
        let (then, other, join) = (
            self.b.create_block(),
            self.b.create_block(),
            self.b.create_block(),
        );
        let ty = |kind: &Kind| match kind {
            Kind::Element(dtype) => clif_type(*dtype),
            Kind::Index => types::I64,
        };
        let results: Vec<Value> = kinds
            .iter()
            .map(|k| self.b.append_block_param(join, ty(k)))
            .collect();
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
}

fn block_args(first: Value, rest: &[Value]) -> Vec<BlockArg> {
    std::iter::once(first)
        .chain(rest.iter().copied())
        .map(BlockArg::from)
        .collect()
}
