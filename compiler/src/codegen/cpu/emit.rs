//! Building blocks of generated functions in Cranelift's terms: index arithmetic, loops, loads and stores, faults, calls.

use super::link::Linker;
use super::pull::{Emit, Ix, Kind, Order};
use crate::error::{Error, Result};
use crate::ir::ScalarOp;
use cranelift_codegen::ir::condcodes::{FloatCC, IntCC};
use cranelift_codegen::ir::{
    AbiParam, Block, BlockArg, Endianness, FuncRef, Function, InstBuilder, MemFlagsData, Signature,
    StackSlotData, StackSlotKind, Type, Value, types,
};
use cranelift_codegen::isa::TargetFrontendConfig;
use cranelift_frontend::{FuncInstBuilder, FunctionBuilder, FunctionBuilderContext};
use gristmill_runtime::{DType, status};
use std::collections::BTreeMap;

/// A function being emitted.
pub(super) struct Emitter<'a> {
    pub(super) b: FunctionBuilder<'a>,
    linker: &'a mut Linker,
    imports: BTreeMap<&'static str, FuncRef>,
    faults: BTreeMap<u32, Block>,
    /// Arguments before that of number 0.
    n_before: usize,
    /// Address of the argument array, first and last item.
    pub(super) args: Value,
    pub(super) begin: Value,
    pub(super) end: Value,
}

/// Consecutive items of a kernel that lie in one row.
pub(super) struct Run {
    /// Number of the row, and column of the first item.
    pub(super) row: Value,
    pub(super) col: Value,
    /// Linear position of the first item.
    pub(super) first: Value,
    pub(super) n: Value,
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
        linker: &'a mut Linker,
    ) -> Emitter<'a> {
        let mut b = FunctionBuilder::new(func, context);
        let entry = b.create_block();
        b.append_block_params_for_function_params(entry);
        b.switch_to_block(entry);
        let params = b.block_params(entry);
        let (args, begin, end) = (params[0], params[1], params[2]);
        Emitter {
            b,
            linker,
            imports: BTreeMap::new(),
            faults: BTreeMap::new(),
            n_before: 0,
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

    /// Instructions are appended to the current block.
    pub(super) fn ins(&mut self) -> FuncInstBuilder<'_, 'a> {
        self.b.ins()
    }

    fn return_status(&mut self, status: u32) {
        let s = self.ins().iconst(types::I32, i64::from(status));
        self.ins().return_(&[s]);
    }

    /// Address of the first argument; those behind it are numbered from 0 then.
    pub(super) fn take_first_arg(&mut self) -> Value {
        let first = self.arg(0);
        self.n_before += 1;
        first
    }

    /// Address of argument `i`.
    pub(super) fn arg(&mut self, i: usize) -> Value {
        let (args, offset) = (self.args, ((self.n_before + i) * 8) as i32);
        self.ins()
            .load(types::I64, MemFlagsData::trusted(), args, offset)
    }

    pub(super) fn iconst(&mut self, v: i64) -> Value {
        self.ins().iconst(types::I64, v)
    }

    fn address(&mut self, dtype: DType, base: Value, at: Ix<Value>) -> (Value, i32) {
        let size = dtype.size_bytes() as i64;
        match at {
            Ix::C(c) => match i32::try_from(c.wrapping_mul(size)) {
                Ok(offset) => (base, offset),
                Err(_) => (self.ins().iadd_imm_s(base, c.wrapping_mul(size)), 0),
            },
            Ix::V(v) => {
                let bytes = if size == 1 {
                    v
                } else {
                    self.ins().ishl_imm_s(v, i64::from(size.trailing_zeros()))
                };
                (self.ins().iadd(base, bytes), 0)
            }
        }
    }

    /// Loads a register of lanes from any address.
    pub(super) fn load_lanes(&mut self, ty: Type, address: Value, offset: i32) -> Value {
        let loaded_as = self.linker.load_type(ty);
        let flags = MemFlagsData::new();
        let loaded = self
            .ins()
            .load(loaded_as, flags.with_notrap(), address, offset);
        match loaded_as == ty {
            true => loaded,
            false => {
                let flags = flags.with_endianness(Endianness::Little);
                self.ins().bitcast(ty, flags, loaded)
            }
        }
    }

    fn blocks<const N: usize>(&mut self) -> [Block; N] {
        std::array::from_fn(|_| self.b.create_block())
    }

    /// `while i < end`; the body gives the next `i` and carried values. Gives the last carried values.
    pub(super) fn while_less(
        &mut self,
        start: Value,
        end: Value,
        carried: &[Value],
        body: impl FnOnce(&mut Self, Value, &[Value]) -> Result<(Value, Vec<Value>)>,
    ) -> Result<Vec<Value>> {
        let [head, inside, exit] = self.blocks();
        let i = self.b.append_block_param(head, types::I64);
        let mut state = Vec::with_capacity(carried.len());
        for &value in carried {
            let ty = self.b.func.dfg.value_type(value);
            state.push(self.b.append_block_param(head, ty));
        }
        self.iterate(head, start, carried);
        self.b.switch_to_block(head);
        let more = self.ins().icmp(IntCC::SignedLessThan, i, end);
        self.ins().brif(more, inside, &[], exit, &[]);
        self.b.switch_to_block(inside);
        let (next, carried) = body(self, i, &state)?;
        self.iterate(head, next, &carried);
        self.b.switch_to_block(exit);
        Ok(state)
    }

    /// Jumps to the head of a loop with the next index and carried values.
    fn iterate(&mut self, head: Block, index: Value, carried: &[Value]) {
        let values = [index].into_iter().chain(carried.iter().copied());
        let args: Vec<BlockArg> = values.map(BlockArg::from).collect();
        self.ins().jump(head, &args);
    }

    /// Emits `body` for the runs that the kernel's items are, in rows of `width` items.
    pub(super) fn rows(
        &mut self,
        width: usize,
        body: impl FnOnce(&mut Self, &Run) -> Result<()>,
    ) -> Result<()> {
        let (begin, end) = (self.begin, self.end);
        let (row, col) = self.div_rem(Ix::V(begin), width);
        let (row, col) = (self.val(row), self.val(col));
        self.while_less(begin, end, &[row, col], |e, first, carried| {
            let run = e.run(first, carried, width);
            body(e, &run)?;
            let next = e.ins().iadd(first, run.n);
            let (row, zero) = (e.ins().iadd_imm_s(run.row, 1), e.iconst(0));
            Ok((next, vec![row, zero]))
        })?;
        Ok(())
    }

    /// The run that begins at item `first`, whose row and column are carried.
    fn run(&mut self, first: Value, carried: &[Value], width: usize) -> Run {
        let (row, col, end) = (carried[0], carried[1], self.end);
        let width = self.iconst(width as i64);
        let in_row = self.ins().isub(width, col);
        let in_range = self.ins().isub(end, first);
        let n = self.ins().umin(in_row, in_range);
        Run { row, col, first, n }
    }

    /// Calls a precompiled function by its linker name.
    pub(super) fn call(
        &mut self,
        name: &'static str,
        args: &[Value],
        result: Option<Type>,
    ) -> Result<Option<Value>> {
        let callee = match self.imports.get(name) {
            Some(&callee) => callee,
            None => self.import(name, args, result),
        };
        let inst = self.ins().call(callee, args);
        Ok(self.b.inst_results(inst).first().copied())
    }

    /// Calls a precompiled function that has a result.
    pub(super) fn call_for(
        &mut self,
        result: Type,
        name: &'static str,
        args: &[Value],
    ) -> Result<Value> {
        let value = self.call(name, args, Some(result))?;
        value.ok_or_else(|| Error::internal(format!("{name} has no result")))
    }

    /// Calls a task kernel; the function returns when the kernel refuses its descriptor, or what it reads.
    pub(super) fn call_task(&mut self, name: &'static str, args: &[Value]) -> Result<()> {
        let failed = self.call_for(types::I32, name, args)?;
        let [fault, next] = self.blocks();
        self.b.set_cold_block(fault);
        self.ins().brif(failed, fault, &[], next, &[]);
        self.b.switch_to_block(fault);
        let status = self.status_of_task(failed);
        self.ins().return_(&[status]);
        self.b.switch_to_block(next);
        Ok(())
    }

    /// The status that stands for a failure of a task kernel.
    fn status_of_task(&mut self, failed: Value) -> Value {
        let out_of_range = i64::from(gristmill_kernels::OUT_OF_RANGE);
        let is_index = self.ins().icmp_imm_s(IntCC::Equal, failed, out_of_range);
        let statuses = [status::INDEX_OUT_OF_RANGE, status::BAD_DESCRIPTOR];
        let [index, other] = statuses.map(i64::from);
        let index = self.ins().iconst(types::I32, index);
        let other = self.ins().iconst(types::I32, other);
        self.ins().select(is_index, index, other)
    }

    /// Declares a precompiled function with the types of `args`.
    fn import(&mut self, name: &'static str, args: &[Value], result: Option<Type>) -> FuncRef {
        let mut signature = Signature::new(self.linker.isa.default_call_conv());
        let types = args.iter().map(|&a| self.b.func.dfg.value_type(a));
        signature.params.extend(types.map(AbiParam::new));
        signature.returns.extend(result.map(AbiParam::new));
        let callee = self.linker.import(name, signature, self.b.func);
        self.imports.insert(name, callee);
        callee
    }

    /// Address of an array of `n` words on the stack.
    pub(super) fn stack_array(&mut self, n: usize) -> Value {
        let bytes = (n * 8) as u32;
        let slot = StackSlotData::new(StackSlotKind::ExplicitSlot, bytes, 3);
        let slot = self.b.create_sized_stack_slot(slot);
        self.ins().stack_addr(types::I64, slot, 0)
    }

    /// Stores word `i` of an array on the stack.
    pub(super) fn store_word(&mut self, word: Value, array: Value, i: usize) {
        let offset = (i * 8) as i32;
        self.ins()
            .store(MemFlagsData::trusted(), word, array, offset);
    }

    /// Emits one side of a branch, which ends at `join` with its values.
    fn side<S>(
        &mut self,
        [block, join]: [Block; 2],
        state: &mut S,
        body: impl FnOnce(&mut S, &mut Self) -> Result<Vec<Value>>,
    ) -> Result<()> {
        self.b.switch_to_block(block);
        let values = body(state, self)?;
        let values: Vec<BlockArg> = values.into_iter().map(BlockArg::from).collect();
        self.ins().jump(join, &values);
        Ok(())
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
            self.ins().udiv(a, b)
        } else {
            self.ins().sdiv(a, b)
        }
    }

    fn is_nan(&mut self, x: Value) -> Value {
        self.ins().fcmp(FloatCC::Unordered, x, x)
    }

    fn is_number(&mut self, x: Value) -> Value {
        self.ins().fcmp(FloatCC::Ordered, x, x)
    }

    fn choose(&mut self, condition: Value, yes: Value, no: Value) -> Value {
        self.ins().select(condition, yes, no)
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
        self.ins().uextend(types::I64, x)
    }

    fn index_add(&mut self, a: Value, b: Value) -> Value {
        self.ins().iadd(a, b)
    }

    fn index_add_const(&mut self, a: Value, b: i64) -> Value {
        self.ins().iadd_imm_s(a, b)
    }

    fn index_sub(&mut self, a: Value, b: Value) -> Value {
        self.ins().isub(a, b)
    }

    fn index_neg(&mut self, a: Value) -> Value {
        self.ins().ineg(a)
    }

    fn index_mul(&mut self, a: Value, b: Value) -> Value {
        self.ins().imul(a, b)
    }

    fn index_mul_const(&mut self, a: Value, b: i64) -> Value {
        self.ins().imul_imm_s(a, b)
    }

    fn index_div(&mut self, a: Value, b: Value) -> Value {
        // A negative dividend is a huge unsigned one, whose quotient no extent reaches.
        self.ins().udiv(a, b)
    }

    fn index_div_const(&mut self, a: Value, b: i64) -> Value {
        self.ins().udiv_imm_s(a, b)
    }

    fn index_min(&mut self, a: Value, b: Value) -> Value {
        self.ins().smin(a, b)
    }

    fn index_max(&mut self, a: Value, b: Value) -> Value {
        self.ins().smax(a, b)
    }

    fn index_compare(&mut self, order: Order, a: Value, b: Value) -> Value {
        let condition = match order {
            Order::Less => IntCC::SignedLessThan,
            Order::AtLeast => IntCC::SignedGreaterThanOrEqual,
            // A negative position is a large unsigned one.
            Order::Within => IntCC::UnsignedLessThan,
            Order::Equal => IntCC::Equal,
        };
        self.ins().icmp(condition, a, b)
    }

    fn load(&mut self, dtype: DType, buffer: Value, at: Ix<Value>) -> Value {
        let (address, offset) = self.address(dtype, buffer, at);
        self.ins().load(
            clif_type(dtype),
            MemFlagsData::new().with_notrap(),
            address,
            offset,
        )
    }

    fn store(&mut self, dtype: DType, value: Value, buffer: Value, at: Ix<Value>) {
        let (address, offset) = self.address(dtype, buffer, at);
        self.ins()
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
        self.ins().brif(condition, fault, &[], next, &[]);
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
        self.while_less(start, end, carried, |e, i, state| {
            let carried = body(e, i, state)?;
            Ok((e.ins().iadd_imm_s(i, step), carried))
        })
    }

    fn branch<S>(
        &mut self,
        condition: Value,
        kinds: &[Kind],
        state: &mut S,
        yes: impl FnOnce(&mut S, &mut Self) -> Result<Vec<Value>>,
        no: impl FnOnce(&mut S, &mut Self) -> Result<Vec<Value>>,
    ) -> Result<Vec<Value>> {
        let [then, other, join] = self.blocks();
        let mut results = Vec::with_capacity(kinds.len());
        for kind in kinds {
            let ty = match kind {
                Kind::Element(dtype) => clif_type(*dtype),
                Kind::Index => types::I64,
            };
            results.push(self.b.append_block_param(join, ty));
        }
        self.ins().brif(condition, then, &[], other, &[]);
        self.side([then, join], state, yes)?;
        self.side([other, join], state, no)?;
        self.b.switch_to_block(join);
        Ok(results)
    }
}
