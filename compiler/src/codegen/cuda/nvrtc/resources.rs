//! The report of `ptxas -v` on each kernel.

use std::collections::BTreeMap;

/// Resources of a compiled kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Resources {
    /// Registers per thread.
    pub registers: u32,
    /// Statically declared shared memory per block in bytes.
    pub shared_bytes: u32,
    /// Stack frame per thread in bytes.
    pub stack_bytes: u32,
    /// Bytes of spill stores, per thread.
    pub spill_store_bytes: u32,
    /// Bytes of spill loads, per thread.
    pub spill_load_bytes: u32,
}

/// Resources by kernel, out of a log. Lines that are not understood are passed over.
pub(super) fn parse(log: &str) -> BTreeMap<String, Resources> {
    let mut found: BTreeMap<String, Resources> = BTreeMap::new();
    let mut current = None;
    for line in log.lines() {
        if let Some(name) = between(line, "Compiling entry function '", "'") {
            current = Some(name.to_owned());
            continue;
        }
        if let Some(name) = between(line, "Function properties for ", "\n") {
            // Device functions that were not inlined have properties of their own.
            let name = name.trim();
            current = current
                .filter(|c| c == name)
                .or_else(|| found.contains_key(name).then(|| name.to_owned()));
            continue;
        }
        let Some(name) = &current else { continue };
        let r = found.entry(name.clone()).or_default();
        for (what, unit) in [
            (&mut r.registers, " registers"),
            (&mut r.shared_bytes, " bytes smem"),
            (&mut r.stack_bytes, " bytes stack frame"),
            (&mut r.spill_store_bytes, " bytes spill stores"),
            (&mut r.spill_load_bytes, " bytes spill loads"),
        ] {
            if let Some(n) = number_before(line, unit) {
                *what = n;
            }
        }
    }
    found
}

fn between<'a>(line: &'a str, before: &str, after: &str) -> Option<&'a str> {
    let rest = &line[line.find(before)? + before.len()..];
    Some(&rest[..rest.find(after).unwrap_or(rest.len())])
}

/// The number right before `unit`.
fn number_before(line: &str, unit: &str) -> Option<u32> {
    let text = &line[..line.find(unit)?];
    text[text
        .rfind(|c: char| !c.is_ascii_digit())
        .map_or(0, |i| i + 1)..]
        .parse()
        .ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_of_two_kernels() {
        let log = "\
ptxas info    : 0 bytes gmem, 24 bytes cmem[4]
ptxas info    : Compiling entry function 'gm_a' for 'sm_90a'
ptxas info    : Function properties for gm_a
    8 bytes stack frame, 16 bytes spill stores, 24 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers, 1024 bytes smem
ptxas info    : Compile time = 12.5 ms
ptxas info    : Compiling entry function 'gm_b' for 'sm_90a'
ptxas info    : Function properties for gm_b
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 20 registers, used 0 barriers
ptxas info    : Function properties for __internal_sin
    40 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
";
        let found = parse(log);
        let a = Resources {
            registers: 168,
            shared_bytes: 1024,
            stack_bytes: 8,
            spill_store_bytes: 16,
            spill_load_bytes: 24,
        };
        let b = Resources {
            registers: 20,
            ..Resources::default()
        };
        assert_eq!(
            found,
            BTreeMap::from([("gm_a".to_owned(), a), ("gm_b".to_owned(), b)])
        );
    }
}
