//! `gristmill completions`: scripts for shells.

use crate::Cli;
use crate::output::unescaped;
use clap::{Args, CommandFactory};
use clap_complete::{Shell, generate};
use gristmill::{Error, Result};

/// Arguments of `completions`.
#[derive(Args)]
pub struct CompletionsArgs {
    /// Shell of the script.
    shell: Shell,
}

/// Runs the verb.
pub fn completions(args: &CompletionsArgs) -> Result<()> {
    let mut script = Vec::new();
    generate(args.shell, &mut Cli::command(), "gristmill", &mut script);
    let script = String::from_utf8(script);
    let script = script.map_err(|e| Error::internal(format!("completions: {e}")))?;
    unescaped(script.trim_end());
    Ok(())
}
