//! NVRTC libraries that are odd or broken: each is used or refused with a reason, by a process of its own.

use crate::process::{Ended, gristmill_with};
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

    /// Runs gristmill where the loader looks in `folder`, too.
    fn run(&self, folder: &str, variable: &str, file: &Path, args: &[&str]) -> Ended {
        let (folder, none) = (self.0.path().join(folder), Path::new(""));
        let variables = [
            ("GRISTMILL_CACHE_DIR", none),
            ("GRISTMILL_CUDA", none),
            ("GRISTMILL_NVRTC", none),
            ("LD_LIBRARY_PATH", &folder),
            (variable, file),
        ];
        gristmill_with(Path::new("."), &variables, args)
    }

    /// What `gristmill devices` says of a library.
    fn said(&self, folder: &str, variable: &str, file: &Path) -> String {
        let ended = self.run(folder, variable, file, &["devices"]);
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
            "it is NVRTC 11.5; version 13 or 12 is needed",
        ),
        (
            "libnvrtc.so.14",
            ["MAJOR=14", status, cubin],
            "it is NVRTC 14.5; version 13 or 12 is needed",
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
        (
            "libodd.so",
            USUAL,
            "does not find it: its soname has to be libnvrtc.so or one with a version",
        ),
    ] {
        let Some(file) = nvrtc(&libraries, "libsome.so", soname, &macros) else {
            return;
        };
        let said = libraries.said("", "GRISTMILL_NVRTC", &file);
        assert!(said.contains(expected), "{soname} {macros:?}: {said}");
    }
    let text = libraries.path("text/libnvrtc.so.13");
    std::fs::write(&text, "text").unwrap();
    let said = libraries.said("", "GRISTMILL_NVRTC", &text);
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
    let said = libraries.said("loader", "GRISTMILL_NVRTC", &own);
    let expected = format!(
        "{} was opened, but NVRTC is called through cudarc, which opens {}: name that file",
        own.display(),
        other.display()
    );
    assert!(said.contains(&expected), "{said}");
    let said = libraries.said("loader", "GRISTMILL_NVRTC", &other);
    assert!(said.contains("NVRTC 13.5"), "{said}");
}

/// A status that the bindings do not have, without a text.
#[test]
fn unknown_statuses_of_nvrtc_are_errors() {
    if !is_linux() {
        return;
    }
    let libraries = Libraries::new();
    let Some(file) = nvrtc(&libraries, "libsome.so", "libnvrtc.so.13", &USUAL) else {
        return;
    };
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("data/digits/model.onnx");
    let model = model.to_str().unwrap();
    let sizes = ["--set", "batch=2", "--gpu-arch", "sm_90"];
    let args = [&["dump", model, "--stage", "ptx"], &sizes[..]].concat();
    let ended = libraries.run("", "GRISTMILL_NVRTC", &file, &args);
    let expected = "nvrtcCreateProgram: NVRTC error 77";
    assert!(ended.stderr.contains(expected), "{}", ended.stderr);
}
