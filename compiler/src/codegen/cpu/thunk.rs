//! Functions between the program's kernel ABI and the task kernels': they arrange addresses and hand the items on.

use super::Session;
use super::pull::Emit;
use crate::error::Result;
use cranelift_codegen::ir::{InstBuilder, MemFlagsData, StackSlotData, StackSlotKind, types};
use cranelift_module::FuncId;
use gristmill_runtime::status;
use std::fmt::Write;

/// What an entry of a task kernel's address array is made from; offsets are in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Slot {
    /// Absent.
    Null,
    /// This thread's workspace.
    Workspace,
    /// Buffer that is read, by number. Number 0 is the descriptor.
    Read(usize, i64),
    /// Buffer that is written, by number.
    Write(usize, i64),
}

impl Session<'_> {
    /// The function that calls task kernel `symbol` with addresses arranged as `slots` say, out of `n_reads` and `n_writes` buffers.
    pub(super) fn thunk(
        &mut self,
        symbol: &'static str,
        n_reads: usize,
        n_writes: usize,
        slots: &[Slot],
    ) -> Result<FuncId> {
        let key = key(symbol, slots);
        if let Some(&function) = self.thunks.get(&key) {
            return Ok(function);
        }
        let name = format!("task_{}_{symbol}", self.thunks.len());
        let function = self.jit.kernel(&name, |e| {
            let bytes = (slots.len() * 8) as u32;
            let array = e.b.create_sized_stack_slot(StackSlotData::new(
                StackSlotKind::ExplicitSlot,
                bytes,
                3,
            ));
            let base = e.b.ins().stack_addr(types::I64, array, 0);
            for (i, slot) in slots.iter().enumerate() {
                let (argument, offset) = match *slot {
                    Slot::Null => (None, 0),
                    Slot::Workspace => (Some(n_reads + n_writes), 0),
                    Slot::Read(n, offset) => (Some(n), offset),
                    Slot::Write(n, offset) => (Some(n_reads + n), offset),
                };
                let mut address = match argument {
                    Some(n) => e.arg(n),
                    None => e.iconst(0),
                };
                if offset != 0 {
                    address = e.b.ins().iadd_imm_s(address, offset);
                }
                e.b.ins()
                    .store(MemFlagsData::trusted(), address, base, (i * 8) as i32);
            }
            let descriptor = e.arg(0);
            let (begin, end) = (e.begin, e.end);
            let failed = e.call(symbol, &[descriptor, base, begin, end], Some(types::I32))?;
            e.fault_if(
                failed.expect("declared with a result"),
                status::BAD_DESCRIPTOR,
            );
            Ok(())
        })?;
        self.thunks.insert(key, function);
        Ok(function)
    }
}

fn key(symbol: &str, slots: &[Slot]) -> String {
    let mut key = symbol.to_owned();
    for slot in slots {
        let _ = write!(key, " {slot:?}");
    }
    key
}
