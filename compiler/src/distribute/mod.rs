//! Several machines: servers that compile and run parts of graphs, and sessions on them.
//!
//! Each machine has one or more tasks, `gristmill server --job worker --task 0 --cluster FILE`, or [`serve`] in Rust. A session on one of
//! them, [`Session::open`](crate::Session::open), runs models over all tasks: nodes are pinned as on one machine, by [`Pin`](crate::place::Pin) or
//! [`DeviceScope`](crate::ir::DeviceScope), to devices such as `/job:ps/task:0/cpu:0`; nodes without a pin go to the session's own task.
//!
//! ```no_run
//! # fn main() -> gristmill::Result<()> {
//! # use gristmill::{Options, Session, Settings, distribute, onnx};
//! use gristmill::distribute::{ClusterSpec, TaskName};
//!
//! let cluster = ClusterSpec::parse("[jobs]\nworker = ['127.0.0.1:2222', '127.0.0.1:2223']")?;
//! let task = |task| TaskName { job: "worker".into(), task };
//! let servers = [0, 1].map(|n| distribute::serve(cluster.clone(), task(n), &Settings::default()));
//!
//! let session = Session::open("grpc://127.0.0.1:2222", &Settings::default())?;
//! let model = session.compile(&onnx::load("model.onnx")?, &Options::default())?;
//! # drop((servers, model));
//! # Ok(())
//! # }
//! ```
//!
//! Beyond one machine, tasks and clients need keys ([`make_keys`], or `gristmill keys DIR`): see [`serve_with`] and
//! [`Session::open_with`](crate::Session::open_with).
//!
//! The text of graphs and tensors cross the network, never code: each task compiles its part for its own devices. (Abadi et al., "TensorFlow:
//! large-scale machine learning on heterogeneous distributed systems", 2015, section 3.3.)
//!
//! Not there yet: assignments on more than one task in a run, shared batches, training, and extents
//! known in a run only.

mod client;
mod constants;
mod engine;
#[cfg(test)]
mod hostile;
mod plan;
mod spread;
mod tasks;
mod text;

pub use engine::{serve, serve_with};
pub use gristmill_remote::{
    ClientOptions, ClusterSpec, Credentials, DeviceInfo, Keys, Limits, MadeKeys, OnStall,
    RunningTask, Server, ServerOptions, TaskName,
};
pub use gristmill_runtime::exec::VariableState;
#[doc(hidden)]
pub use spread::Spread;
pub use tasks::TaskState;

use crate::error::{Error, ErrorKind, Result};
use gristmill_remote::Fault;
use std::path::Path;

/// Makes the keys of a cluster in a folder: `ca.pem` and `ca.key` of its authority, `JOB-TASK.pem` and `JOB-TASK.key` of each task, `client.pem` and
/// `client.key` of clients; those of tasks and clients are valid for a number of days. Nothing is written over: with the authority of an
/// earlier call, keys of new tasks are added, and what was deleted is made again.
///
/// On Unix, only the user of this process may read the private keys. A task needs `ca.pem` and its own two files, a client `ca.pem` and the two of
/// clients; whoever has `ca.key` can make keys for anybody.
///
/// Errors with `InvalidInput`, naming the file, when one cannot be read or written, when one of a pair is absent, and on a job name too long
/// for a certificate.
pub fn make_keys(folder: &Path, cluster: &ClusterSpec, days: u16) -> Result<MadeKeys> {
    Ok(gristmill_remote::make_keys(folder, cluster, days)?)
}

impl From<Error> for Fault {
    fn from(e: Error) -> Fault {
        use gristmill_runtime::ErrorKind as Rt;
        let kind = match e.kind() {
            ErrorKind::InvalidInput | ErrorKind::Mismatch => Rt::InvalidInput,
            ErrorKind::Unsupported => Rt::Unsupported,
            ErrorKind::OutOfMemory => Rt::OutOfMemory,
            ErrorKind::NotFinite => Rt::NotFinite,
            ErrorKind::DeviceFailed => Rt::DeviceFailed,
            ErrorKind::Internal => Rt::Internal,
        };
        Fault {
            node: e.node().map(str::to_owned),
            hint: e.remedy().map(str::to_owned),
            ..Fault::new(kind, e.message())
        }
    }
}

impl From<Fault> for Error {
    fn from(fault: Fault) -> Error {
        let hint = fault.hint.clone();
        let error = Error::from(gristmill_runtime::Error::from(fault));
        match hint {
            Some(hint) => error.hint(hint),
            None => error,
        }
    }
}
