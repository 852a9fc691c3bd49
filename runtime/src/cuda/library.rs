//! Shared libraries that are opened at run time, and the functions that are looked up in them.

use libloading::Library;
use std::error::Error as _;
use std::ffi::{OsStr, OsString};
use std::path::Path;

/// A library that a machine may have.
pub(super) struct SystemLibrary {
    /// Name in messages.
    pub(super) title: &'static str,
    /// Environment variable that names a file, instead of the names that the system's loader looks for.
    pub(super) variable: &'static str,
    /// Names for the loader, the preferred one first.
    pub(super) names: &'static [&'static str],
}

impl SystemLibrary {
    /// Opens `file`, the value of the variable, or else the first of the names that the loader finds.
    ///
    /// The library stays open until the process ends. The error tells a library that is absent from one that is there and
    /// cannot be opened, for which it gives the loader's reason.
    pub(super) fn open(&self, file: Option<OsString>) -> Result<&'static Library, String> {
        let names = match file {
            Some(file) => vec![file],
            None => self.names.iter().map(OsString::from).collect(),
        };
        let mut refused = None;
        for name in &names {
            // SAFETY: the constructors of a library of this name, or that the user names, are run by its users too.
            match unsafe { Library::new(name) } {
                Ok(library) => return Ok(Box::leak(Box::new(library))),
                Err(e) => refused = refused.or_else(|| reason(name, &e)),
            }
        }
        let names: Vec<_> = names.iter().map(|n| n.to_string_lossy()).collect();
        let why = refused.unwrap_or_else(|| {
            let (names, variable) = (names.join(" or "), self.variable);
            format!("{names} was not found; set {variable} to its path")
        });
        Err(format!("no {}: {why}", self.title))
    }
}

/// Reason why a library that is there cannot be opened; `None` when it is not there.
fn reason(name: &OsStr, e: &libloading::Error) -> Option<String> {
    // The error names the call; its source is the text of the loader.
    let text = e
        .source()
        .map_or_else(|| e.to_string(), ToString::to_string);
    let path = Path::new(name);
    let is_there = path.exists() || (cfg!(unix) && !is_absence(&text, &name.to_string_lossy()));
    is_there.then(|| format!("{} cannot be opened: {text}", path.display()))
}

/// True for the texts by which loaders say that the library itself, not one that it needs, is nowhere.
fn is_absence(text: &str, name: &str) -> bool {
    let absent = ["No such file", "no such file", "not found"];
    text.contains(name) && !text.contains("needed by") && absent.iter().any(|a| text.contains(a))
}

/// Declares a table of the functions of a library, and the look-up of all of them.
///
/// `missing` makes the error from the name of a symbol that the library lacks.
macro_rules! functions {
    (
        $(#[$table_doc:meta])*
        $vis:vis struct $table:ident, missing: $missing:expr;
        $($(#[$doc:meta])* $field:ident = $symbol:literal fn($($ty:ty),* $(,)?) -> $result:ty;)*
    ) => {
        $(#[$table_doc])*
        $vis struct $table {
            $($(#[$doc])* $vis $field: unsafe extern "C" fn($($ty),*) -> $result,)*
        }

        impl $table {
            /// Looks up every function.
            ///
            /// # Safety
            /// The symbols of the library, where it has them, are functions of the declared types.
            unsafe fn resolve(
                library: &'static libloading::Library,
            ) -> Result<$table, String> {
                $(
                    // SAFETY: by contract the symbol has this type.
                    let found = unsafe {
                        library.get::<unsafe extern "C" fn($($ty),*) -> $result>($symbol)
                    };
                    let $field = *found.map_err(|_| $missing($symbol))?;
                )*
                Ok($table { $($field,)* })
            }
        }
    };
}

pub(super) use functions;

#[cfg(test)]
mod tests {
    use super::*;

    const LIBRARY: SystemLibrary = SystemLibrary {
        title: "yardstick",
        variable: "GRISTMILL_YARDSTICK",
        names: &["libno-such.so.1", "libno-such.so"],
    };

    #[test]
    #[cfg_attr(miri, ignore = "looks for a shared library")]
    fn absent_libraries_and_broken_ones_are_told_apart() {
        let error = |file: Option<&str>| LIBRARY.open(file.map(OsString::from)).err().unwrap();
        assert_eq!(
            error(None),
            "no yardstick: libno-such.so.1 or libno-such.so was not found; set \
             GRISTMILL_YARDSTICK to its path"
        );
        assert!(error(Some("/no/such/lib.so")).contains("was not found"));
        let text = concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml");
        let e = error(Some(text));
        assert!(
            e.starts_with(&format!("no yardstick: {text} cannot be opened: ")),
            "{e}"
        );
    }

    /// The loader finds a library by its name, but not one that it needs.
    #[test]
    fn a_dependency_that_is_missing_is_a_reason() {
        let missing = "libdep.so.1: cannot open shared object file: No such file or directory";
        assert!(is_absence(missing, "libdep.so.1"));
        assert!(!is_absence(missing, "libcublasLt.so.13"));
        let missing = "Error loading shared library libdep.so: No such file (needed by liba.so)";
        assert!(!is_absence(missing, "liba.so"));
    }
}
