//! GPU architectures: `sm_80`, `sm_90a`.

use crate::error::{Error, Result};
use crate::nearest::unknown;
use std::fmt;

/// An architecture that machine code is made for. With a suffix the code uses features of GPUs of
/// exactly this capability (`a`), or of its family (`f`), and runs on no others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Arch {
    capability: u32,
    suffix: Option<char>,
    ptx_only: bool,
}

/// Names accepted by [`Arch::parse`].
const KNOWN: [&str; 17] = [
    "sm_75", "sm_80", "sm_86", "sm_87", "sm_88", "sm_89", "sm_90", "sm_90a", "sm_100", "sm_100a",
    "sm_103", "sm_103a", "sm_110", "sm_110a", "sm_120", "sm_120a", "sm_121",
];

impl Arch {
    /// The architecture of kernels whose GPU is unknown: every GPU since 2020 runs them.
    pub const COMMON: Arch = Arch::new(80, None);

    /// The architecture of a compute capability, times ten, with or without a suffix.
    pub const fn new(capability: u32, suffix: Option<char>) -> Arch {
        Arch {
            capability,
            suffix,
            ptx_only: false,
        }
    }

    /// The best architecture for a device of compute capability `major.minor`.
    pub fn of_device(major: u32, minor: u32) -> Arch {
        Arch::new(major * 10 + minor, (major >= 9).then_some('a'))
    }

    /// The architecture of a name. Errors name the nearest known one.
    pub fn parse(name: &str) -> Result<Arch> {
        if !KNOWN.contains(&name) {
            return Err(Error::invalid(unknown("GPU architecture", name, KNOWN)));
        }
        let digits = name.trim_start_matches("sm_");
        let suffix = digits.chars().last().filter(|c| !c.is_ascii_digit());
        let number = digits.trim_end_matches(|c: char| !c.is_ascii_digit());
        Ok(Arch::new(
            number.parse().expect("known names hold a number"),
            suffix,
        ))
    }

    /// The same, for PTX without machine code, as emulated devices run it: half the time to compile.
    pub const fn ptx_only(self) -> Arch {
        Arch {
            ptx_only: true,
            ..self
        }
    }

    /// True when code may use products of warp groups (`wgmma`).
    pub fn has_wgmma(self) -> bool {
        self.capability == 90 && self.suffix == Some('a')
    }

    /// Compute capability, times ten: 90 for `sm_90a`.
    pub fn capability(self) -> u32 {
        self.capability
    }
}

impl fmt::Display for Arch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}_{}",
            if self.ptx_only { "compute" } else { "sm" },
            self.capability
        )?;
        self.suffix.map_or(Ok(()), |s| write!(f, "{s}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip() {
        for name in KNOWN {
            assert_eq!(Arch::parse(name).unwrap().to_string(), name);
        }
        assert_eq!(Arch::of_device(9, 0).to_string(), "sm_90a");
        assert_eq!(Arch::of_device(8, 6).to_string(), "sm_86");
        assert_eq!(
            Arch::parse("sm_90a").unwrap().ptx_only().to_string(),
            "compute_90a"
        );
        let e = Arch::parse("sm_90b").unwrap_err().to_string();
        assert!(e.contains("sm_90b") && e.contains("sm_90"), "{e}");
    }
}
