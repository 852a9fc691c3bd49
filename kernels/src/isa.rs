//! Instruction sets and their run-time choice.

use std::fmt;
use std::sync::atomic::{AtomicU32, Ordering};

/// An instruction set that the kernels are compiled for. Descriptors hold the numeric value
/// (`isa as u32`), since the layout of packed weights depends on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u32)]
pub enum Isa {
    /// Plain Rust, four lanes; every target.
    Portable = 1,
    /// AVX2, FMA and F16C: x86-64-v3.
    Avx2 = 2,
    /// AVX-512 F, VL, BW and DQ on top of `Avx2`: x86-64-v4.
    Avx512 = 3,
}

/// The `Isa` in use, as its number; 0 before the first use.
static CURRENT: AtomicU32 = AtomicU32::new(0);

impl Isa {
    /// Every instruction set, weakest first.
    pub const ALL: [Isa; 3] = [Isa::Portable, Isa::Avx2, Isa::Avx512];

    /// The instruction set in use: the best that this CPU has, or the one that `GRISTMILL_ISA`
    /// (`portable`, `avx2`, `avx512`) names, if the CPU has it. Looked up once.
    pub fn current() -> Isa {
        match Isa::from_u32(CURRENT.load(Ordering::Relaxed)) {
            Some(isa) => isa,
            None => Isa::detect(),
        }
    }

    /// The instruction set with this number.
    pub fn from_u32(value: u32) -> Option<Isa> {
        Isa::ALL.into_iter().find(|&isa| isa as u32 == value)
    }

    /// The instruction set of a function that is compiled for each: of the number `ISA`.
    pub(crate) const fn of<const ISA: u32>() -> Isa {
        match ISA {
            1 => Isa::Portable,
            2 => Isa::Avx2,
            3 => Isa::Avx512,
            _ => panic!("no instruction set has this number"),
        }
    }

    /// The instruction set that a descriptor names, if it is one and this CPU has it.
    #[inline]
    pub(crate) fn usable(value: u32) -> Option<Isa> {
        // The usual case needs no detection.
        if value == CURRENT.load(Ordering::Relaxed) {
            return Isa::from_u32(value);
        }
        Isa::from_u32(value).filter(|isa| isa.is_available())
    }

    /// The instruction set itself if this CPU has it, else the portable one.
    pub(crate) fn or_portable(self) -> Isa {
        if self.is_available() {
            self
        } else {
            Isa::Portable
        }
    }

    /// True when this CPU can run it.
    pub fn is_available(self) -> bool {
        match self {
            Isa::Portable => true,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => {
                is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("fma")
                    && is_x86_feature_detected!("f16c")
            }
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => {
                Isa::Avx2.is_available()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512vl")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
            }
            #[cfg(not(target_arch = "x86_64"))]
            Isa::Avx2 | Isa::Avx512 => false,
        }
    }

    /// The instruction sets that this CPU has, weakest first.
    pub fn available() -> impl Iterator<Item = Isa> {
        Isa::ALL.into_iter().filter(|isa| isa.is_available())
    }

    /// Columns of one packed panel of the right-hand side of a matrix product.
    pub const fn nr(self) -> usize {
        match self {
            Isa::Portable => 8,
            Isa::Avx2 => 16,
            Isa::Avx512 => 32,
        }
    }

    /// Lanes of one f32 vector.
    pub const fn lanes(self) -> usize {
        self.nr() / 2
    }

    fn detect() -> Isa {
        let named = std::env::var("GRISTMILL_ISA")
            .ok()
            .and_then(|name| Isa::ALL.into_iter().find(|isa| isa.to_string() == name));
        let best = Isa::available().last().unwrap_or(Isa::Portable);
        let isa = named.filter(|isa| isa.is_available()).unwrap_or(best);
        CURRENT.store(isa as u32, Ordering::Relaxed);
        isa
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Isa::Portable => "portable",
            Isa::Avx2 => "avx2",
            Isa::Avx512 => "avx512",
        })
    }
}
