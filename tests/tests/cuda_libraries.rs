//! Drivers and NVRTCs that are odd or broken: each is used or refused with a reason, by a process of its own.

use crate::process::{Ended, Start, emulated_driver, gristmill_with, start};
use std::path::{Path, PathBuf};
use std::process::Command;

/// An NVRTC of version `MAJOR`.5 for `sm_90` that fails to compile, with a status and a text that no version has.
const NVRTC: &str = r#"
int nvrtcVersion(int *major, int *minor) { *major = MAJOR; *minor = 5; return STATUS; }
int nvrtcGetNumSupportedArchs(int *n) { *n = 1; return 0; }
int nvrtcGetSupportedArchs(int *archs) { *archs = 90; return 0; }
const char *nvrtcGetErrorString(int status) { return 0; }
int nvrtcCreateProgram(void **p, const char *s, const char *n, int k, void *t, void *h) { return 77; }
int nvrtcDestroyProgram(void **p) { return 0; }
int nvrtcCompileProgram(void *p, int n, void *options) { return 77; }
int nvrtcGetProgramLogSize(void *p, unsigned long *n) { return 77; }
int nvrtcGetProgramLog(void *p, char *text) { return 77; }
int nvrtcGetPTXSize(void *p, unsigned long *n) { return 77; }
int nvrtcGetPTX(void *p, char *text) { return 77; }
int nvrtcGetCUBINSize(void *p, unsigned long *n) { return 77; }
int CUBIN(void *p, char *text) { return 77; }
"#;

/// A folder of libraries, and a process that may find them.
struct Libraries(tempfile::TempDir);

impl Libraries {
    fn new() -> Libraries {
        Libraries(tempfile::tempdir().unwrap())
    }

    /// The path of a file, whose folder is made.
    fn path(&self, name: &str) -> PathBuf {
        let path = self.0.path().join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        path
    }

    /// Makes a library of C code. `None`, with a line that says so, without a compiler.
    fn compile(&self, name: &str, soname: &str, source: &str, flags: &[&str]) -> Option<PathBuf> {
        let (path, text) = (self.path(name), self.path("source.c"));
        std::fs::write(&text, source).unwrap();
        let output = Command::new("cc")
            .args(["-shared", "-fPIC", "-w", "-o"])
            .args([&path, &text])
            .arg(format!("-Wl,-soname,{soname}"))
            .args(flags)
            .output();
        let Ok(output) = output else {
            println!("left out: cc: there is no such program");
            return None;
        };
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{name}: {said}");
        Some(path)
    }

    /// Makes a copy of the emulated driver where one name is another of the same length.
    fn driver(&self, name: &str, [from, to]: [&str; 2]) -> PathBuf {
        assert_eq!(from.len(), to.len());
        let (path, mut bytes) = (self.path(name), std::fs::read(emulated_driver()).unwrap());
        let terminated = [from.as_bytes(), b"\0"].concat();
        let mut n_found = 0;
        for at in 0..bytes.len() - from.len() {
            if bytes[at..].starts_with(&terminated) {
                bytes[at..at + to.len()].copy_from_slice(to.as_bytes());
                n_found += 1;
            }
        }
        assert!(n_found > 0, "the emulated driver has no {from}");
        std::fs::write(&path, bytes).unwrap();
        path
    }

    /// Runs gristmill where the loader looks in `folder` first.
    fn run(&self, folder: &str, variables: &[(&str, &Path)], args: &[&str]) -> Ended {
        let (folder, none) = (self.0.path().join(folder), Path::new(""));
        let usual = [
            ("GRISTMILL_CACHE_DIR", none),
            ("GRISTMILL_CUDA", none),
            ("GRISTMILL_NVRTC", none),
            ("LD_LIBRARY_PATH", &folder),
        ];
        let variables = [&usual, variables].concat();
        gristmill_with(Path::new("."), &variables, args)
    }

    /// What `gristmill devices` says of a library.
    fn said(&self, folder: &str, variables: &[(&str, &Path)]) -> String {
        let ended = self.run(folder, variables, &["devices"]);
        assert_eq!(ended.code, Some(0), "{}{}", ended.stdout, ended.stderr);
        ended.stdout
    }
}

/// True where libraries are files with sonames.
fn is_linux() -> bool {
    let is_linux = cfg!(target_os = "linux");
    if !is_linux {
        println!("left out: this system has no sonames");
    }
    is_linux
}

/// Makes an NVRTC with these macros.
fn nvrtc(libraries: &Libraries, name: &str, soname: &str, macros: &[&str]) -> Option<PathBuf> {
    let flags: Vec<String> = macros.iter().map(|m| format!("-D{m}")).collect();
    let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
    libraries.compile(name, soname, NVRTC, &flags)
}

/// Macros of a library that can be used.
const USUAL: [&str; 3] = ["MAJOR=13", "STATUS=0", "CUBIN=nvrtcGetCUBIN"];

#[test]
fn an_nvrtc_is_used_or_refused_with_a_reason() {
    if !is_linux() {
        return;
    }
    let libraries = Libraries::new();
    let [_, status, cubin] = USUAL;
    for (soname, macros, expected) in [
        ("libnvrtc.so.13", USUAL, "NVRTC 13.5"),
        ("libnvrtc.so.12", ["MAJOR=12", status, cubin], "NVRTC 12.5"),
        (
            "libnvrtc.so.11",
            ["MAJOR=11", status, cubin],
            "it is NVRTC 11.5; version 1",
        ),
        (
            "libnvrtc.so.14",
            ["MAJOR=14", status, cubin],
            "it is NVRTC 14.5; version 1",
        ),
        (
            "libnvrtc.so.13",
            ["MAJOR=13", "STATUS=6", cubin],
            "nvrtcVersion failed: NVRTC error 6",
        ),
        (
            "libnvrtc.so.13",
            ["MAJOR=13", status, "CUBIN=other"],
            "symbol nvrtcGetCUBIN is missing",
        ),
    ] {
        // Where the loader looks first, so that a toolkit of this machine plays no part.
        let Some(file) = nvrtc(&libraries, "loader/libnvrtc.so", soname, &macros) else {
            return;
        };
        let said = libraries.said("loader", &[("GRISTMILL_NVRTC", &file)]);
        assert!(said.contains(expected), "{soname} {macros:?}: {said}");
    }
    let Some(odd) = nvrtc(&libraries, "odd/libodd.so", "libodd.so", &USUAL) else {
        return;
    };
    let said = libraries.said("odd", &[("GRISTMILL_NVRTC", &odd)]);
    let expected = "libodd.so was opened, but NVRTC is called through cudarc, which ";
    assert!(said.contains(expected), "{said}");
    let text = libraries.path("text/libnvrtc.so.13");
    std::fs::write(&text, "text").unwrap();
    let said = libraries.said("text", &[("GRISTMILL_NVRTC", &text)]);
    assert!(said.contains("cannot be opened: "), "{said}");
}

/// The loader finds another library under a name that cudarc tries first: that one is used where it is named.
#[test]
fn two_nvrtcs_are_told_apart() {
    if !is_linux() {
        return;
    }
    let libraries = Libraries::new();
    let make = |name| nvrtc(&libraries, name, "libnvrtc.so.13", &USUAL);
    let (Some(other), Some(own)) = (make("loader/libnvrtc.so"), make("own/libnvrtc.so.13")) else {
        return;
    };
    let said = libraries.said("loader", &[("GRISTMILL_NVRTC", &own)]);
    let expected = format!(
        "{} was opened, but NVRTC is called through cudarc, which opens {}: name that file",
        own.display(),
        other.display()
    );
    assert!(said.contains(&expected), "{said}");
    let said = libraries.said("loader", &[("GRISTMILL_NVRTC", &other)]);
    assert!(said.contains("NVRTC 13.5"), "{said}");
    // None is named: what is in the folder of a toolkit gives way.
    let toolkit = nvrtc(
        &libraries,
        "own/lib/libnvrtc.so.13",
        "libnvrtc.so.13",
        &USUAL,
    );
    let toolkit = toolkit.expect("there is a compiler");
    let home = toolkit.parent().and_then(Path::parent).unwrap();
    let (folder, none) = (libraries.0.path().join("loader"), Path::new(""));
    let variables = [
        ("CUDA_HOME", home),
        ("GRISTMILL_CUDA", none),
        ("LD_LIBRARY_PATH", &folder),
    ];
    let how = Start {
        variables: &variables,
        shell: "unset GRISTMILL_NVRTC",
        ..Start::default()
    };
    let said = start(how, &["devices"]).stdout;
    let used = said.split_once("NVRTC 13.5").map(|(_, after)| after);
    let is_loaders = |after: &str| after.lines().any(|line| line.trim() == "libnvrtc.so");
    assert!(used.is_some_and(is_loaders), "{said}");
}

/// A status that the bindings do not have, without a text.
#[test]
fn unknown_statuses_of_nvrtc_are_errors() {
    if !is_linux() {
        return;
    }
    let libraries = Libraries::new();
    let Some(file) = nvrtc(&libraries, "loader/libnvrtc.so", "libnvrtc.so.13", &USUAL) else {
        return;
    };
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("data/digits/model.onnx");
    let model = model.to_str().unwrap();
    let sizes = ["--set", "batch=2", "--gpu-arch", "sm_90"];
    let args = [&["dump", model, "--stage", "ptx"], &sizes[..]].concat();
    let ended = libraries.run("loader", &[("GRISTMILL_NVRTC", &file)], &args);
    let expected = "nvrtcCreateProgram: NVRTC error 77";
    assert!(ended.stderr.contains(expected), "{}", ended.stderr);
}

#[test]
fn a_driver_is_used_or_refused_with_a_reason() {
    if !is_linux() {
        return;
    }
    let libraries = Libraries::new();
    let same = ["cuStreamQuery"; 2];
    for (names, settings, expected) in [
        (same, "devices=2", "GPU:1"),
        (same, "driver=99010", "GPU:0"),
        (same, "driver=0", "libsome.so is a stub of the CUDA toolkit"),
        (
            same,
            "driver=11080",
            "the CUDA driver is for CUDA 11.8; update it (12.0 or later is needed)",
        ),
        (
            same,
            "nonsense",
            "asking for the driver's version failed: CUDA_ERROR_INVALID_VALUE",
        ),
        (
            ["cuStreamQuery", "cuStreamOther"],
            "",
            "the CUDA driver library lacks cuStreamQuery; update the driver",
        ),
        (
            ["cuInit", "cuOdds"],
            "",
            "no CUDA driver: the library that was opened as such has no cuInit",
        ),
        (
            ["libcuda.so", "libcudb.so"],
            "",
            "was opened, but the CUDA driver is called through cudarc, which ",
        ),
    ] {
        let file = libraries.driver("libsome.so", names);
        let settings = Path::new(settings);
        let said = libraries.said(
            "",
            &[("GRISTMILL_CUDA", &file), ("EMULATED_CUDA", settings)],
        );
        assert!(said.contains(expected), "{names:?} {settings:?}: {said}");
    }
}

#[test]
fn a_driver_that_is_not_there_or_no_library_says_so() {
    if !is_linux() {
        return;
    }
    let libraries = Libraries::new();
    let text = libraries.path("text/libcuda.so.1");
    std::fs::write(&text, "text").unwrap();
    std::fs::write(libraries.path("text/libcuda.so"), "text").unwrap();
    for variables in [&[][..], &[("GRISTMILL_CUDA", text.as_path())]] {
        let said = libraries.said("text", variables);
        let reason = said
            .split_once("no CUDA driver: ")
            .map(|(_, reason)| reason);
        let expected = |r: &str| r.contains("cannot be opened: ");
        assert!(reason.is_some_and(expected), "{said}");
    }
    let said = libraries.said("", &[("GRISTMILL_CUDA", &libraries.path("none.so"))]);
    assert!(
        said.contains("none.so was not found; set GRISTMILL_CUDA to its path"),
        "{said}"
    );
}

/// As [`two_nvrtcs_are_told_apart`].
#[test]
fn two_drivers_are_told_apart() {
    if !is_linux() {
        return;
    }
    let libraries = Libraries::new();
    let own = libraries.driver("own/libcuda.so.1", ["libcuda.so", "libcudb.so"]);
    let other = libraries.driver("loader/libcuda.so", ["libcuda.so"; 2]);
    let said = libraries.said("loader", &[("GRISTMILL_CUDA", &own)]);
    let expected = format!(
        "no CUDA driver: {} was opened, but the CUDA driver is called through cudarc, which opens {}: name that file",
        own.display(),
        other.display()
    );
    assert!(said.contains(&expected), "{said}");
    let said = libraries.said("loader", &[("GRISTMILL_CUDA", &other)]);
    assert!(said.contains("GPU:0"), "{said}");
    // None is named, and each name of the driver leads to a file of its own, as under WSL.
    libraries.driver("both/libcuda.so", ["libcuda.so", "libcudb.so"]);
    libraries.driver("both/libcuda.so.1", ["libcuda.so", "libcudb.so"]);
    let said = libraries.said("both", &[]);
    assert!(said.contains("GPU:0"), "{said}");
}
