//! Files that are replaced as a whole: readers see the old content or the new one, never a part. They are read up to a limit.

mod kind;
mod read;

pub use kind::Kind;
pub use read::{MAX_MESSAGE_BYTES, MAX_TEXT_BYTES, MAX_TOML_BYTES, lock, open, read, read_text};

use std::fs::{self, File, Metadata, OpenOptions, Permissions, TryLockError};
use std::hash::{BuildHasher, RandomState};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

/// Writes a file beside `path` and renames it to `path` once `write` has succeeded.
///
/// An error leaves `path` as it is, and no other file. A link keeps pointing to the same file, which is
/// replaced. Devices, pipes, and open files without a name cannot be replaced, and are written directly.
pub fn replace(
    path: &Path,
    write: impl FnOnce(&mut BufWriter<File>) -> io::Result<()>,
) -> io::Result<()> {
    let (target, existing, is_replaced) = target_of(path);
    if !is_replaced {
        return write_to(OpenOptions::new().write(true).open(&target)?, write);
    }
    let permissions = existing.map(|m| m.permissions());
    replace_target(&target, permissions, write)
}

/// A file for reading and writing that has no name: it is gone when all that have it open or mapped are, however they end. It is on the disk
/// of `path`, beside the file that [`replace`] would replace; where that is a device or a pipe, in the folder of temporary files. A folder is an
/// error.
pub fn nameless(path: &Path) -> io::Result<File> {
    let (target, existing, is_replaced) = target_of(path);
    if existing.is_some_and(|metadata| metadata.is_dir()) {
        return Err(io::ErrorKind::IsADirectory.into());
    }
    let (name, file) = match is_replaced {
        true => create_beside(&target)?,
        false => create_beside(&std::env::temp_dir().join("gristmill"))?,
    };
    fs::remove_file(name)?;
    Ok(file)
}

/// True when both paths lead to one file that exists.
pub fn is_same(a: &Path, b: &Path) -> bool {
    match (a.canonicalize(), b.canonicalize()) {
        (Ok(a), Ok(b)) => a == b,
        _ => false,
    }
}

/// The file that a path leads to, its properties if there is one, and whether it can be replaced: an open file that was removed, as standard
/// output may be, has no name that could lead to another.
fn target_of(path: &Path) -> (PathBuf, Option<Metadata>, bool) {
    let canonical = fs::canonicalize(path);
    let existing = fs::metadata(canonical.as_deref().unwrap_or(path)).ok();
    let is_replaced = match &existing {
        Some(metadata) => metadata.is_file() && canonical.is_ok(),
        None => true,
    };
    let target = canonical.unwrap_or_else(|_| path.to_owned());
    (target, existing, is_replaced)
}

/// The same as [`replace`] for folders in which others may put links: whatever is at `path` is replaced itself, and nothing that it leads to is changed.
pub fn replace_entry(
    path: &Path,
    write: impl FnOnce(&mut BufWriter<File>) -> io::Result<()>,
) -> io::Result<()> {
    replace_target(path, None, write)
}

fn replace_target(
    target: &Path,
    permissions: Option<Permissions>,
    write: impl FnOnce(&mut BufWriter<File>) -> io::Result<()>,
) -> io::Result<()> {
    let (beside, file, _lock) = create_locked(target)?;
    let written = write_to(file, write)
        .and_then(|()| match permissions {
            Some(permissions) => fs::set_permissions(&beside, permissions),
            None => Ok(()),
        })
        .and_then(|()| fs::rename(&beside, target));
    // The first error is the one to report.
    written.inspect_err(|_| drop(fs::remove_file(&beside)))
}

fn write_to(
    file: File,
    write: impl FnOnce(&mut BufWriter<File>) -> io::Result<()>,
) -> io::Result<()> {
    let mut file = BufWriter::new(file);
    let written = write(&mut file).and_then(|()| file.flush());
    // Bytes left in the buffer after an error are not worth another attempt.
    drop(file.into_parts());
    written
}

/// Attempts at a free name. Names are random, so that more than one attempt means trouble.
const MAX_ATTEMPTS: usize = 16;

/// Creates a file in the folder of `path`, under a name that nobody can foresee. Never opens a file or link that is there.
fn create_beside(path: &Path) -> io::Result<(PathBuf, File)> {
    let mut taken = io::Error::from(io::ErrorKind::AlreadyExists);
    for attempt in 0..MAX_ATTEMPTS {
        let random = RandomState::new().hash_one(attempt);
        let beside = path.with_file_name(format!(".gristmill-{random:016x}.new"));
        let mut new = OpenOptions::new();
        match new.read(true).write(true).create_new(true).open(&beside) {
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => taken = e,
            opened => return Ok((beside, opened?)),
        }
    }
    Err(taken)
}

/// Creates a file as [`create_beside`] does, with a lock that [`remove_unfinished`] respects. None where files have no locks.
///
/// The lock is of a handle of its own: the one for writing is closed before the file gets its name, since a program that is open for writing
/// cannot be started.
fn create_locked(path: &Path) -> io::Result<(PathBuf, File, Option<File>)> {
    let mut removed = io::Error::from(io::ErrorKind::NotFound);
    for _ in 0..MAX_ATTEMPTS {
        let (beside, file) = create_beside(path)?;
        match lock_unfinished(&beside) {
            Ok(lock) => return Ok((beside, file, lock)),
            // Another process has taken it for a file that was left behind.
            Err(e) => removed = e,
        }
    }
    Err(removed)
}

/// The lock of an unfinished file, until it is dropped. None where files have no locks. Errors when another process has it, and when the file is
/// gone.
fn lock_unfinished(beside: &Path) -> io::Result<Option<File>> {
    // Elsewhere, a lock keeps other handles of the same process from writing.
    if cfg!(not(unix)) {
        return Ok(None);
    }
    let file = File::open(beside)?;
    match file.try_lock() {
        Ok(()) => fs::symlink_metadata(beside).map(|_| Some(file)),
        Err(TryLockError::WouldBlock) => Err(io::ErrorKind::WouldBlock.into()),
        Err(TryLockError::Error(_)) => Ok(None),
    }
}

/// Removes the unfinished files that killed processes have left in a folder. Files that a process still writes stay; so do all where files
/// have no locks. A missing folder has none.
pub fn remove_unfinished(folder: &Path) -> io::Result<()> {
    let entries = match fs::read_dir(folder) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        entries => entries?,
    };
    for entry in entries {
        let entry = entry?;
        let name = entry.file_name();
        let is_ours = name.to_str().is_some_and(is_beside) && entry.file_type()?.is_file();
        // A file that is locked or gone is another process's.
        if is_ours && let Ok(Some(_lock)) = lock_unfinished(&entry.path()) {
            match fs::remove_file(entry.path()) {
                Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
                _ => {}
            }
        }
    }
    Ok(())
}

/// Removes unfinished files as [`remove_unfinished`] does, in the folder where [`replace`] leaves those of `path`.
pub fn remove_unfinished_beside(path: &Path) -> io::Result<()> {
    let (target, _, is_replaced) = target_of(path);
    if !is_replaced {
        return Ok(());
    }
    let folder = target.parent().filter(|p| !p.as_os_str().is_empty());
    remove_unfinished(folder.unwrap_or(Path::new(".")))
}

/// True for a name that [`create_beside`] gives.
fn is_beside(name: &str) -> bool {
    let random = name.strip_prefix(".gristmill-");
    let random = random.and_then(|name| name.strip_suffix(".new"));
    random.is_some_and(|r| r.len() == 16 && r.bytes().all(|b| b.is_ascii_hexdigit()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An empty folder of the test's own.
    pub fn folder(name: &str) -> PathBuf {
        let folder = std::env::temp_dir().join(format!("gristmill-{name}-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        folder
    }

    fn names(folder: &Path) -> Vec<std::ffi::OsString> {
        let mut names: Vec<_> = fs::read_dir(folder)
            .unwrap()
            .map(|e| e.unwrap().file_name())
            .collect();
        names.sort();
        names
    }

    #[test]
    #[cfg_attr(miri, ignore = "writes files")]
    fn a_failed_write_leaves_the_old_file_and_no_other() {
        let folder = folder("failed-write");
        let path = folder.join("a");
        let fail = |file: &mut BufWriter<File>| {
            file.write_all(b"half")?;
            Err(io::ErrorKind::StorageFull.into())
        };
        assert!(replace(&path, fail).is_err());
        assert!(names(&folder).is_empty());

        replace(&path, |file| file.write_all(b"old")).unwrap();
        assert!(replace(&path, fail).is_err());
        assert_eq!(fs::read(&path).unwrap(), b"old");
        replace(&path, |file| file.write_all(b"new")).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"new");
        assert_eq!(names(&folder), ["a"]);
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    #[cfg(unix)]
    #[cfg_attr(miri, ignore = "locks files")]
    fn unfinished_files_are_removed_unless_they_are_in_the_making() {
        let folder = folder("unfinished");
        let path = folder.join("a");
        for name in [".gristmill-0123456789abcdef.new", ".gristmill-mine.new"] {
            fs::write(folder.join(name), "half").unwrap();
        }
        replace(&path, |file| {
            file.write_all(b"whole")?;
            assert_eq!(names(&folder).len(), 3);
            remove_unfinished_beside(&path)?;
            assert_eq!(names(&folder).len(), 2);
            file.write_all(b", too")
        })
        .unwrap();
        assert_eq!(names(&folder), [".gristmill-mine.new", "a"]);
        assert_eq!(fs::read(&path).unwrap(), b"whole, too");
        remove_unfinished(&folder.join("missing")).unwrap();
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    #[cfg_attr(miri, ignore = "writes files")]
    fn a_nameless_file_is_beside_and_cannot_be_found() {
        let folder = folder("nameless");
        let mut file = nameless(&folder.join("a")).unwrap();
        file.write_all(b"bytes").unwrap();
        assert_eq!(file.metadata().unwrap().len(), 5);
        assert!(names(&folder).is_empty());
        assert!(nameless(&folder.join("missing").join("a")).is_err());
        assert!(nameless(&folder).is_err());
        if cfg!(target_os = "linux") {
            nameless(Path::new("/dev/null")).unwrap();
        }
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    #[cfg(unix)]
    #[cfg_attr(miri, ignore = "writes files")]
    fn links_devices_and_permissions_stay() {
        use std::os::unix::fs::{PermissionsExt, symlink};
        let folder = folder("replaced-link");
        let (path, link) = (folder.join("a"), folder.join("link"));
        fs::write(&path, b"old").unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
        symlink("a", &link).unwrap();
        replace(&link, |file| file.write_all(b"new")).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"new");
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(
            fs::metadata(&path).unwrap().permissions().mode() & 0o777,
            0o640
        );

        replace_entry(&link, |file| file.write_all(b"entry")).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"new");
        assert_eq!(fs::read(&link).unwrap(), b"entry");
        assert!(!fs::symlink_metadata(&link).unwrap().is_symlink());

        if cfg!(target_os = "linux") {
            use std::os::fd::AsRawFd;
            let open = File::create(folder.join("b")).unwrap();
            fs::remove_file(folder.join("b")).unwrap();
            let nowhere = PathBuf::from(format!("/proc/self/fd/{}", open.as_raw_fd()));
            replace(&nowhere, |file| file.write_all(b"new")).unwrap();
            nameless(&nowhere).unwrap();
            assert_eq!(fs::read(&nowhere).unwrap(), b"new");
        }
        let full = Path::new("/dev/full");
        if cfg!(target_os = "linux") {
            assert!(replace(full, |file| file.write_all(b"new")).is_err());
            assert!(!fs::metadata(full).unwrap().is_file());
        }
        fs::remove_dir_all(&folder).unwrap();
    }
}
