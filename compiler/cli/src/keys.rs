//! `gristmill keys`: certificates of the tasks and clients of several machines.

use crate::cluster::ClusterArgs;
use crate::heading;
use crate::output::{noteln, outln};
use clap::Args;
use gristmill::Result;
use gristmill::distribute::make_keys;
use std::path::PathBuf;

/// Arguments of `keys`.
#[derive(Args)]
pub struct KeysArgs {
    /// Folder for the keys. Nothing in it is written over: keys of new tasks are added.
    #[arg(value_name = "DIR")]
    folder: PathBuf,
    #[command(flatten)]
    cluster: ClusterArgs,
    /// Days for which the certificates of tasks and clients are valid.
    #[arg(long, default_value_t = 365, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=3650), help_heading = heading::OUTPUT)]
    days: u16,
}

/// Runs the verb.
pub fn keys(args: &KeysArgs) -> Result<()> {
    let (cluster, _) = args.cluster.read()?;
    let files = make_keys(&args.folder, &cluster, args.days)?;
    files
        .made
        .iter()
        .for_each(|path| outln!("{}", path.display()));
    if !files.kept.is_empty() {
        noteln!(
            "{} certificates were there, and stay as they are",
            files.kept.len()
        );
    }
    noteln!(
        "a task needs ca.pem and its own .pem and .key, a client ca.pem, client.pem and client.key"
    );
    noteln!("keep ca.key to yourself: it makes keys for anybody");
    Ok(())
}
