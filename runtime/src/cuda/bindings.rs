//! The library behind cudarc's bindings: the one found here, or an error.
//!
//! cudarc opens the first of a list of names known to the system's loader, and panics when there is none. gristmill looks in
//! more places, and opens a file of its own choice first. An open library answers to its soname, so cudarc gets that one too,
//! unless a name earlier in its list leads to another file.

use libloading::Library;

/// The bindings of one library.
pub struct Bindings {
    /// The library in messages: `the CUDA driver`.
    pub title: &'static str,
    /// Names looked for by cudarc, in its order and without prefixes and suffixes.
    pub names: &'static [&'static str],
    /// A function of the library.
    pub symbol: &'static str,
    /// cudarc's function that opens it.
    pub culib: unsafe fn() -> &'static Library,
}

impl Bindings {
    /// cudarc's library. Errors, before cudarc opens any, if it would open another one than `own`, or none.
    pub fn library(&self, own: &Library) -> Result<&'static Library, String> {
        let mut names = (self.names.iter()).flat_map(|n| cudarc::get_lib_name_candidates(n));
        // SAFETY: the constructors of a library of this name are run by its other users too.
        let first = names.find_map(|name| unsafe { Library::new(name) }.ok());
        // It stays open until cudarc has opened it, which then finds a library in any case.
        let first = first.ok_or_else(|| self.not_found(own))?;
        self.check(own, &first)?;
        // SAFETY: as above; a name of the list is open, so this does not panic.
        let library = unsafe { (self.culib)() };
        // Another user of cudarc in this process may have opened another one before.
        self.check(own, library)?;
        Ok(library)
    }

    /// Errors with both files when the libraries are not the same.
    fn check(&self, own: &Library, other: &Library) -> Result<(), String> {
        if self.address(own)? == self.address(other)? {
            return Ok(());
        }
        let (own, other) = (self.file(own), self.file(other));
        Err(format!(
            "{own} was opened, but {} is called through cudarc, which opens {other}: name that file, or take its folder off the \
             loader's paths",
            self.title
        ))
    }

    fn not_found(&self, own: &Library) -> String {
        let name = &cudarc::get_lib_name_candidates(self.names[0])[0];
        format!(
            "{} was opened, but {} is called through cudarc, which does not find it: its soname has to be {name} or one with a \
             version, such as {name}.12",
            self.file(own),
            self.title
        )
    }

    fn address(&self, library: &Library) -> Result<usize, String> {
        // SAFETY: the symbol is not called, only its address is taken.
        let symbol = unsafe { library.get::<unsafe extern "C" fn()>(self.symbol) };
        let symbol = symbol.map_err(|_| format!("the library has no {}", self.symbol))?;
        Ok(*symbol as usize)
    }

    fn file(&self, library: &Library) -> String {
        let address = self.address(library).unwrap_or(0);
        file_of(address).unwrap_or_else(|| format!("a library with {}", self.symbol))
    }
}

/// The file mapped at an address, on systems with `/proc`.
pub(super) fn file_of(address: usize) -> Option<String> {
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    let holds = |line: &&str| {
        let range = line.split(' ').next().and_then(|r| r.split_once('-'));
        let number = |hex: &str| usize::from_str_radix(hex, 16).unwrap_or(0);
        range.is_some_and(|(start, end)| (number(start)..number(end)).contains(&address))
    };
    let line = maps.lines().find(holds)?;
    Some(line[line.find('/')?..].to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "reads the memory map of the process")]
    fn files_of_addresses() {
        let own = std::env::current_exe().unwrap();
        if cfg!(target_os = "linux") {
            let file = file_of(file_of as *const () as usize);
            assert_eq!(file.as_deref(), own.to_str());
        }
        assert_eq!(file_of(0), None);
    }

    /// cudarc, which would panic, is not asked.
    #[test]
    #[cfg_attr(miri, ignore = "looks for a shared library")]
    fn a_library_that_cudarc_does_not_find_is_an_error() {
        if !cfg!(target_os = "linux") {
            return;
        }
        // SAFETY: the C library is open already.
        let own = unsafe { Library::new("libc.so.6") }.unwrap();
        let bindings = Bindings {
            title: "the yardstick",
            names: &["no-such"],
            symbol: "strlen",
            culib: || panic!("there is none"),
        };
        let e = bindings.library(&own).err().unwrap();
        assert!(e.contains("libno-such.so or one with a version"), "{e}");
        assert!(e.contains("/libc.so.6 was opened"), "{e}");
    }
}
