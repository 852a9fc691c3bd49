//! Blocks of kernels: how many threads share a program is known only where it runs, so the sizes of blocks, the number of items and the
//! workspaces that depend on it are chosen there, by [`Program::divide`], for programs from a compiler and from a file alike.

use super::{BufferId, Loc, Partition, Program, Step, StepKind};
use crate::error::Error;
use crate::tensor::Tensor;
use gristmill_kernels::{Blocked, Division};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Estimated time in ns below which a part of a kernel is not worth a thread.
pub const SERIAL_NS: u64 = 3_000;

/// A kernel that works by blocks, on a step that calls it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Blocks {
    /// The kernel, whose descriptor the blocks are a part of.
    pub kind: Blocked,
    /// The argument that is the descriptor: a constant that is nothing else.
    pub descriptor: u32,
    /// Estimated time of all items on one thread.
    pub cost_ns: u64,
}

/// Fewest of `items` items, which take `cost_ns` on one thread, that are worth giving to a thread; 0 when no split is.
pub fn grain(items: u64, cost_ns: u64) -> u64 {
    if cost_ns < 2 * SERIAL_NS || items < 2 {
        return 0;
    }
    ((u128::from(items) * u128::from(SERIAL_NS) / u128::from(cost_ns)) as u64).max(1)
}

/// A step's blocks for a number of threads.
struct Divided {
    constant: usize,
    /// Where the blocks differ from those in the program.
    descriptor: Option<Tensor>,
    division: Division,
    grain: u64,
}

impl Program {
    /// Chooses the blocks of all kernels, those of sub-programs too, for `n_threads` threads of each device.
    ///
    /// Errors with `Internal` for a program that [`Program::validate`] refuses.
    pub fn divide(&mut self, n_threads: usize) -> Result<(), Error> {
        self.partitions
            .iter_mut()
            .try_for_each(|p| p.divide(n_threads))
    }

    /// The same of a program that others may hold: they keep theirs.
    pub(crate) fn divided(mut self: Arc<Program>, n_threads: usize) -> Result<Arc<Program>, Error> {
        if !self.is_divided(n_threads)? {
            Arc::make_mut(&mut self).divide(n_threads)?;
        }
        Ok(self)
    }

    fn is_divided(&self, n_threads: usize) -> Result<bool, Error> {
        for partition in &self.partitions {
            for step in &partition.steps {
                let is_same = match partition.division(step, n_threads)? {
                    Some(found) => found.is_in(partition, step),
                    None => step
                        .kind
                        .sub_programs()
                        .into_iter()
                        .try_fold(true, |is_same, body| {
                            Ok::<_, Error>(is_same && body.is_divided(n_threads)?)
                        })?,
                };
                if !is_same {
                    return Ok(false);
                }
            }
        }
        Ok(true)
    }
}

fn bodies_mut(kind: &mut StepKind) -> Vec<&mut Arc<Program>> {
    match kind {
        StepKind::If(s) => vec![&mut s.then_branch, &mut s.else_branch],
        StepKind::Loop(s) => vec![&mut s.body],
        _ => vec![],
    }
}

impl Divided {
    fn is_in(&self, partition: &Partition, step: &Step) -> bool {
        let StepKind::Kernel { kernel, items, .. } = &step.kind else {
            return false;
        };
        let kernel = &partition.kernels[kernel.0 as usize];
        self.descriptor.is_none()
            && *items == self.division.items as u64
            && kernel.workspace_bytes_per_thread() >= self.division.workspace_bytes
    }
}

impl Partition {
    fn divide(&mut self, n_threads: usize) -> Result<(), Error> {
        let mut workspaces = vec![0; self.kernels.len()];
        for i in 0..self.steps.len() {
            let divided = self.division(&self.steps[i], n_threads)?;
            for body in bodies_mut(&mut self.steps[i].kind) {
                *body = std::mem::take(body).divided(n_threads)?;
            }
            let (
                Some(found),
                StepKind::Kernel {
                    kernel,
                    items,
                    grain,
                    ..
                },
            ) = (divided, &mut self.steps[i].kind)
            else {
                continue;
            };
            (*items, *grain) = (found.division.items as u64, found.grain);
            if let Some(descriptor) = found.descriptor {
                self.constants[found.constant] = descriptor;
            }
            let index = kernel.0 as usize;
            workspaces[index] = found.division.workspace_bytes.max(workspaces[index]);
            if let super::Kernel::Cpu(kernel) = &mut self.kernels[index] {
                kernel.workspace_bytes_per_thread = workspaces[index];
            }
        }
        Ok(())
    }

    /// The blocks of a step for a number of threads; `None` for a step without.
    fn division(&self, step: &Step, n_threads: usize) -> Result<Option<Divided>, Error> {
        let StepKind::Kernel { args, .. } = &step.kind else {
            return Ok(None);
        };
        let Some(blocks) = self.blocks_of(step) else {
            return Ok(None);
        };
        let malformed = || Error::internal("no descriptor").at(&step.origin);
        let buffer = args.get(blocks.descriptor as usize);
        let constant = buffer.and_then(|&id| self.constant_of(id));
        let constant = constant.ok_or_else(malformed)?;
        let held = self.constants.get(constant).ok_or_else(malformed)?;
        let mut bytes = held.as_bytes().to_vec();
        let division = blocks.kind.divide(&mut bytes, n_threads);
        let division = division.ok_or_else(malformed)?;
        let is_new = bytes != held.as_bytes();
        let made = is_new.then(|| Tensor::from_bytes(held.dtype(), held.shape(), &bytes));
        Ok(Some(Divided {
            constant,
            descriptor: made.transpose()?,
            division,
            grain: grain(division.items as u64, blocks.cost_ns),
        }))
    }

    /// A problem with the descriptors of kernels that work by blocks: each is a constant of the kind's size and sense, and no step uses it
    /// for something else.
    pub(super) fn check_blocks(&self) -> Result<(), String> {
        let kinds = self.descriptors()?;
        for (i, step) in self.steps.iter().enumerate() {
            let blocks = self.blocks_of(step);
            let (reads, writes) = step.kind.accesses();
            for (arg, id) in reads.iter().chain(&writes).enumerate() {
                let own = blocks.filter(|b| b.descriptor as usize == arg);
                let constant = self.constant_of(*id).and_then(|c| kinds.get(&c));
                if constant.is_some_and(|&kind| own.is_none_or(|b| b.kind != kind)) {
                    let origin = &step.origin;
                    return Err(format!("step {i} ({origin}): uses a descriptor as data"));
                }
            }
        }
        Ok(())
    }

    /// The constants that are descriptors of kernels that work by blocks, with their kinds.
    fn descriptors(&self) -> Result<BTreeMap<usize, Blocked>, String> {
        let mut kinds = BTreeMap::new();
        for (i, step) in self.steps.iter().enumerate() {
            let divided = self.division(step, 1);
            let divided = divided.map_err(|e| format!("step {i} ({}): {e}", step.origin))?;
            if let (Some(divided), Some(blocks)) = (divided, self.blocks_of(step)) {
                kinds.insert(divided.constant, blocks.kind);
            }
        }
        Ok(kinds)
    }

    fn blocks_of(&self, step: &Step) -> Option<Blocks> {
        match &step.kind {
            StepKind::Kernel { kernel, .. } => self.kernels.get(kernel.0 as usize)?.blocks(),
            _ => None,
        }
    }

    fn constant_of(&self, id: BufferId) -> Option<usize> {
        match self.buffers.get(id.0 as usize)?.loc {
            Loc::Constant(c) => Some(c as usize),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DType;
    use crate::device::{DeviceKind, DeviceName};
    use crate::program::{Buffer, CpuKernel, IoSpec, Kernel, KernelId};
    use crate::text::Function;
    use gristmill_kernels::gemm::GemmDesc;
    use gristmill_kernels::{Descriptor, Isa};

    unsafe extern "C" fn nothing(_: *const *mut u8, _: u64, _: u64) -> u32 {
        0
    }

    fn product() -> Program {
        let desc = GemmDesc::new(Isa::Portable, 512, 512, 512);
        let bytes = desc.bytes();
        let kernel = CpuKernel {
            name: "gm_gemm_f32".into(),
            // SAFETY: the kernel touches nothing.
            function: unsafe { Function::of_process(nothing) },
            workspace_bytes_per_thread: 0,
            blocks: Some(Blocks {
                kind: Blocked::Gemm,
                descriptor: 0,
                cost_ns: 1_600_000,
            }),
        };
        let buffer = |name: &str, dtype, shape: &[usize], loc| Buffer {
            name: name.into(),
            dtype,
            shape: shape.into(),
            loc,
        };
        let kind = StepKind::Kernel {
            kernel: KernelId(0),
            args: vec![BufferId(0), BufferId(1), BufferId(2)],
            n_outputs: 1,
            items: 1,
            grain: 0,
        };
        let partition = Partition {
            device: DeviceName::local(DeviceKind::Cpu, 0),
            arena_bytes: 0,
            buffers: vec![
                buffer("#desc", DType::U8, &[bytes.len()], Loc::Constant(0)),
                buffer("x", DType::F32, &[512, 512], Loc::Input(0)),
                buffer("y", DType::F32, &[512, 512], Loc::Output(0)),
            ],
            constants: vec![Tensor::from_bytes(DType::U8, &[bytes.len()], bytes).unwrap()],
            kernels: vec![Kernel::Cpu(kernel)],
            gpu_code: vec![],
            steps: vec![Step {
                kind,
                origin: "/product".into(),
                deps: vec![],
            }],
            memory_limit: None,
        };
        let spec = |name: &str| IoSpec::new(name, DType::F32, &[512, 512]);
        Program {
            name: "p".into(),
            inputs: vec![spec("x")],
            outputs: vec![spec("y")],
            variables: vec![],
            partitions: vec![partition],
        }
    }

    fn split(p: &Program) -> (u64, u64) {
        let StepKind::Kernel { items, grain, .. } = p.partitions[0].steps[0].kind else {
            panic!("a kernel");
        };
        (items, grain)
    }

    #[test]
    fn blocks_are_chosen_for_a_number_of_threads() {
        let mut one = product();
        one.divide(1).unwrap();
        let shared = Arc::new(one);
        let eight = shared.clone().divided(8).unwrap();
        assert!(
            split(&eight).0 >= 8 && split(&eight).1 >= 1,
            "{:?}",
            split(&eight)
        );
        assert!(split(&shared).0 < split(&eight).0, "others keep theirs");
        assert!(Arc::ptr_eq(&eight, &eight.clone().divided(8).unwrap()));
        let mut back = (*eight).clone();
        back.divide(1).unwrap();
        assert_eq!(split(&back), split(&shared));
        assert_eq!(
            back.partitions[0].constants[0].as_bytes(),
            shared.partitions[0].constants[0].as_bytes()
        );
        assert_eq!(grain(1000, 2 * SERIAL_NS - 1), 0);
        assert_eq!(grain(1000, 1_000_000), 3);
    }

    /// The only violation after a change.
    fn violation(change: impl FnOnce(&mut Partition)) -> String {
        let mut p = product();
        change(&mut p.partitions[0]);
        let violations = p.validate();
        assert_eq!(violations.len(), 1, "{violations:?}");
        violations[0].clone()
    }

    #[test]
    fn descriptors_are_validated() {
        assert_eq!(product().validate(), Vec::<String>::new());
        let nonsense = violation(|p| {
            let n = p.constants[0].size_bytes();
            p.constants[0] = Tensor::from_bytes(DType::U8, &[n], &vec![255; n]).unwrap();
        });
        assert!(nonsense.contains("no descriptor"), "{nonsense}");
        let not_constant = violation(|p| {
            let Kernel::Cpu(kernel) = &mut p.kernels[0] else {
                panic!("a CPU's")
            };
            kernel.blocks = kernel.blocks.map(|b| Blocks { descriptor: 1, ..b });
        });
        assert!(not_constant.contains("no descriptor"), "{not_constant}");
        let data = violation(|p| {
            let StepKind::Kernel { args, .. } = &mut p.steps[0].kind else {
                panic!("a kernel")
            };
            args.insert(1, BufferId(0));
        });
        assert!(data.contains("uses a descriptor as data"), "{data}");
    }
}
