//! Programs with a process for each of their devices: the first is this one, and the others are servers from
//! the command line.

use crate::distributed::{cluster, toml};
use crate::process::{Serving, serving};
use gristmill::distribute::{ClusterSpec, Credentials, Keys, Spread, make_keys};
use gristmill::pipeline::Lowered;
use gristmill::place::Device;
use gristmill::testing::Setup;
use gristmill_runtime::device::DeviceKind;
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use tempfile::TempDir;

/// Servers of all devices but the first, with keys or without.
struct Processes {
    folder: TempDir,
    spec: ClusterSpec,
    has_keys: bool,
    servers: Vec<Serving>,
}

/// Servers by the number of devices, and whether they have keys.
type Pool = HashMap<(usize, bool), Processes>;

thread_local! {
    /// Servers of this test: they end with its thread.
    static POOL: RefCell<Pool> = RefCell::default();
    static N_SPREAD: Cell<usize> = const { Cell::new(0) };
}

/// The task of a device.
fn name(number: usize) -> (&'static str, u32) {
    ("device", number as u32)
}

impl Processes {
    fn start(n_devices: usize, has_keys: bool) -> Processes {
        let folder = tempfile::tempdir().unwrap();
        let names: Vec<_> = (0..n_devices).map(name).collect();
        let spec = cluster(&names);
        std::fs::write(folder.path().join("cluster.toml"), toml(&spec)).unwrap();
        if has_keys {
            make_keys(&folder.path().join("keys"), &spec, 2).unwrap();
        }
        let trust: &[&str] = if has_keys { &["--keys", "keys"] } else { &[] };
        let server = |number: usize| {
            let number = number.to_string();
            let args = ["server", "--job", "device", "--task", &number];
            let more = [
                "--threads",
                "1",
                "--devices",
                "cpu:1",
                "--cluster",
                "cluster.toml",
            ];
            let server = serving(folder.path(), &[], &[&args[..], &more, trust].concat());
            assert!(server.line.starts_with("serving "), "{:?}", server.line);
            server
        };
        Processes {
            servers: (1..n_devices).map(server).collect(),
            folder,
            spec,
            has_keys,
        }
    }

    /// Credentials of the first task, and of a client.
    fn credentials(&self) -> [Credentials; 2] {
        if !self.has_keys {
            return [Credentials::Local, Credentials::Local];
        }
        let keys = self.folder.path().join("keys");
        let first = self.spec.tasks().next().unwrap().0.clone();
        let own = Keys::of_task(&keys, &first).unwrap();
        [own, Keys::of_client(&keys).unwrap()].map(Credentials::Keys)
    }
}

/// Number of programs of this test over processes so far.
pub fn n_over_processes() -> usize {
    N_SPREAD.get()
}

/// Does something with a program over processes, with keys every second time. Nothing for devices which
/// servers of the command line do not have here.
pub fn over_processes(lowered: &Lowered, setup: &Setup, check: impl FnOnce(&Spread)) {
    let is_plain = |d: &Device| d.name.kind == DeviceKind::Cpu && d.memory_limit.is_none();
    if !setup.settings.devices.devices.iter().all(is_plain) {
        return;
    }
    let n_devices = lowered.partitions.len();
    let count = N_SPREAD.get();
    N_SPREAD.set(count + 1);
    let kind = (n_devices, count % 2 == 1);
    POOL.with_borrow_mut(|pool| {
        // Variables of an earlier program would be those of this one.
        if !lowered.program.variables.is_empty() {
            pool.remove(&kind);
        }
        let processes = pool.entry(kind);
        let processes = processes.or_insert_with(|| Processes::start(kind.0, kind.1));
        let credentials = processes.credentials();
        let spread = Spread::beside(
            lowered,
            &setup.settings,
            &setup.options,
            (&processes.spec, credentials),
        );
        check(&spread.unwrap());
        assert_eq!(processes.servers.len(), n_devices - 1);
    });
}
