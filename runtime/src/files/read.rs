//! Files that users name and that processes share: read up to a limit, and locked.

use std::fs::{self, File, FileType, OpenOptions};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

/// Largest TOML file that is read: the parser takes about eight times its size in memory.
pub const MAX_TOML_BYTES: u64 = 16 << 20;
/// Largest text of a graph, a plan, a task graph or measured times that is read.
pub const MAX_TEXT_BYTES: u64 = 1 << 30;
/// Largest message in the format of ONNX.
pub const MAX_MESSAGE_BYTES: u64 = 2 << 30;

/// Opens a regular file for reading. Anything else is refused before it is opened, since opening a pipe waits for a writer.
pub fn open(path: &Path) -> io::Result<File> {
    refuse_special(fs::metadata(path)?.file_type())?;
    let file = File::open(path)?;
    // The path may lead elsewhere by now.
    refuse_special(file.metadata()?.file_type())?;
    Ok(file)
}

/// The bytes of a regular file, or of a descriptor that this process has, such as the pipe of
/// `<(command)` in a shell. Errors when there are more than `limit_bytes`.
pub fn read(path: &Path, limit_bytes: u64) -> io::Result<Vec<u8>> {
    let file = match is_descriptor(path) {
        true => File::open(path)?,
        false => open(path)?,
    };
    refuse_large(file.metadata()?.len(), limit_bytes)?;
    let mut bytes = Vec::new();
    file.take(limit_bytes + 1).read_to_end(&mut bytes)?;
    refuse_large(bytes.len() as u64, limit_bytes)?;
    Ok(bytes)
}

/// True for a name of a descriptor: its pipe has a writer, or had one.
fn is_descriptor(path: &Path) -> bool {
    path.starts_with("/dev/fd") || path == Path::new("/dev/stdin")
}

/// The text of a file; see [`read`].
pub fn read_text(path: &Path, limit_bytes: u64) -> io::Result<String> {
    String::from_utf8(read(path, limit_bytes)?)
        .map_err(|e| io::Error::new(io::ErrorKind::InvalidData, format!("not UTF-8 text: {e}")))
}

fn refuse_large(n_bytes: u64, limit_bytes: u64) -> io::Result<()> {
    if n_bytes <= limit_bytes {
        return Ok(());
    }
    Err(io::Error::new(
        io::ErrorKind::FileTooLarge,
        format!("it has {n_bytes} bytes, at most {limit_bytes} are read"),
    ))
}

fn refuse_special(found: FileType) -> io::Result<()> {
    if found.is_file() {
        return Ok(());
    }
    let kind = match found {
        f if f.is_dir() => "a folder",
        f if f.is_symlink() => "a link",
        _ => "a pipe, socket or device",
    };
    Err(io::Error::new(
        io::ErrorKind::InvalidInput,
        format!("it is {kind}, not a regular file"),
    ))
}

/// Takes the lock of a file that processes change in turn, and waits for the process that holds it. Dropping the result releases it.
///
/// The lock is a file beside, which stays. It is never a link or a pipe, where that could be told.
pub fn lock(path: &Path) -> io::Result<File> {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".lock");
    let lock: PathBuf = path.with_file_name(name);
    match fs::symlink_metadata(&lock) {
        Ok(found) => refuse_special(found.file_type())?,
        Err(e) if e.kind() == io::ErrorKind::NotFound => {}
        Err(e) => return Err(e),
    }
    let file = OpenOptions::new()
        .create(true)
        .truncate(false)
        .write(true)
        .open(&lock)?;
    match file.lock() {
        // Some network file systems have no locks.
        Err(e) if e.kind() != io::ErrorKind::Unsupported => Err(e),
        _ => Ok(file),
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::folder;
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "writes files")]
    fn only_regular_files_below_the_limit_are_read() {
        let folder = folder("read");
        let path = folder.join("a");
        fs::write(&path, "text").unwrap();
        assert_eq!(read_text(&path, 4).unwrap(), "text");
        let e = read_text(&path, 3).unwrap_err().to_string();
        assert_eq!(e, "it has 4 bytes, at most 3 are read");
        let e = read_text(&folder, 3).unwrap_err().to_string();
        assert_eq!(e, "it is a folder, not a regular file");
        fs::write(&path, b"\xff").unwrap();
        let e = read_text(&path, 3).unwrap_err().to_string();
        assert!(e.contains("UTF-8"), "{e}");
        let missing = read(&folder.join("b"), 3).unwrap_err();
        assert_eq!(missing.kind(), io::ErrorKind::NotFound);
        fs::remove_dir_all(&folder).unwrap();
    }

    #[cfg(target_os = "linux")]
    #[test]
    #[cfg_attr(miri, ignore = "reads files")]
    fn devices_are_refused() {
        let e = read(Path::new("/dev/zero"), 3).unwrap_err().to_string();
        assert_eq!(e, "it is a pipe, socket or device, not a regular file");
    }

    #[test]
    #[cfg_attr(miri, ignore = "locks files")]
    fn a_lock_is_held_until_it_is_dropped() {
        let folder = folder("lock");
        let held = lock(&folder.join("a")).unwrap();
        let other = File::open(folder.join("a.lock")).unwrap();
        assert!(other.try_lock().is_err());
        drop(held);
        other.try_lock().unwrap();
        fs::remove_dir_all(&folder).unwrap();
    }

    #[cfg(unix)]
    #[test]
    #[cfg_attr(miri, ignore = "locks files")]
    fn a_lock_follows_no_link() {
        let folder = folder("linked-lock");
        let victim = folder.join("victim");
        std::os::unix::fs::symlink(&victim, folder.join("a.lock")).unwrap();
        let e = lock(&folder.join("a")).unwrap_err().to_string();
        assert_eq!(e, "it is a link, not a regular file");
        assert!(!victim.exists());
        fs::remove_dir_all(&folder).unwrap();
    }
}
