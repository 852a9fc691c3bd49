//! Rates of devices and links.

use super::work::Work;
use super::{Bytes, Nanos};
use crate::ir::WorkClass;
use gristmill_kernels::Isa;
use gristmill_runtime::DType;
use gristmill_runtime::device::DeviceKind;
use std::collections::BTreeMap;

/// Operations and bytes per second of one thread of the PTX emulator, roughly: any CPU must be
/// predicted to be faster.
const EMULATED_RATE: f64 = 0.3e9;
/// Clock assumed for a CPU whose rates were not measured.
const CPU_HZ: f64 = 3.9e9;
/// Read bandwidth of one core from memory, and of all cores of a server together, bytes per second
/// (measured on Zen 5: 42e9 and 52e9).
const CORE_MEMORY_BANDWIDTH: f64 = 42e9;
const SHARED_MEMORY_BANDWIDTH: f64 = 52e9;
/// Read bandwidth of one core from its second-level cache, bytes per second (measured: 253e9 with AVX-512, 130e9 with 128-bit loads).
const CORE_CACHE_BANDWIDTH: f64 = 130e9;

/// Rates of one logical device.
#[derive(Clone, Debug, PartialEq)]
pub struct DeviceProfile {
    /// CPU, GPU or emulator.
    pub kind: DeviceKind,
    /// Peak `f32` floating-point operations per second of the whole device; a fused multiply-add counts as two.
    pub flops_f32: f64,
    /// Bandwidth of its memory in bytes per second.
    pub memory_bandwidth: f64,
    /// Bandwidth of its cache in bytes per second.
    pub cache_bandwidth: f64,
    /// Clusters whose operands and results fit into this many bytes find them in the cache.
    pub cache_bytes: Bytes,
    /// Time to start one kernel.
    pub launch: Nanos,
    /// Threads that share a kernel.
    pub n_threads: usize,
    /// `f32` lanes of a CPU's vectors, of which kernels fill whole ones; 1 of other devices.
    pub lanes: usize,
    /// Peak operations per second of dtypes where `flops_f32` does not say it.
    pub peaks: BTreeMap<DType, f64>,
    /// Share of the peak of classes where it is not that of our kernels on the CPU: for one dtype, or for all others.
    pub efficiencies: BTreeMap<(WorkClass, Option<DType>), f64>,
}

impl DeviceProfile {
    /// A CPU by instruction set and number of threads.
    pub fn cpu(isa: Isa, n_threads: usize) -> DeviceProfile {
        let lanes = match isa {
            Isa::Portable => 4,
            Isa::Avx2 => 8,
            Isa::Avx512 => 16,
        };
        let n = n_threads.max(1) as f64;
        DeviceProfile {
            kind: DeviceKind::Cpu,
            // Two fused multiply-adds per cycle and lane.
            flops_f32: CPU_HZ * f64::from(lanes) * 4.0 * n,
            memory_bandwidth: (CORE_MEMORY_BANDWIDTH * n).min(SHARED_MEMORY_BANDWIDTH),
            cache_bandwidth: CORE_CACHE_BANDWIDTH * n,
            cache_bytes: Bytes(1 << 20).times(n_threads.max(1) as u64),
            launch: Nanos(if n_threads > 1 { 400 } else { 100 }),
            n_threads: n_threads.max(1),
            lanes: lanes as usize,
            peaks: BTreeMap::new(),
            efficiencies: BTreeMap::new(),
        }
    }

    /// The PTX emulator on `n_threads` threads: every instruction of a kernel takes a good part of a nanosecond, and so does every access.
    pub fn emulator(n_threads: usize) -> DeviceProfile {
        let n = n_threads.max(1) as f64;
        DeviceProfile {
            kind: DeviceKind::Emu,
            flops_f32: EMULATED_RATE * n,
            memory_bandwidth: EMULATED_RATE * n,
            cache_bandwidth: EMULATED_RATE * n,
            launch: Nanos(20_000),
            lanes: 1,
            ..DeviceProfile::cpu(Isa::Portable, n_threads)
        }
    }

    /// The CPU of this machine with `n_threads` threads.
    pub fn this_cpu(n_threads: usize) -> DeviceProfile {
        DeviceProfile::cpu(Isa::current(), n_threads)
    }

    /// Peak operations per second in a dtype. Half types are computed in `f32` unless the profile says more.
    pub fn peak_flops(&self, dtype: DType) -> f64 {
        if let Some(&peak) = self.peaks.get(&dtype) {
            return peak;
        }
        match dtype.size_bytes() {
            8 => self.flops_f32 / 2.0,
            _ => self.flops_f32,
        }
    }

    /// Share of the peak that kernels of a class reach: as the profile says, otherwise as measured
    /// for ours on the CPU, or [`accelerator_share`].
    ///
    /// Contractions in `f32` use packed micro-kernels; other dtypes and the index-bound classes run
    /// generated scalar code. Fused attention takes about the time of its parts or less (measured
    /// at 12 heads of depth 64, faster of two runs: 1.07 of it at 64 keys, 0.97 at 128, 0.76 at
    /// 512), which its number must keep.
    pub fn efficiency(&self, class: WorkClass, dtype: DType) -> f64 {
        let stated = [Some(dtype), None]
            .into_iter()
            .find_map(|d| self.efficiencies.get(&(class, d)));
        if let Some(&share) = stated {
            return share;
        }
        if self.kind != DeviceKind::Cpu {
            return accelerator_share(class);
        }
        match (class, dtype) {
            (WorkClass::MatMul, DType::F32) => 0.85,
            (WorkClass::Conv, DType::F32) => 0.85,
            (WorkClass::Attention, DType::F32) => 0.60,
            (WorkClass::Map | WorkClass::Reduce, DType::F32) => 0.12,
            (class, _) => loop_share(class),
        }
    }

    /// Time that a CPU loses where generated loops compute an op, compared with a kernel for `f32`.
    pub fn loop_penalty(&self, work: &Work) -> Nanos {
        let operations = work.flops as f64 / self.flops_f32;
        let in_loops = operations / loop_share(work.class);
        let by_kernel = operations / self.efficiency(work.class, DType::F32);
        Nanos(((in_loops - by_kernel).max(0.0) * 1e9) as u64)
    }
}

/// Share of a CPU's peak that generated loops over single elements reach.
fn loop_share(class: WorkClass) -> f64 {
    match class {
        WorkClass::MatMul | WorkClass::Conv | WorkClass::Attention => 0.015,
        WorkClass::Map | WorkClass::Reduce | WorkClass::Window => 0.02,
        WorkClass::Gather | WorkClass::Scatter => 0.01,
        WorkClass::Sort | WorkClass::Scan => 0.005,
    }
}

/// Share of the peak that kernels of a class reach on an accelerator whose profile does not say, in every dtype: good libraries, not ours.
pub(crate) fn accelerator_share(class: WorkClass) -> f64 {
    match class {
        WorkClass::MatMul | WorkClass::Conv => 0.6,
        WorkClass::Attention => 0.4,
        WorkClass::Map | WorkClass::Reduce => 0.3,
        WorkClass::Window | WorkClass::Gather | WorkClass::Scatter => 0.1,
        WorkClass::Sort | WorkClass::Scan => 0.02,
    }
}
