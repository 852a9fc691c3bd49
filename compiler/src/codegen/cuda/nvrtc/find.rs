//! Where NVRTC may be, and opening it.
//!
//! In order: `$GRISTMILL_NVRTC` (a library, or its folder; set but empty: none is used); the loader's own paths; `lib64` and
//! `lib` under `$CUDA_HOME` and `$CUDA_PATH`; the toolkits under `/usr/local`; `$CONDA_PREFIX/lib`; the wheels `nvidia-cuda-nvrtc` and
//! `nvidia-cuda-nvrtc-cu12` in the packages of `$VIRTUAL_ENV` and of the `python3` on the path. The library finds its built-in functions, a
//! second library, only when that is open already or on the loader's paths: it is opened first, from the same folder.
//!
//! A driver takes no code of a compiler of a later major version: where there is a driver, compilers up to its major are looked for
//! first, everywhere, and later ones, which are good for the emulator, only then.
//!
//! cudarc opens NVRTC by its names alone. A library that was found is opened first, so that its soname leads cudarc to it, and is taken only if it
//! does ([`gristmill_runtime::cuda::Bindings`]).

use super::program::Failure;
use super::sys::{Api, BINDINGS};
use libloading::Library;
use std::error::Error as _;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Known versions, best first.
const MAJORS: [u32; 2] = [13, 12];

/// Folders of the wheels below a folder of Python packages.
const WHEELS: [&str; 2] = ["nvidia/cu13/lib", "nvidia/cuda_nvrtc/lib"];

/// An opened library and the place it came from.
pub(super) struct Found {
    pub(super) api: Api,
    pub(super) place: String,
    pub(super) version: (u32, u32),
    /// The library, after its dependencies.
    _libraries: Vec<Library>,
}

/// A place to look in.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Place {
    /// A name for the loader.
    Name(String),
    /// A library.
    File(PathBuf),
    /// A folder, if it holds one.
    Folder(PathBuf),
}

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Place::Name(name) => write!(f, "{name} on the loader's paths"),
            Place::File(path) | Place::Folder(path) => write!(f, "{}", path.display()),
        }
    }
}

/// Value of an environment variable.
pub(super) type Environment<'a> = &'a dyn Fn(&str) -> Option<OsString>;

/// Opens the first usable library; otherwise one line per place with the reason.
/// `driver` is the driver's major version, if there is one.
pub(super) fn find(env: Environment, driver: Option<u32>) -> Result<Found, Vec<String>> {
    let [fitting, later] = by_driver(driver);
    let found = find_among(env, &fitting);
    if later.is_empty() || found.is_ok() {
        found
    } else {
        find_among(env, &later).or(found)
    }
}

/// The versions whose code the driver takes, then the others.
fn by_driver(driver: Option<u32>) -> [Vec<u32>; 2] {
    let (fitting, later) = MAJORS.iter().partition(|m| driver.is_none_or(|d| **m <= d));
    [fitting, later]
}

/// The same for some major versions.
fn find_among(env: Environment, majors: &[u32]) -> Result<Found, Vec<String>> {
    let open = |place: &Place| open(place, majors);
    if let Some(own) = env("GRISTMILL_NVRTC") {
        if own.is_empty() {
            return Err(vec![
                "$GRISTMILL_NVRTC is empty, which turns NVRTC off".to_owned(),
            ]);
        }
        // A path named by the user is used or refused, never replaced.
        let path = PathBuf::from(own);
        let place = if path.is_dir() {
            Place::Folder(path)
        } else {
            Place::File(path)
        };
        return open(&place).map_err(|why| vec![format!("$GRISTMILL_NVRTC: {place}: {why}")]);
    }
    let mut tried = Vec::new();
    let mut first = |places: Vec<Place>| {
        places.iter().find_map(|p| {
            open(p)
                .map_err(|why| tried.push(format!("{p}: {why}")))
                .ok()
        })
    };
    if let Some(found) = first(installed(env, majors)) {
        return Ok(found);
    }
    // Asking Python takes some tens of milliseconds, so it comes last.
    match python_packages() {
        Ok(folders) => first(wheels(&folders)).ok_or(tried),
        Err(why) => {
            tried.push(format!("packages of python3: {why}"));
            Err(tried)
        }
    }
}

/// Every place but the packages of the Python on the path.
fn installed(env: Environment, majors: &[u32]) -> Vec<Place> {
    let mut places: Vec<Place> = majors
        .iter()
        .map(|m| Place::Name(format!("libnvrtc.so.{m}")))
        .collect();
    // The first name that cudarc tries: where a toolkit has it, it is the one that can be used.
    places.push(Place::Name("libnvrtc.so".to_owned()));
    let folder = |name: &str| env(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    for home in ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(folder) {
        places.extend(["lib64", "lib"].map(|lib| Place::Folder(home.join(lib))));
    }
    places.extend(
        toolkits(Path::new("/usr/local"))
            .into_iter()
            .map(|t| Place::Folder(t.join("lib64"))),
    );
    places.extend(folder("CONDA_PREFIX").map(|p| Place::Folder(p.join("lib"))));
    if let Some(venv) = folder("VIRTUAL_ENV") {
        places.extend(wheels(&virtual_packages(&venv)));
    }
    places
}

/// `cuda`, then `cuda-*` with greater versions first.
fn toolkits(root: &Path) -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> = entries(root, |name| name.starts_with("cuda-"));
    found.sort_by_key(|p| {
        let version = p
            .to_string_lossy()
            .rsplit('-')
            .next()
            .unwrap_or_default()
            .to_owned();
        std::cmp::Reverse(
            version
                .split('.')
                .map(|n| n.parse::<u32>().unwrap_or(0))
                .collect::<Vec<_>>(),
        )
    });
    [root.join("cuda")].into_iter().chain(found).collect()
}

fn virtual_packages(venv: &Path) -> Vec<PathBuf> {
    let pythons = entries(&venv.join("lib"), |name| name.starts_with("python3"));
    pythons
        .into_iter()
        .map(|p| p.join("site-packages"))
        .collect()
}

fn wheels(packages: &[PathBuf]) -> Vec<Place> {
    packages
        .iter()
        .flat_map(|p| WHEELS.map(|w| Place::Folder(p.join(w))))
        .collect()
}

/// Folders of modules of the `python3` on the path.
fn python_packages() -> Result<Vec<PathBuf>, String> {
    let asked = Command::new("python3")
        .args(["-c", "import sys; print('\\n'.join(sys.path))"])
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .output();
    let output = asked.map_err(|e| format!("python3 does not start: {e}"))?;
    let text = String::from_utf8_lossy(&output.stdout);
    Ok(text
        .lines()
        .map(PathBuf::from)
        .filter(|p| p.is_absolute() && p.is_dir())
        .collect())
}

/// Entries of a folder whose names `takes` accepts, sorted; none when it cannot be read.
fn entries(folder: &Path, takes: impl Fn(&str) -> bool) -> Vec<PathBuf> {
    let listed = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut found: Vec<PathBuf> = listed
        .filter(|e| takes(&e.file_name().to_string_lossy()))
        .map(|e| e.path())
        .collect();
    found.sort();
    found
}

/// The file of a place, of one of these versions.
fn library(place: &Place, majors: &[u32]) -> Result<PathBuf, String> {
    match place {
        Place::Name(name) => Ok(PathBuf::from(name)),
        Place::File(path) if path.is_file() => Ok(path.clone()),
        Place::File(_) => Err("no such file".to_owned()),
        Place::Folder(folder) => {
            let in_folder = majors
                .iter()
                .map(|m| folder.join(format!("libnvrtc.so.{m}")));
            let wanted = || {
                majors
                    .iter()
                    .map(u32::to_string)
                    .collect::<Vec<_>>()
                    .join(" or .")
            };
            in_folder
                .into_iter()
                .find(|p| p.is_file())
                .ok_or_else(|| format!("no libnvrtc.so.{} there", wanted()))
        }
    }
}

fn open(place: &Place, majors: &[u32]) -> Result<Found, String> {
    let library = library(place, majors)?;
    let beside = match place {
        Place::Name(_) => Vec::new(),
        _ => builtins(&library),
    };
    let mut libraries = Vec::new();
    for path in beside.iter().chain([&library]) {
        // SAFETY: opening a library runs its constructors; these are NVIDIA's, at a place that the user's system or variables name.
        libraries.push(unsafe { Library::new(path) }.map_err(|e| reason(&e))?);
    }
    let own = libraries.last().expect("the library was opened");
    // SAFETY: a library of this name is NVRTC.
    let version = unsafe { Api::resolve(own) }.and_then(|api| version(&api, majors))?;
    let shared = BINDINGS.library(own)?;
    // SAFETY: the same library, which cudarc never closes.
    let api = unsafe { Api::resolve(shared) }?;
    let place = match place {
        Place::Name(name) => name.clone(),
        _ => library.display().to_string(),
    };
    Ok(Found {
        api,
        place,
        version,
        _libraries: libraries,
    })
}

/// The loader's reason, which is the source of the error.
fn reason(e: &libloading::Error) -> String {
    let text = e.source().map_or_else(|| e.to_string(), |s| s.to_string());
    format!("cannot be opened: {text}")
}

/// Errors with the version when it is none of these.
fn version(api: &Api, majors: &[u32]) -> Result<(u32, u32), String> {
    let broken = |f: Failure| format!("{} failed: {}", f.call, f.message);
    let (major, minor) = api.get_version().map_err(broken)?;
    if majors.contains(&major) {
        return Ok((major, minor));
    }
    let wanted: Vec<String> = majors.iter().map(u32::to_string).collect();
    let wanted = wanted.join(" or ");
    Err(format!(
        "it is NVRTC {major}.{minor}; version {wanted} is needed"
    ))
}

/// The built-in functions beside a library. Wheels hold a second set under names with `alt`.
fn builtins(library: &Path) -> Vec<PathBuf> {
    let Some(folder) = library.parent() else {
        return Vec::new();
    };
    entries(folder, |name| {
        name.starts_with("libnvrtc-builtins.so.") && !name.contains(".alt.")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_that_was_named_is_used_or_refused() {
        let absent = |name: &str| {
            (name == "GRISTMILL_NVRTC").then(|| OsString::from("no/such/libnvrtc.so.13"))
        };
        let tried = find(&absent, None).err().expect("there is no such file");
        assert_eq!(
            tried,
            ["$GRISTMILL_NVRTC: no/such/libnvrtc.so.13: no such file"]
        );
        let off = |name: &str| (name == "GRISTMILL_NVRTC").then(OsString::new);
        let tried = find(&off, Some(12)).err().expect("it is turned off");
        assert_eq!(tried, ["$GRISTMILL_NVRTC is empty, which turns NVRTC off"]);
    }

    #[test]
    fn places_in_order() {
        let folder = tempfile::tempdir().unwrap();
        let packages = folder.path().join("lib/python3.11/site-packages");
        std::fs::create_dir_all(&packages).unwrap();
        let venv = folder.path().to_path_buf();
        let env = move |name: &str| match name {
            "CUDA_HOME" => Some(OsString::from("/a")),
            "CUDA_PATH" => Some(OsString::from("/b")),
            "CONDA_PREFIX" => Some(OsString::from("/c")),
            "VIRTUAL_ENV" => Some(venv.clone().into_os_string()),
            _ => None,
        };
        let text: Vec<String> = installed(&env, &MAJORS)
            .iter()
            .map(Place::to_string)
            .collect();
        let position = |want: &str| {
            text.iter()
                .position(|t| t == want)
                .unwrap_or_else(|| panic!("{want}: {text:?}"))
        };
        let wheel = packages.join("nvidia/cu13/lib").display().to_string();
        let order = [
            "libnvrtc.so.13 on the loader's paths",
            "libnvrtc.so.12 on the loader's paths",
            "libnvrtc.so on the loader's paths",
            "/a/lib64",
            "/b/lib64",
            "/usr/local/cuda/lib64",
            "/c/lib",
            &wheel,
        ];
        assert!(order.map(position).is_sorted(), "{text:?}");
    }

    /// Both versions in one folder: the one that the driver takes, and the other where that is not there.
    #[test]
    fn the_driver_chooses_the_major_version() {
        let folder = tempfile::tempdir().unwrap();
        let add = |major: u32| {
            std::fs::write(folder.path().join(format!("libnvrtc.so.{major}")), "text").unwrap()
        };
        let chosen = |driver: Option<u32>| {
            let place = Place::Folder(folder.path().to_path_buf());
            let file = by_driver(driver)
                .iter()
                .find_map(|majors| library(&place, majors).ok())?;
            Some(file.file_name()?.to_string_lossy().into_owned())
        };
        assert_eq!(chosen(Some(12)), None);
        add(13);
        assert_eq!(
            chosen(Some(12)).as_deref(),
            Some("libnvrtc.so.13"),
            "for the emulator"
        );
        add(12);
        for (driver, expected) in [
            (None, "13"),
            (Some(13), "13"),
            (Some(14), "13"),
            (Some(12), "12"),
        ] {
            assert_eq!(
                chosen(driver),
                Some(format!("libnvrtc.so.{expected}")),
                "driver {driver:?}"
            );
        }
    }

    #[test]
    fn newer_toolkits_come_first() {
        let root = tempfile::tempdir().unwrap();
        for name in ["cuda-9.2", "cuda-12.4", "cuda-12.10", "other"] {
            std::fs::create_dir(root.path().join(name)).unwrap();
        }
        let found = toolkits(root.path());
        let names: Vec<_> = found
            .iter()
            .map(|p| p.file_name().unwrap().to_string_lossy().into_owned())
            .collect();
        assert_eq!(names, ["cuda", "cuda-12.10", "cuda-12.4", "cuda-9.2"]);
    }

    #[test]
    fn a_folder_without_the_library_says_so() {
        let folder = tempfile::tempdir().unwrap();
        let why = open(&Place::Folder(folder.path().to_path_buf()), &MAJORS)
            .err()
            .expect("it is empty");
        assert_eq!(why, "no libnvrtc.so.13 or .12 there");
        let file = folder.path().join("libnvrtc.so.13");
        std::fs::write(&file, "not a library").unwrap();
        let why = open(&Place::Folder(folder.path().to_path_buf()), &MAJORS)
            .err()
            .expect("it is text");
        assert!(why.starts_with("cannot be opened: "), "{why}");
        assert!(!why.ends_with("dlopen failed"), "{why}");
    }
}
