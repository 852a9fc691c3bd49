//! Compiled kernels on disk, from one process to the next.
//!
//! An entry is a file `ab/abcd..` named after the SHA-256 of everything that decides the result:
//! the source with its prelude, the options, the architecture, NVRTC's version and build, and this
//! compiler's version. It is a line of JSON, then the PTX, then the machine code. Entries are
//! written beside their place and renamed into it, so any number of processes may read and write at
//! once and none sees half an entry. An entry that cannot be read, or whose contents do not match
//! its checksum, counts as absent, with a warning. When the folder grows past its limit, the least
//! recently used entries are removed.

use super::{Compiled, Unit, resources};
use crate::cost::store;
use gristmill_runtime::files::{self, MAX_TEXT_BYTES};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::SystemTime;

/// Format of the entries, and version of the generated code.
const FORMAT: &str = concat!("gristmill/cuda/1 of ", env!("CARGO_PKG_VERSION"));

/// Size above which the least recently used entries are removed, and the size that is left.
const LIMIT_BYTES: u64 = 512 << 20;
const KEPT_BYTES: u64 = 384 << 20;

/// Entries that one process writes between two checks of the folder's size.
const WRITES_PER_LOOK: u64 = 256;

/// A folder of compiled kernels.
pub struct Cache {
    folder: PathBuf,
    written: AtomicU64,
    warnings: Mutex<Vec<String>>,
}

/// The first line of an entry.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Head {
    format: String,
    key: String,
    ptx_bytes: usize,
    cubin_bytes: usize,
    /// Of PTX and machine code together.
    sha256: String,
    log: String,
    compile_ns: u64,
}

/// Name of the entry of a unit.
pub(super) fn key(unit: &Unit, options: &[String], build: &str) -> String {
    let mut options: Vec<&str> = options.iter().map(String::as_str).collect();
    options.sort_unstable();
    let arch = unit.arch.to_string();
    let mut parts = vec![FORMAT, build, &arch, &unit.name, &unit.source];
    parts.extend(options);
    // Lengths keep the parts apart.
    let text: String = parts.iter().map(|p| format!("{} {p}\n", p.len())).collect();
    sha256(text.as_bytes())
}

/// SHA-256 of a message in hexadecimal digits.
pub(super) fn sha256(message: &[u8]) -> String {
    let digest = Sha256::digest(message);
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}

impl Cache {
    /// A cache in a folder, which is made when the first entry is written.
    pub fn new(folder: PathBuf) -> Cache {
        Cache {
            folder,
            written: AtomicU64::new(0),
            warnings: Mutex::new(Vec::new()),
        }
    }

    /// The one in the user's cache folder; none when that is turned off.
    pub fn of_user() -> Option<Cache> {
        Some(Cache::new(store::folder()?.join("cuda")))
    }

    /// Takes the warnings since the last call: entries that were ignored, or could not be written.
    pub fn take_warnings(&self) -> Vec<String> {
        std::mem::take(&mut self.warnings.lock().unwrap_or_else(|p| p.into_inner()))
    }

    fn warn(&self, message: String) {
        let mut warnings = self.warnings.lock().unwrap_or_else(|p| p.into_inner());
        // A folder that cannot be written would say the same for every kernel.
        if warnings.len() < 8 {
            warnings.push(message);
        }
    }

    pub(super) fn path(&self, key: &str) -> PathBuf {
        self.folder.join(&key[..2]).join(key)
    }

    pub(super) fn get(&self, key: &str) -> Option<Compiled> {
        let path = self.path(key);
        let bytes = match files::read(&path, MAX_TEXT_BYTES) {
            Ok(bytes) => bytes,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return None,
            Err(e) => {
                self.warn(format!(
                    "{}: {e}; the kernel is compiled again",
                    path.display()
                ));
                return None;
            }
        };
        match parse(&bytes, key) {
            Ok(compiled) => {
                // Used now; where this cannot be noted, the entry only goes earlier.
                let _ = std::fs::File::open(&path).and_then(|f| f.set_modified(SystemTime::now()));
                Some(compiled)
            }
            Err(why) => {
                self.warn(format!(
                    "{}: {why}; the kernel is compiled again",
                    path.display()
                ));
                None
            }
        }
    }

    pub(super) fn put(&self, key: &str, compiled: &Compiled) {
        let path = self.path(key);
        if let Err(e) = self.write(&path, &print(key, compiled)) {
            self.warn(format!(
                "{}: {e}; compiled kernels are not kept",
                path.display()
            ));
            return;
        }
        if self
            .written
            .fetch_add(1, Ordering::Relaxed)
            .is_multiple_of(WRITES_PER_LOOK)
        {
            self.shrink(LIMIT_BYTES, KEPT_BYTES);
        }
    }

    fn write(&self, path: &Path, bytes: &[u8]) -> std::io::Result<()> {
        std::fs::create_dir_all(path.parent().unwrap_or(&self.folder))?;
        files::replace_entry(path, |file| file.write_all(bytes))
    }

    /// Removes the least recently used entries until `kept` bytes are left, if there are more than
    /// `limit`. Entries that another process removes meanwhile are skipped.
    pub(super) fn shrink(&self, limit: u64, kept: u64) {
        let list = |folder: &Path| std::fs::read_dir(folder).into_iter().flatten().flatten();
        let mut entries: Vec<(SystemTime, PathBuf, u64)> = (list(&self.folder)
            .flat_map(|e| list(&e.path())))
        .filter_map(|e| {
            e.metadata()
                .ok()
                .and_then(|m| Some((m.modified().ok()?, e.path(), m.len())))
        })
        .collect();
        let mut bytes: u64 = entries.iter().map(|e| e.2).sum();
        if bytes <= limit {
            return;
        }
        entries.sort();
        for (_, path, size) in entries {
            if bytes <= kept {
                return;
            }
            if std::fs::remove_file(path).is_ok() {
                bytes -= size;
            }
        }
    }
}

fn print(key: &str, compiled: &Compiled) -> Vec<u8> {
    let payload = [compiled.ptx.as_bytes(), &compiled.cubin].concat();
    let head = Head {
        format: FORMAT.to_owned(),
        key: key.to_owned(),
        ptx_bytes: compiled.ptx.len(),
        cubin_bytes: compiled.cubin.len(),
        sha256: sha256(&payload),
        log: compiled.log.clone(),
        compile_ns: compiled.compile_ns,
    };
    let mut bytes = serde_json::to_vec(&head).expect("a struct of texts and numbers serialises");
    bytes.push(b'\n');
    bytes.extend(payload);
    bytes
}

fn parse(bytes: &[u8], key: &str) -> Result<Compiled, String> {
    let end = bytes
        .iter()
        .position(|&b| b == b'\n')
        .ok_or("it has no head")?;
    let head: Head = serde_json::from_slice(&bytes[..end]).map_err(|e| format!("its head: {e}"))?;
    if head.format != FORMAT || head.key != key {
        return Err(format!(
            "format {:?} and key {:?} are another entry's",
            head.format, head.key
        ));
    }
    let payload = &bytes[end + 1..];
    if head.ptx_bytes.checked_add(head.cubin_bytes) != Some(payload.len())
        || sha256(payload) != head.sha256
    {
        return Err("its contents do not match its checksum".to_owned());
    }
    let (ptx, cubin) = payload.split_at(head.ptx_bytes);
    let ptx = String::from_utf8(ptx.to_vec()).map_err(|e| e.to_string())?;
    let resources = resources::parse(&head.log);
    Ok(Compiled {
        ptx,
        cubin: cubin.to_vec(),
        log: head.log,
        resources,
        compile_ns: head.compile_ns,
    })
}
