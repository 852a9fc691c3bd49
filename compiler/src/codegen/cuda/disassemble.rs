//! Machine code as text, through NVIDIA's `nvdisasm` where it is installed.

use super::nvrtc::Nvrtc;
use crate::error::{Error, Result};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

/// The disassembly of a cubin. `nvdisasm` is looked for in `$GRISTMILL_NVDISASM`, beside NVRTC as wheels and toolkits have it, under
/// `$CUDA_HOME` and `$CUDA_PATH`, and on the path.
///
/// Errors with `Unsupported` when there is none, naming where it was looked for.
pub fn disassemble(nvrtc: &Nvrtc, cubin: &[u8]) -> Result<String> {
    let program = find(nvrtc)?;
    let fail = |what: &str, e: &dyn std::fmt::Display| {
        Error::internal(format!("{}: {what}: {e}", program.display()))
    };
    let file = Temporary::new(cubin).map_err(|e| fail("writing the machine code", &e))?;
    let output = Command::new(&program)
        .arg("-c")
        .arg(&file.0)
        .output()
        .map_err(|e| fail("starting", &e))?;
    if !output.status.success() {
        return Err(fail("failed", &String::from_utf8_lossy(&output.stderr)));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// A file that goes with its owner.
struct Temporary(PathBuf);

impl Temporary {
    fn new(bytes: &[u8]) -> std::io::Result<Temporary> {
        static SERIAL: AtomicU32 = AtomicU32::new(0);
        let serial = SERIAL.fetch_add(1, Ordering::Relaxed);
        let path =
            std::env::temp_dir().join(format!("gristmill-{}-{serial}.cubin", std::process::id()));
        std::fs::OpenOptions::new()
            .write(true)
            .create_new(true)
            .open(&path)?;
        let file = Temporary(path);
        std::fs::write(&file.0, bytes)?;
        Ok(file)
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

fn find(nvrtc: &Nvrtc) -> Result<PathBuf> {
    if let Some(own) = std::env::var_os("GRISTMILL_NVDISASM") {
        // A path named by the user is used or refused, never replaced.
        let path = PathBuf::from(own);
        let absent = || {
            Error::unsupported(format!(
                "$GRISTMILL_NVDISASM: {}: no such file",
                path.display()
            ))
        };
        return if path.is_file() {
            Ok(path)
        } else {
            Err(absent())
        };
    }
    let beside = Path::new(nvrtc.place())
        .parent()
        .and_then(Path::parent)
        .map(|p| p.join("bin"));
    let homes = ["CUDA_HOME", "CUDA_PATH"]
        .into_iter()
        .filter_map(std::env::var_os)
        .map(|h| PathBuf::from(h).join("bin"));
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = beside
        .into_iter()
        .chain(homes)
        .chain(std::env::split_paths(&path));
    let mut candidates = folders.map(|f| f.join("nvdisasm"));
    candidates.find(|p| p.is_file()).ok_or_else(|| {
        Error::unsupported(
            "nvdisasm was not found beside NVRTC, under $CUDA_HOME and $CUDA_PATH, or on the path",
        )
        .hint("pip install nvidia-cuda-nvdisasm, or GRISTMILL_NVDISASM with its path")
    })
}
