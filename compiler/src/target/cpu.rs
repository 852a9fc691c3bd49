//! The CPU that code is made for.

use crate::error::{Error, Result};
use crate::nearest::unknown;
use gristmill_kernels::Isa;
use std::fmt;

/// The CPU that code is made for: generated functions use no instruction that it lacks, kernels that
/// are given an instruction set are given its own, and weights are packed for it.
///
/// Kernels that detect the CPU when they run (vector math, copies of views) still use all of its
/// instructions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum TargetCpu {
    /// This machine's CPU.
    #[default]
    Native,
    /// A level of the x86-64 psABI.
    X86_64(Level),
}

/// Levels of x86-64, as the psABI numbers them. Code for the first, which lacks SSE4.1, is not generated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Level {
    /// SSE4.2 and POPCNT.
    V2,
    /// AVX2, BMI, F16C and FMA.
    V3,
    /// AVX-512 F, BW, DQ and VL.
    V4,
}

const V2: &[&str] = &[
    "has_sse3",
    "has_ssse3",
    "has_cmpxchg16b",
    "has_sse41",
    "has_sse42",
    "has_popcnt",
];
const V3: &[&str] = &[
    "has_sse3",
    "has_ssse3",
    "has_cmpxchg16b",
    "has_sse41",
    "has_sse42",
    "has_popcnt",
    "has_avx",
    "has_avx2",
    "has_bmi1",
    "has_bmi2",
    "has_fma",
    "has_lzcnt",
];
const V4: &[&str] = &[
    "has_sse3",
    "has_ssse3",
    "has_cmpxchg16b",
    "has_sse41",
    "has_sse42",
    "has_popcnt",
    "has_avx",
    "has_avx2",
    "has_bmi1",
    "has_bmi2",
    "has_fma",
    "has_lzcnt",
    "has_avx512f",
    "has_avx512dq",
    "has_avx512vl",
];

impl TargetCpu {
    const NAMED: [(&'static str, TargetCpu); 4] = [
        ("native", TargetCpu::Native),
        ("x86-64-v2", TargetCpu::X86_64(Level::V2)),
        ("x86-64-v3", TargetCpu::X86_64(Level::V3)),
        ("x86-64-v4", TargetCpu::X86_64(Level::V4)),
    ];

    /// The target of a name: `native`, `x86-64-v2`, `x86-64-v3` or `x86-64-v4`.
    pub fn parse(name: &str) -> Result<TargetCpu> {
        let found = TargetCpu::NAMED
            .iter()
            .find(|(n, _)| *n == name)
            .map(|(_, t)| *t);
        found.ok_or_else(|| {
            Error::invalid(unknown(
                "target CPU",
                name,
                TargetCpu::NAMED.map(|(n, _)| n),
            ))
        })
    }

    /// The instruction set of kernels that are given one.
    pub fn isa(self) -> Isa {
        match self {
            TargetCpu::Native => Isa::current(),
            TargetCpu::X86_64(Level::V2) => Isa::Portable,
            TargetCpu::X86_64(Level::V3) => Isa::Avx2,
            TargetCpu::X86_64(Level::V4) => Isa::Avx512,
        }
    }

    /// The features of Cranelift's x86-64 back end that code may use; none for [`TargetCpu::Native`], whose features are detected.
    ///
    /// They are named one by one, since Cranelift's presets `x86-64-v3` and `-v4` leave out `has_avx`, without which its vector code
    /// is that of SSE.
    pub fn features(self) -> &'static [&'static str] {
        match self {
            TargetCpu::Native => &[],
            TargetCpu::X86_64(Level::V2) => V2,
            TargetCpu::X86_64(Level::V3) => V3,
            TargetCpu::X86_64(Level::V4) => V4,
        }
    }

    /// `Unsupported` when this machine cannot run code for it.
    pub fn check_runs_here(self) -> Result<()> {
        if self == TargetCpu::Native || runs(self) {
            return Ok(());
        }
        Err(
            Error::unsupported(format!("this machine's CPU does not run code for {self}"))
                .hint("--target-cpu native"),
        )
    }
}

#[cfg(target_arch = "x86_64")]
fn runs(target: TargetCpu) -> bool {
    target.isa().is_available()
        && is_x86_feature_detected!("sse4.2")
        && is_x86_feature_detected!("popcnt")
}

#[cfg(not(target_arch = "x86_64"))]
fn runs(_: TargetCpu) -> bool {
    false
}

impl fmt::Display for TargetCpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = TargetCpu::NAMED
            .iter()
            .find(|(_, t)| t == self)
            .map(|(n, _)| *n);
        f.write_str(name.expect("every target has a name"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_and_printed() {
        for (name, target) in TargetCpu::NAMED {
            assert_eq!(TargetCpu::parse(name).unwrap(), target);
            assert_eq!(target.to_string(), name);
        }
        let e = TargetCpu::parse("x86-64-v5").unwrap_err().to_string();
        assert!(e.contains("did you mean \"x86-64-v"), "{e}");
    }
}
