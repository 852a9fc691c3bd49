//! Memory limits of Linux control groups (the kernel's `cgroup-v2.rst` and `cgroup-v1/memory.rst`), which containers set.

use std::fs;
use std::path::{Path, PathBuf};

/// Amounts in bytes; `None` where nothing limits them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Memory {
    /// Memory that the processes of the group may use together.
    pub limit_bytes: Option<u64>,
    /// Memory left of the limit. Caches of files count as free.
    pub free_bytes: Option<u64>,
}

/// Names of the files of one version.
struct Files {
    limit: &'static str,
    usage: &'static str,
    /// Line of `memory.stat` with the bytes of file caches that the kernel would drop first.
    cache: &'static str,
}

const V2: Files = Files {
    limit: "memory.max",
    usage: "memory.current",
    cache: "inactive_file",
};
const V1: Files = Files {
    limit: "memory.limit_in_bytes",
    usage: "memory.usage_in_bytes",
    cache: "total_inactive_file",
};

/// Limits from this on mean that there is none: the first version writes the largest multiple of a page.
const UNLIMITED_BYTES: u64 = 1 << 60;

/// The smallest limit of a process's group and the groups around it. `root` is where the groups are mounted, `membership` the text of
/// `/proc/self/cgroup`.
pub(super) fn memory(root: &Path, membership: &str) -> Memory {
    let mut smallest = Memory::default();
    for line in membership.lines() {
        let Some((folder, files)) = group(root, line) else {
            continue;
        };
        // Inside a container, the path of the group need not be there, but the files of its root are.
        for ancestor in folder.ancestors().take_while(|a| a.starts_with(root)) {
            let found = files.read(ancestor);
            smallest.limit_bytes = super::smaller(smallest.limit_bytes, found.limit_bytes);
            smallest.free_bytes = super::smaller(smallest.free_bytes, found.free_bytes);
        }
    }
    smallest
}

/// Folder of the group that a line `number:controllers:path` names, if the group limits memory.
fn group(root: &Path, line: &str) -> Option<(PathBuf, Files)> {
    let mut parts = line.splitn(3, ':').skip(1);
    let (controllers, path) = (parts.next()?, parts.next()?);
    let path = path.trim_start_matches('/');
    if controllers.is_empty() {
        Some((root.join(path), V2))
    } else if controllers.split(',').any(|c| c == "memory") {
        Some((root.join("memory").join(path), V1))
    } else {
        None
    }
}

impl Files {
    fn read(&self, group: &Path) -> Memory {
        let text = |name: &str| fs::read_to_string(group.join(name)).ok();
        let number = |name: &str| text(name)?.trim().parse::<u64>().ok();
        let Some(limit) = number(self.limit).filter(|n| *n < UNLIMITED_BYTES) else {
            return Memory::default();
        };
        let stat = text("memory.stat").unwrap_or_default();
        let cache = stat.lines().find_map(|line| {
            let (name, bytes) = line.split_once(' ')?;
            (name == self.cache).then_some(bytes)?.parse::<u64>().ok()
        });
        let used = number(self.usage).map(|n| n.saturating_sub(cache.unwrap_or(0)));
        Memory {
            limit_bytes: Some(limit),
            free_bytes: used.map(|used| limit.saturating_sub(used)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A folder of the test's own with these files.
    fn tree(name: &str, files: &[(&str, &str)]) -> PathBuf {
        let root = std::env::temp_dir().join(format!("gristmill-{name}-{}", std::process::id()));
        for (path, text) in files {
            let path = root.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        root
    }

    #[test]
    #[cfg_attr(miri, ignore = "writes files")]
    fn the_smallest_limit_of_nested_groups_counts() {
        let files = [
            ("a/memory.max", "1000\n"),
            ("a/memory.current", "700\n"),
            ("a/memory.stat", "anon 500\ninactive_file 200\n"),
            ("a/b/memory.max", "max\n"),
            ("a/b/memory.current", "100\n"),
        ];
        let root = tree("cgroup-v2", &files);
        let found = memory(&root, "0::/a/b\n");
        assert_eq!(
            (found.limit_bytes, found.free_bytes),
            (Some(1000), Some(500))
        );
        // As in a container that sees its own group as the root.
        assert_eq!(
            memory(&root.join("a"), "0::/../c\n").limit_bytes,
            Some(1000)
        );
        assert_eq!(memory(&root, "0::/\n"), Memory::default());
        fs::remove_dir_all(&root).unwrap();
    }

    #[test]
    #[cfg_attr(miri, ignore = "writes files")]
    fn the_first_version_has_a_folder_per_controller() {
        let root = tree(
            "cgroup-v1",
            &[
                ("memory/a/memory.limit_in_bytes", "5000\n"),
                ("memory/a/memory.usage_in_bytes", "6000\n"),
                ("memory/memory.limit_in_bytes", "9223372036854771712\n"),
            ],
        );
        let membership = "5:cpu,cpuacct:/x\n4:memory:/a\n";
        let found = memory(&root, membership);
        assert_eq!((found.limit_bytes, found.free_bytes), (Some(5000), Some(0)));
        assert_eq!(memory(&root, "4:memory:/\n"), Memory::default());
        assert_eq!(memory(&root, "no such form"), Memory::default());
        fs::remove_dir_all(&root).unwrap();
    }
}
