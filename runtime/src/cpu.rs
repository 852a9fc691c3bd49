//! Facts about this machine's CPU and memory.

mod cgroup;

use std::fs;
use std::path::Path;

/// The machine as [`probe`] found it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CpuFacts {
    /// Model name, or the architecture's name where the system does not tell.
    pub model: String,
    /// Logical cores that this process may use.
    pub logical_cores: usize,
    /// Instruction-set extensions that matter for kernels, in a fixed order.
    pub features: Vec<&'static str>,
    /// Memory that this process may use, if the system tells: the machine's memory, or the limit of its control group if that is less.
    pub total_memory_bytes: Option<u64>,
    /// Memory that can be had without swapping, if the system tells; within the limit as well.
    pub available_memory_bytes: Option<u64>,
}

/// Logical cores that this process may use, 1 where the system does not tell.
pub fn n_cores() -> usize {
    std::thread::available_parallelism().map_or(1, |n| n.get())
}

/// Looks at the machine. Facts that cannot be found out are left empty.
pub fn probe() -> CpuFacts {
    let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let membership = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let limit = cgroup::memory(Path::new("/sys/fs/cgroup"), &membership);
    let model = field(&cpuinfo, "model name")
        .unwrap_or(std::env::consts::ARCH)
        .to_owned();
    CpuFacts {
        model,
        logical_cores: n_cores(),
        features: features(),
        total_memory_bytes: smaller(kib_field(&meminfo, "MemTotal"), limit.limit_bytes),
        available_memory_bytes: smaller(kib_field(&meminfo, "MemAvailable"), limit.free_bytes),
    }
}

/// True when this CPU, and the system, have a feature by Cranelift's name of it. Unknown ones count as absent.
pub fn has_feature(name: &str) -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        macro_rules! detect {
            ($($name:literal $feature:tt),* $(,)?) => {
                match name {
                    $($name => is_x86_feature_detected!($feature),)*
                    _ => false,
                }
            };
        }
        detect! {
            "has_sse3" "sse3", "has_ssse3" "ssse3", "has_sse41" "sse4.1", "has_sse42" "sse4.2",
            "has_popcnt" "popcnt", "has_cmpxchg16b" "cmpxchg16b", "has_avx" "avx", "has_avx2" "avx2",
            "has_fma" "fma", "has_bmi1" "bmi1", "has_bmi2" "bmi2", "has_lzcnt" "lzcnt",
            "has_avx512f" "avx512f", "has_avx512vl" "avx512vl", "has_avx512dq" "avx512dq",
            "has_avx512bitalg" "avx512bitalg", "has_avx512vbmi" "avx512vbmi",
            "has_avx512vnni" "avx512vnni", "has_avx_vnni" "avxvnni",
        }
    }
    #[cfg(target_arch = "aarch64")]
    {
        match name {
            "has_lse" => std::arch::is_aarch64_feature_detected!("lse"),
            "has_fp16" => std::arch::is_aarch64_feature_detected!("fp16"),
            "has_pauth" => std::arch::is_aarch64_feature_detected!("paca"),
            _ => false,
        }
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    {
        let _ = name;
        false
    }
}

/// The smaller of two amounts, of which one may be unknown.
fn smaller(a: Option<u64>, b: Option<u64>) -> Option<u64> {
    a.into_iter().chain(b).min()
}

/// Value of the first `name : value` line.
fn field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    let value = |line: &'a str| {
        line.split_once(':')
            .filter(|(key, _)| key.trim() == name)
            .map(|(_, v)| v.trim())
    };
    text.lines().find_map(value)
}

/// A `name: 123 kB` line in bytes.
fn kib_field(text: &str, name: &str) -> Option<u64> {
    field(text, name)?
        .strip_suffix("kB")?
        .trim()
        .parse::<u64>()
        .ok()?
        .checked_mul(1024)
}

/// Lists those of the named features that this CPU has.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
macro_rules! detected {
    ($detect:ident: $($name:tt),*) => { [$(($name, std::arch::$detect!($name))),*] };
}

#[cfg(target_arch = "x86_64")]
fn features() -> Vec<&'static str> {
    let all = detected!(is_x86_feature_detected:
        "sse4.2", "avx", "avx2", "fma", "f16c", "bmi2", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512vnni", "avx512bf16", "avx512fp16");
    all.into_iter()
        .filter_map(|(name, has)| has.then_some(name))
        .collect()
}

#[cfg(target_arch = "aarch64")]
fn features() -> Vec<&'static str> {
    let all =
        detected!(is_aarch64_feature_detected: "neon", "dotprod", "fp16", "bf16", "i8mm", "sve");
    all.into_iter()
        .filter_map(|(name, has)| has.then_some(name))
        .collect()
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn features() -> Vec<&'static str> {
    Vec::new()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn system_files_are_read() {
        let cpuinfo = "processor\t: 0\nmodel name\t: Some CPU @ 2.0GHz\nmodel name\t: other\n";
        assert_eq!(field(cpuinfo, "model name"), Some("Some CPU @ 2.0GHz"));
        assert_eq!(field(cpuinfo, "flags"), None);
        assert_eq!(
            kib_field("MemTotal:       2048 kB\n", "MemTotal"),
            Some(2 << 20)
        );
        assert_eq!(kib_field("MemTotal: lots\n", "MemTotal"), None);
    }

    #[test]
    #[cfg_attr(miri, ignore = "reads system files")]
    fn this_machine_has_facts() {
        let facts = probe();
        assert!(!facts.model.is_empty() && facts.logical_cores > 0);
        assert!(facts.available_memory_bytes <= facts.total_memory_bytes);
    }
}
