//! Functions between the program's kernel ABI and the task kernels': they arrange addresses and hand the items on.

use super::GraphCompiler;
use super::emit::Emitter;
use super::jit::{Kernel, Variants};
use crate::error::Result;
use cranelift_codegen::ir::{InstBuilder, Value};

/// Source of an entry of a task kernel's address array; offsets are in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
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

impl Slot {
    fn offset(self) -> i64 {
        match self {
            Slot::Null | Slot::Workspace => 0,
            Slot::Read(_, offset) | Slot::Write(_, offset) => offset,
        }
    }
}

impl GraphCompiler<'_> {
    /// The function that calls task kernel `symbol` with addresses arranged as `slots` say, out of `n_reads` and `n_writes` buffers. It
    /// reads constants where offsets may be others in programs of other shapes.
    pub(super) fn thunk(
        &mut self,
        symbol: &'static str,
        n_reads: usize,
        n_writes: usize,
        slots: &[Slot],
    ) -> Result<Kernel> {
        let key = (symbol, slots.to_vec());
        if let Some(known) = self.thunks.get(&key) {
            return Ok(known.clone());
        }
        let name = format!("task_{}_{symbol}", self.thunks.len());
        let variants = match slots.iter().any(|slot| slot.offset() != 0) {
            true => Variants::OfPrograms,
            false => Variants::None,
        };
        let kernel = self.jit.kernel(&name, variants, |e| {
            let array = e.stack_array(slots.len());
            for (i, &slot) in slots.iter().enumerate() {
                let address = slot_address(e, slot, n_reads, n_writes);
                e.store_word(address, array, i);
            }
            let (descriptor, begin, end) = (e.arg(0), e.begin, e.end);
            e.call_task(symbol, &[descriptor, array, begin, end])
        })?;
        self.thunks.insert(key, kernel.clone());
        Ok(kernel)
    }
}

fn slot_address(e: &mut Emitter, slot: Slot, n_reads: usize, n_writes: usize) -> Value {
    let (argument, offset) = match slot {
        Slot::Null => return e.iconst(0),
        Slot::Workspace => (n_reads + n_writes, 0),
        Slot::Read(n, offset) => (n, offset),
        Slot::Write(n, offset) => (n_reads + n, offset),
    };
    let address = e.arg(argument);
    match offset {
        0 => address,
        _ => e.ins().iadd_imm_s(address, offset),
    }
}
