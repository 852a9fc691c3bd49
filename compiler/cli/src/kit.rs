//! The kit: executables and libraries that run an image once one is put into them. It is looked for where it was installed, and else built
//! from the checkout that this program is of.

use gristmill::cost::{Fnv, store};
use gristmill::{Error, Result};
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// A file of the kit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Template {
    /// An executable.
    Runner,
    /// A shared library.
    Library,
}

/// The system's library that a template has, or needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Linkage {
    /// Static, with musl.
    Musl,
    /// Static, with glibc.
    StaticGlibc,
    /// Shared, that of the machine.
    Shared,
}

impl Template {
    /// Its name in the kit.
    fn file_name(self) -> &'static str {
        match self {
            Template::Runner => "gristmill-runner",
            Template::Library => "libgristmill_kit.so",
        }
    }

    /// Ways to link it, the best first. A library goes into programs that have a C library.
    fn linkages(self) -> &'static [Linkage] {
        match self {
            Template::Runner => &[Linkage::Musl, Linkage::StaticGlibc, Linkage::Shared],
            Template::Library => &[Linkage::Shared],
        }
    }

    /// The argument of cargo that names it.
    fn target_flags(self) -> &'static [&'static str] {
        match self {
            Template::Runner => &["--bin", "gristmill-runner"],
            Template::Library => &["--lib"],
        }
    }
}

impl Linkage {
    fn name(self) -> &'static str {
        match self {
            Linkage::Musl => "musl",
            Linkage::StaticGlibc => "static",
            Linkage::Shared => "shared",
        }
    }

    /// The target triple on an architecture.
    fn triple(self, arch: &str) -> String {
        match self {
            Linkage::Musl => format!("{arch}-unknown-linux-musl"),
            Linkage::StaticGlibc | Linkage::Shared => format!("{arch}-unknown-linux-gnu"),
        }
    }

    fn rust_flags(self) -> &'static [&'static str] {
        match self {
            Linkage::Musl | Linkage::StaticGlibc => &["-Ctarget-feature=+crt-static"],
            Linkage::Shared => &[],
        }
    }
}

/// A template: in the folder `kit`, if one is given; else in that of the variable `GRISTMILL_KIT`, in the folder `gristmill-kit` beside this
/// program, in the cache, or built. `say` is called before it is built, which happens once.
///
/// Errors with `Unsupported` where there is none and it cannot be built, with the command that builds it.
pub fn find(template: Template, kit: Option<&Path>, say: &dyn Fn(&str)) -> Result<PathBuf> {
    let variable = std::env::var_os("GRISTMILL_KIT").filter(|v| !v.is_empty());
    if let Some(folder) = kit.map(Path::to_owned).or(variable.map(PathBuf::from)) {
        let path = folder.join(template.file_name());
        return match path.is_file() {
            true => Ok(path),
            false => {
                let message = format!("the kit has no file {}", path.display());
                Err(Error::invalid(message))
            }
        };
    }
    let program = std::env::current_exe().ok();
    let beside = program.and_then(|p| Some(p.parent()?.join("gristmill-kit")));
    let beside = beside.map(|folder| folder.join(template.file_name()));
    match beside.filter(|path| path.is_file()) {
        Some(path) => Ok(path),
        None => Checkout::here(template)?.template(template, say),
    }
}

/// All that the kit is made of.
const SOURCES: [&str; 7] = [
    "Cargo.toml",
    "Cargo.lock",
    "kernels/Cargo.toml",
    "kernels/src",
    "runtime/Cargo.toml",
    "runtime/src",
    "runtime/kit",
];

/// The sources that the kit is built from.
struct Checkout {
    root: PathBuf,
    /// A hash of all that it is made of.
    fingerprint: u64,
    /// Folder of kits that were built.
    cache: PathBuf,
}

impl Checkout {
    /// The checkout that this program was built from.
    ///
    /// Errors with `Unsupported` for a checkout that is not there any more, and without a cache folder.
    fn here(template: Template) -> Result<Checkout> {
        let absent = || {
            let name = template.file_name();
            let message = format!(
                "the kit of this program is not installed ({name}), and its sources are not there"
            );
            Error::unsupported(message).hint("--kit FOLDER, or GRISTMILL_KIT=FOLDER")
        };
        let package = Path::new(env!("CARGO_MANIFEST_DIR"));
        let root = package.ancestors().nth(2).ok_or_else(absent)?;
        let fingerprint = fingerprint(root).map_err(|_| absent())?;
        let cache = store::folder().ok_or_else(|| {
            let message = "no cache folder is known, which the kit is built in";
            Error::unsupported(message).hint("GRISTMILL_CACHE_DIR=FOLDER")
        })?;
        Ok(Checkout {
            root: root.to_owned(),
            fingerprint,
            cache: cache.join("kit"),
        })
    }

    /// The place of a template that was built.
    fn built(&self, template: Template) -> PathBuf {
        let folder = self.cache.join(format!("{:016x}", self.fingerprint));
        folder.join(template.file_name())
    }

    fn template(&self, template: Template, say: &dyn Fn(&str)) -> Result<PathBuf> {
        let built = self.built(template);
        if built.is_file() {
            return Ok(built);
        }
        let mut failures = Vec::new();
        let arch = std::env::consts::ARCH;
        for &linkage in template.linkages() {
            if !is_installed(&linkage.triple(arch)) {
                continue;
            }
            // Further ways are tried where the first fails; it is one build to a person.
            if failures.is_empty() {
                say(&format!("building {} (once)", template.file_name()));
            }
            match self.build(template, linkage) {
                Ok(path) => {
                    self.install(&path, &built)?;
                    return Ok(built);
                }
                Err(why) => failures.push(format!("{}: {why}", linkage.name())),
            }
        }
        let message = format!("the kit cannot be built: {}", failures.join("; "));
        let command = describe(&self.command(template, Linkage::Shared));
        let folder = self.results(Linkage::Shared);
        let hint = format!("{command}, then --kit {}", folder.display());
        Err(Error::unsupported(message).hint(hint))
    }

    /// The command that builds a template.
    fn command(&self, template: Template, linkage: Linkage) -> Command {
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        let mut command = Command::new(cargo);
        command
            .current_dir(&self.root)
            .args(["build", "--locked", "--offline", "--manifest-path"])
            .arg(self.root.join("Cargo.toml"))
            .args(["--package", "gristmill-kit"])
            .args([
                "--profile",
                "kit",
                "--target",
                &linkage.triple(std::env::consts::ARCH),
            ])
            .arg("--target-dir")
            .arg(self.target_dir(linkage))
            .args(template.target_flags())
            .env("CARGO_ENCODED_RUSTFLAGS", self.rust_flags(linkage));
        command
    }

    /// Compiler flags of a linkage, in cargo's form. They also replace paths of this machine in the kit. The user's own flags are not passed on:
    /// with `-Ctarget-cpu=native`, shipped programs would crash on other machines.
    fn rust_flags(&self, linkage: Linkage) -> String {
        let own = linkage.rust_flags().iter();
        let mut flags: Vec<String> = own.map(|&flag| flag.to_owned()).collect();
        for (folder, name) in private_folders(&self.root) {
            flags.push(format!("--remap-path-prefix={}={name}", folder.display()));
        }
        flags.join(&FLAG_SEPARATOR.to_string())
    }

    fn target_dir(&self, linkage: Linkage) -> PathBuf {
        self.cache.join(format!("build-{}", linkage.name()))
    }

    /// Builds a template; gives its place, or the first errors of cargo.
    fn build(&self, template: Template, linkage: Linkage) -> std::result::Result<PathBuf, String> {
        let mut command = self.command(template, linkage);
        let run = command.stdin(Stdio::null()).output();
        let output = run.map_err(|e| e.to_string())?;
        if !output.status.success() {
            let text = String::from_utf8_lossy(&output.stderr);
            let errors = text.lines().filter(|line| line.starts_with("error"));
            let errors: Vec<&str> = errors.take(3).collect();
            return Err(match errors.is_empty() {
                true => format!("cargo ended with {}", output.status),
                false => errors.join("; "),
            });
        }
        Ok(self.results(linkage).join(template.file_name()))
    }

    /// Copies a template to its place as a whole, since others may do the same.
    ///
    /// Errors when the sources are others than at the start: the template is then of neither.
    fn install(&self, from: &Path, to: &Path) -> Result<()> {
        let failed = |e: std::io::Error| Error::invalid(format!("{}: {e}", to.display()));
        // Read before the sources are looked at, since another process may build others to the same place.
        let bytes = fs::read(from).map_err(failed)?;
        let now = fingerprint(&self.root);
        if now.map_err(failed)? != self.fingerprint {
            let message = "the sources of the kit were changed while it was built";
            return Err(Error::invalid(message).hint("the same command once more"));
        }
        fs::create_dir_all(to.parent().unwrap_or(to)).map_err(failed)?;
        gristmill_runtime::files::replace(to, |file| std::io::Write::write_all(file, &bytes))
            .map_err(failed)
    }

    /// The folder that cargo puts a template into.
    fn results(&self, linkage: Linkage) -> PathBuf {
        let folder = self.target_dir(linkage);
        let folder = folder.join(linkage.triple(std::env::consts::ARCH));
        folder.join("kit")
    }
}

/// True for a target whose standard library Rust has here, and without an answer.
fn is_installed(triple: &str) -> bool {
    let flags = ["--print", "target-libdir", "--target", triple];
    let printed = rustc().args(flags).output();
    printed.map_or(true, |output| {
        let path = String::from_utf8_lossy(&output.stdout);
        Path::new(path.trim()).is_dir()
    })
}

/// Separates flags in the variable `CARGO_ENCODED_RUSTFLAGS`.
const FLAG_SEPARATOR: char = '\u{1f}';

/// Folders whose paths the messages of a panic would have, and the names that take their place.
fn private_folders(root: &Path) -> Vec<(PathBuf, &'static str)> {
    let home = std::env::var_os("HOME").map(PathBuf::from);
    let cargo = std::env::var_os("CARGO_HOME").map(PathBuf::from);
    let cargo = cargo.or_else(|| Some(home?.join(".cargo")));
    let mut rustc = rustc();
    let printed = rustc.args(["--print", "sysroot"]).output().ok();
    let sysroot = printed.and_then(|output| String::from_utf8(output.stdout).ok());
    let sysroot = sysroot.map(|path| PathBuf::from(path.trim()));
    let sysroot = sysroot.filter(|path| path.is_absolute());
    let others = [(cargo, "cargo"), (sysroot, "rust")];
    let others = others.map(|(path, name)| path.map(|path| (path, name)));
    let mut all = vec![(root.to_owned(), "gristmill")];
    all.extend(others.into_iter().flatten());
    // The last that fits counts; folders of sources are named after the registry they are from.
    let sources = all.iter().map(|(folder, _)| folder.join("registry/src"));
    let sources: Vec<_> = sources
        .filter_map(|folder| fs::read_dir(folder).ok())
        .collect();
    let sources = sources.into_iter().flatten().flatten();
    all.extend(sources.map(|entry| (entry.path(), "crates")));
    all
}

fn rustc() -> Command {
    Command::new(std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into()))
}

/// A hash of the sources of the kit.
fn fingerprint(root: &Path) -> std::io::Result<u64> {
    let mut hash = Fnv::default();
    for part in SOURCES {
        add(&root.join(part), part, &mut hash)?;
    }
    Ok(hash.value())
}

/// A command as a person types it.
fn describe(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    let words: Vec<_> = words.map(OsStr::to_string_lossy).collect();
    words.join(" ")
}

/// Adds names and contents of a file, or of all in a folder, in order; `name` is its path within the checkout.
fn add(path: &Path, name: &str, hash: &mut Fnv) -> std::io::Result<()> {
    if !path.is_dir() {
        *hash = hash.with(name.as_bytes()).with(&fs::read(path)?);
        return Ok(());
    }
    let entries = fs::read_dir(path)?.collect::<std::io::Result<Vec<_>>>()?;
    let mut names: Vec<_> = entries.iter().map(fs::DirEntry::file_name).collect();
    names.sort();
    names.iter().try_for_each(|entry| {
        let inner = format!("{name}/{}", entry.to_string_lossy());
        add(&path.join(entry), &inner, hash)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kit_of_changed_sources_is_not_installed() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        for part in SOURCES {
            fs::create_dir_all(root.join(part).parent().unwrap()).unwrap();
            fs::write(root.join(part), "before").unwrap();
        }
        let (built, installed) = (root.join("built"), root.join("cache/installed"));
        fs::write(&built, "a template").unwrap();
        let checkout = Checkout {
            root: root.to_owned(),
            fingerprint: fingerprint(root).unwrap(),
            cache: root.join("cache"),
        };
        checkout.install(&built, &installed).unwrap();
        assert_eq!(fs::read(&installed).unwrap(), b"a template");
        fs::remove_file(&installed).unwrap();
        fs::write(root.join(SOURCES[3]), "after").unwrap();
        let refused = checkout.install(&built, &installed).unwrap_err();
        assert!(
            refused.to_string().contains("were changed while"),
            "{refused}"
        );
        assert!(!installed.exists());
    }

    #[test]
    fn paths_of_the_machine_are_replaced() {
        let checkout = Checkout {
            root: "/a checkout".into(),
            fingerprint: 0,
            cache: PathBuf::new(),
        };
        let flags = checkout.rust_flags(Linkage::StaticGlibc);
        let flags: Vec<&str> = flags.split(FLAG_SEPARATOR).collect();
        let expected = [
            "-Ctarget-feature=+crt-static",
            "--remap-path-prefix=/a checkout=gristmill",
        ];
        assert_eq!(flags[..2], expected);
    }
}
