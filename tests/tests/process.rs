//! Runs the `gristmill` binary as a user would, under limits of time and memory.

use std::{
    fs::File,
    io::{BufRead, BufReader, Read, Seek},
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    sync::OnceLock,
    thread,
    time::{Duration, Instant},
};

/// A process that runs longer hangs. Far above what any test needs, since machines differ.
const HANG: Duration = Duration::from_secs(120);

/// Address space of a process in KiB (4 GiB): an allocation of a hostile size fails at once instead of taking the machine down.
const ADDRESS_SPACE_KIB: u64 = 4 << 20;

/// How a process ended, and what it wrote.
pub struct Ended {
    /// `None` where a signal or the time limit ended it.
    pub code: Option<i32>,
    /// The exit status in words.
    pub status: String,
    pub stdout: String,
    pub stderr: String,
}

/// How a process starts.
pub struct Start<'a> {
    /// Its working folder.
    pub folder: &'a Path,
    /// Environment variables besides those of this process.
    pub variables: &'a [(&'a str, &'a Path)],
    /// Commands of the shell that starts it, such as further limits.
    pub shell: &'a str,
    /// Where it writes, instead of to files whose text is in [`Ended`].
    pub stdout: Option<File>,
    pub stderr: Option<File>,
}

impl Default for Start<'_> {
    fn default() -> Self {
        Start {
            folder: Path::new("."),
            variables: &[],
            shell: "",
            stdout: None,
            stderr: None,
        }
    }
}

/// Runs `gristmill ARGS` in `folder`, without a cache.
pub fn gristmill(folder: &Path, args: &[&str]) -> Ended {
    gristmill_with_cache(folder, Path::new(""), args)
}

/// Runs `gristmill ARGS` in `folder` with the cache folder `cache`.
pub fn gristmill_with_cache(folder: &Path, cache: &Path, args: &[&str]) -> Ended {
    gristmill_with(folder, &[("GRISTMILL_CACHE_DIR", cache)], args)
}

/// Runs `gristmill ARGS` in `folder` with these environment variables besides its own.
pub fn gristmill_with(folder: &Path, variables: &[(&str, &Path)], args: &[&str]) -> Ended {
    start(
        Start {
            folder,
            variables,
            ..Start::default()
        },
        args,
    )
}

/// Runs `gristmill ARGS`.
pub fn start(how: Start, args: &[&str]) -> Ended {
    let mut stdout = how.stdout.unwrap_or_else(scratch);
    let mut stderr = how.stderr.unwrap_or_else(scratch);
    let status = limited(binary(), how.shell)
        .args(args)
        .current_dir(how.folder)
        .envs(how.variables.iter().copied())
        .stdin(Stdio::null())
        .stdout(stdout.try_clone().expect("a file handle can be cloned"))
        .stderr(stderr.try_clone().expect("a file handle can be cloned"))
        .spawn()
        .map(wait)
        .expect("the binary that was just built starts");
    let code = status.and_then(|s| s.code());
    let status = status.map_or_else(
        || format!("still running after {HANG:?}"),
        |s| s.to_string(),
    );
    Ended {
        code,
        status,
        stdout: text(&mut stdout),
        stderr: text(&mut stderr),
    }
}

/// A `gristmill` in service; it is ended with this.
pub struct Serving {
    pub child: Child,
    /// The first line that it printed.
    pub line: String,
}

/// Starts `gristmill ARGS`, which serves until it is ended, and waits for its first line.
pub fn serving(folder: &Path, variables: &[(&str, &str)], args: &[&str]) -> Serving {
    let mut child = limited(binary(), "")
        .args(args)
        .current_dir(folder)
        .env("GRISTMILL_CACHE_DIR", "")
        .envs(variables.iter().copied())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .expect("the binary that was just built starts");
    let mut line = String::new();
    let stdout = child.stdout.take().expect("it is piped");
    let read = BufReader::new(stdout).read_line(&mut line);
    read.expect("a line is text");
    Serving { child, line }
}

impl Serving {
    /// Sends a signal, such as `TERM`.
    pub fn signal(&self, name: &str) {
        Serving::signal_to(self.child.id(), name);
    }

    /// Sends a signal to a process, which may have ended.
    pub fn signal_to(pid: u32, name: &str) {
        let command = format!("kill -{name} {pid} 2>/dev/null || true");
        let sent = Command::new("sh").arg("-c").arg(command).status();
        assert!(sent.expect("a shell starts").success());
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The command, under `ulimit` where there is one.
fn limited(program: &Path, commands: &str) -> Command {
    if cfg!(not(unix)) {
        return Command::new(program);
    }
    let mut shell = Command::new("sh");
    shell
        .arg("-c")
        .arg(format!(
            "ulimit -c 0; ulimit -v {ADDRESS_SPACE_KIB}; {commands}\nexec \"$0\" \"$@\""
        ))
        .arg(program);
    shell
}

fn wait(mut child: std::process::Child) -> Option<ExitStatus> {
    let started = Instant::now();
    while started.elapsed() < HANG {
        if let Some(status) = child.try_wait().expect("a child can be waited for") {
            return Some(status);
        }
        thread::sleep(Duration::from_millis(2));
    }
    child.kill().expect("a child can be ended");
    child.wait().expect("a child can be waited for");
    None
}

fn scratch() -> File {
    tempfile::tempfile().expect("the system has a folder for scratch files")
}

/// Everything written so far, if the file is a scratch file; bytes that are not UTF-8 are replaced.
fn text(file: &mut File) -> String {
    let mut bytes = Vec::new();
    if file.metadata().is_ok_and(|m| m.is_file()) {
        file.rewind()
            .and_then(|()| file.read_to_end(&mut bytes))
            .expect("a scratch file is readable");
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// The emulated CUDA driver, which was built beside this test.
pub fn emulated_driver() -> PathBuf {
    let file = format!(
        "{}gristmill_emulated_cuda{}",
        std::env::consts::DLL_PREFIX,
        std::env::consts::DLL_SUFFIX
    );
    let test = std::env::current_exe().expect("a process knows its executable");
    test.with_file_name(file)
}

/// The program, built as this test was.
fn binary() -> &'static Path {
    static BINARY: OnceLock<PathBuf> = OnceLock::new();
    BINARY.get_or_init(|| {
        let package = ["--package", "gristmill-cli", "--bin", "gristmill"];
        let folder = built(&[&package[..], &["--features", "emulator"]].concat());
        folder.join(format!("gristmill{}", std::env::consts::EXE_SUFFIX))
    })
}

/// The folder of the kit, built as this test was.
pub fn kit() -> &'static str {
    static KIT: OnceLock<PathBuf> = OnceLock::new();
    let folder = KIT.get_or_init(|| built(&["--package", "gristmill-kit"]));
    folder.to_str().expect("the checkout has a plain path")
}

/// Has cargo build some of the workspace in the profile of this test; gives the folder of the results.
fn built(flags: &[&str]) -> PathBuf {
    let test = std::env::current_exe().expect("a process knows its executable");
    let mut folders = test.ancestors().skip(2);
    let (profile, target) = (folders.next(), folders.next());
    let (profile, target) = profile
        .zip(target)
        .expect("tests stand in TARGET/PROFILE/deps");
    let name = profile
        .file_name()
        .and_then(|n| n.to_str())
        .expect("profiles have plain names");
    let mut cargo = Command::new(env!("CARGO"));
    // Variables of this test's own package: to build scripts that look at them, those of other packages would change with every build.
    let is_own = |name: &str| {
        let own = [
            "CARGO_PKG_",
            "CARGO_MANIFEST_",
            "CARGO_CRATE_",
            "CARGO_BIN_",
        ];
        own.iter().any(|prefix| name.starts_with(prefix))
    };
    for (name, _) in std::env::vars_os() {
        if name.to_str().is_some_and(is_own) {
            cargo.env_remove(name);
        }
    }
    let status = cargo
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .args(["build", "--quiet", "--locked"])
        .args(flags)
        .args(["--profile", if name == "debug" { "dev" } else { name }])
        .arg("--target-dir")
        .arg(target)
        .status()
        .expect("cargo is there: it runs this test");
    assert!(status.success(), "cargo build {flags:?} failed");
    profile.to_owned()
}
