//! `gristmill man`: man pages.

use crate::Cli;
use crate::output::outln;
use clap::{Args, CommandFactory};
use gristmill::{Error, Result};
use gristmill_runtime::units::printable;
use std::path::PathBuf;

/// Arguments of `man`.
#[derive(Args)]
pub struct ManArgs {
    /// Folder of the pages, e.g. `~/.local/share/man/man1`. It is created if it is missing.
    #[arg(value_name = "DIR")]
    folder: PathBuf,
}

/// Runs the verb.
pub fn man(args: &ManArgs) -> Result<()> {
    let folder = &args.folder;
    let written = std::fs::create_dir_all(folder)
        .and_then(|()| clap_mangen::generate_to(Cli::command(), folder));
    let path = folder.display().to_string();
    written.map_err(|e| Error::invalid(format!("{path}: {e}")))?;
    outln!("{}: man pages of gristmill and its verbs", printable(&path));
    Ok(())
}
