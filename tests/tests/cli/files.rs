//! Files that are too large, are no files, or cannot be written; a cache folder that others use or attack.

use super::data;
use crate::process::{Ended, Start, gristmill, gristmill_with_cache, start};
use std::path::Path;

fn bench(cache: &Path, batch: &str) -> Ended {
    let (model, set) = (data("digits/model.onnx"), format!("batch={batch}"));
    let args = ["bench", &model, "--set", &set, "--iters", "1", "--profile"];
    gristmill_with_cache(Path::new("."), cache, &args)
}

/// Number of clusters that a run says it added.
fn n_added(ended: &Ended) -> usize {
    let line = ended
        .stderr
        .lines()
        .find_map(|l| l.strip_prefix("times of "));
    let n = line.and_then(|l| l.split(' ').next()?.parse().ok());
    n.unwrap_or_else(|| panic!("{}", ended.stderr))
}

#[test]
fn processes_side_by_side_lose_no_times() {
    let cache = tempfile::tempdir().unwrap();
    let n_added: usize = std::thread::scope(|scope| {
        let batches = ["1", "2", "3", "5"];
        let processes = batches.map(|batch| {
            let cache = cache.path();
            scope.spawn(move || n_added(&bench(cache, batch)))
        });
        processes.map(|p| p.join().unwrap()).iter().sum()
    });
    let text = std::fs::read_to_string(cache.path().join("times.json")).unwrap();
    assert_eq!(text.matches("\"cluster\":").count(), n_added, "{text}");
}

#[test]
fn times_are_printed_where_they_cannot_be_kept() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("a file");
    std::fs::write(&file, "").unwrap();
    let ended = bench(&file, "1");
    assert_eq!(ended.code, Some(2), "{}", ended.stderr);
    assert!(ended.stdout.contains("p50 "), "{}", ended.stdout);
    let off = bench(Path::new(""), "1");
    assert_eq!(off.code, Some(0), "{}", off.stderr);
    assert!(off.stderr.contains("no cache folder"), "{}", off.stderr);
}

#[cfg(unix)]
#[test]
fn links_in_the_cache_folder_are_not_written_through() {
    use std::os::unix::fs::symlink;
    let folder = tempfile::tempdir().unwrap();
    let (cache, victim) = (folder.path().join("c"), folder.path().join("victim"));
    std::fs::create_dir(&cache).unwrap();
    std::fs::write(&victim, "precious").unwrap();
    symlink(&victim, cache.join("times.json")).unwrap();
    // The name of the file beside must not be the process's number, which `exec` keeps.
    let shell = format!(
        "ln -s {0} {1}/times.json.$$.new",
        victim.display(),
        cache.display()
    );
    let model = data("digits/model.onnx");
    let ended = start(
        Start {
            variables: &[("GRISTMILL_CACHE_DIR", &cache)],
            shell: &shell,
            ..Start::default()
        },
        &[
            "bench",
            &model,
            "--set",
            "batch=1",
            "--iters",
            "1",
            "--profile",
        ],
    );
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    assert_eq!(std::fs::read_to_string(&victim).unwrap(), "precious");
    assert!(!cache.join("times.json").is_symlink());
}

#[cfg(unix)]
fn make_pipe(path: &Path) {
    let status = std::process::Command::new("mkfifo").arg(path).status();
    assert!(status.unwrap().success());
}

#[cfg(unix)]
#[test]
fn pipes_in_the_cache_folder_do_not_block() {
    let cache = tempfile::tempdir().unwrap();
    for file in ["cpu.toml", "times.json"] {
        make_pipe(&cache.path().join(file));
    }
    let model = data("digits/model.onnx");
    let args = ["run", &model, "--set", "batch=1"];
    let ended = gristmill_with_cache(Path::new("."), cache.path(), &args);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    for file in ["cpu.toml", "times.json"] {
        let path = cache.path().join(file);
        let warning = format!("warning: {}: it is a pipe", path.display());
        assert!(ended.stderr.contains(&warning), "{}", ended.stderr);
    }
    make_pipe(&cache.path().join("times.json.lock"));
    let ended = bench(cache.path(), "1");
    assert_eq!(ended.code, Some(2), "{}", ended.stderr);
    assert!(
        ended.stderr.contains("not a regular file"),
        "{}",
        ended.stderr
    );
}

/// Each flag that names a text file, with a pipe, and with a file of 5 GB that takes no room on the disk.
#[cfg(unix)]
#[test]
fn files_that_cannot_be_right_are_refused_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let model = data("digits/model.onnx");
    let sparse = |name: &str| {
        let file = std::fs::File::create(folder.path().join(name)).unwrap();
        file.set_len(5 << 30).unwrap();
    };
    std::fs::create_dir(folder.path().join("data")).unwrap();
    for name in ["large", "large.ir", "data/input_0.pb"] {
        sparse(name);
    }
    for name in ["pipe", "pipe.ir", "pipe.onnx"] {
        make_pipe(&folder.path().join(name));
    }
    let cases: [&[&str]; 10] = [
        &["place", &model, "--set", "batch=1", "--target", "large"],
        &["place", &model, "--set", "batch=1", "--plan", "large"],
        &["place", "--task-graph", "large"],
        &["run", "large.ir"],
        &["run", &model, "--set", "batch=1", "--test-data", "data"],
        &["place", &model, "--set", "batch=1", "--target", "pipe"],
        &["place", &model, "--set", "batch=1", "--plan", "pipe"],
        &["place", "--task-graph", "pipe"],
        &["run", "pipe.ir"],
        &["run", "pipe.onnx"],
    ];
    for args in cases {
        let ended = gristmill(folder.path(), args);
        assert_eq!(ended.code, Some(2), "{args:?}: {}", ended.stderr);
        let is_clear = ["it has 5368709120 bytes, at most", "it is a pipe"]
            .iter()
            .any(|text| ended.stderr.contains(text));
        assert!(is_clear, "{args:?}: {}", ended.stderr);
    }
}

#[test]
fn a_large_file_in_the_cache_folder_is_ignored() {
    let cache = tempfile::tempdir().unwrap();
    for file in ["cpu.toml", "times.json"] {
        let file = std::fs::File::create(cache.path().join(file)).unwrap();
        file.set_len(5 << 30).unwrap();
    }
    let model = data("digits/model.onnx");
    let args = ["run", &model, "--set", "batch=1"];
    let ended = gristmill_with_cache(Path::new("."), cache.path(), &args);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    assert_eq!(
        ended.stderr.matches("5368709120 bytes").count(),
        2,
        "{}",
        ended.stderr
    );
}

#[cfg(unix)]
#[test]
fn a_calibration_that_is_a_link_to_itself_is_named() {
    let cache = tempfile::tempdir().unwrap();
    std::os::unix::fs::symlink("cpu.toml", cache.path().join("cpu.toml")).unwrap();
    let ended = gristmill_with_cache(Path::new("."), cache.path(), &["devices"]);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    assert!(ended.stderr.contains("cpu.toml: "), "{}", ended.stderr);
}

/// A write beyond the limit of a file's size fails as on a full disk.
#[cfg(target_os = "linux")]
#[test]
fn a_failed_write_leaves_no_file() {
    let folder = tempfile::tempdir().unwrap();
    let model = data("digits/model.onnx");
    for flag in ["--trace", "--html", "--plan-out"] {
        let ended = start(
            Start {
                folder: folder.path(),
                shell: "trap '' XFSZ; ulimit -f 0",
                stdout: Some(std::fs::File::create("/dev/null").unwrap()),
                stderr: Some(std::fs::File::create("/dev/null").unwrap()),
                ..Start::default()
            },
            &["place", &model, "--set", "batch=1", flag, "out"],
        );
        assert_eq!(ended.code, Some(2), "{flag}");
        assert_eq!(
            std::fs::read_dir(folder.path()).unwrap().count(),
            0,
            "{flag}"
        );
    }
}

#[cfg(unix)]
#[test]
fn kernels_are_named_for_perf() {
    let model = data("digits/model.onnx");
    let args = ["run", &model, "--set", "batch=1", "--perf"];
    let ended = crate::process::gristmill(Path::new("."), &args);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let line = ended.stderr.lines().next().unwrap_or_default();
    let path = line.strip_prefix("kernels are named in ").unwrap();
    let map = std::fs::read_to_string(path).unwrap();
    std::fs::remove_file(path).unwrap();
    let functions = map.lines().map(|line| {
        let (start, rest) = line.split_once(' ').unwrap();
        let (size, name) = rest.split_once(' ').unwrap();
        let number = |text| usize::from_str_radix(text, 16).unwrap();
        (number(start), number(size), name.to_owned())
    });
    let functions: Vec<_> = functions.collect();
    assert!(functions.len() > 3, "{map}");
    assert!(functions.iter().all(|(_, size, _)| *size > 0), "{map}");
    assert!(functions.is_sorted(), "{map}");
    assert!(
        functions.iter().any(|(.., name)| name.contains("gm_conv")),
        "{map}"
    );
}
