//! Several devices in one training.

use crate::error::{Error, Result};
use crate::options::{DataParallel, Deal};
use crate::place::{Device, DeviceSet};
use gristmill_runtime::device::{DeviceKind, DeviceName};

/// The devices of a training, and what each of them computes.
///
/// Batches, losses, metrics, steps and checkpoints are those of one training whatever the strategy is: `n`
/// replicas train as one device does with the whole batch, up to the rounding of sums.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Strategy {
    /// One replica, whose nodes are placed as those of any program: on device scopes and pins, and else by
    /// predicted time.
    #[default]
    OneDevice,
    /// A replica of all variables on each device. Each computes the gradients of its share of the batch;
    /// their sums are exchanged, and each device makes the same update (TensorFlow's `MirroredStrategy`).
    ///
    /// Whatever a model computes over its batch, such as the statistics of batch normalisation, is over the
    /// whole batch. A batch with fewer examples than devices is computed by as many devices as it has
    /// examples.
    Mirrored {
        /// The devices. None: all devices of the session of the fastest device's kind.
        devices: Vec<DeviceName>,
    },
    /// One copy of all variables, on one device, which makes the update; the gradients of a batch's shares
    /// are computed on several (TensorFlow's `CentralStorageStrategy`). Weights cross to each device in each
    /// step, and gradients back.
    CentralStorage {
        /// The device with the variables. `None`: the first CPU of the session, or its first device.
        central: Option<DeviceName>,
        /// The devices with a share of each batch. None: as of [`Strategy::Mirrored`].
        devices: Vec<DeviceName>,
    },
    /// One copy of each variable, dealt over several devices, each of which makes the updates of its own; the
    /// gradients are computed on workers (TensorFlow's `ParameterServerStrategy`, on the devices of one machine).
    ParameterServer {
        /// The devices with the variables. None: all CPUs of the session, or without CPUs all devices of the first
        /// one's kind. With asynchronous updates the first of them alone.
        servers: Vec<DeviceName>,
        /// The devices that compute gradients. None: as of [`Strategy::Mirrored`].
        workers: Vec<DeviceName>,
        /// The server of each variable.
        deal: Deal,
        /// The times of updates.
        updates: Updates,
    },
    /// The strategy with the shortest predicted step for batches of a size, [`Strategy::OneDevice`] among them; see
    /// [`Comparison`](super::Comparison). Updates are in step.
    Auto {
        /// Examples of a step.
        batch_size: usize,
    },
}

/// Times at which workers update the variables of servers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Updates {
    /// All workers share each batch, and the sum of their gradients makes one update.
    #[default]
    InStep,
    /// Each worker takes whole batches of its own: it pulls the variables, computes gradients, and pushes them, at
    /// once and whatever other workers have pushed since its pull. A step is one push.
    ///
    /// The order of pushes, and so the result, differs from run to run. Each push reads its variables again and
    /// excludes others, so no update is lost. Metrics and statistics are those of one worker's batch.
    Asynchronous,
    /// As [`Updates::Asynchronous`], but pushes and pulls do not wait for each other either, and change and read the variables element by
    /// element: of two updates of an element at the same time, one may be lost (Niu et al., Hogwild!, NeurIPS 2011). All steps are
    /// counted. For variables on one CPU. Evaluations and checkpoints wait for the pushes under way.
    Hogwild,
}

impl Strategy {
    /// Number of devices that share each batch, of those of a session: one where each worker takes whole batches, and
    /// for [`Strategy::Auto`], which a trainer decides.
    ///
    /// Errors with `InvalidInput` when the session has no device, and on replicas of different kinds of
    /// devices.
    pub fn n_replicas(&self, set: &DeviceSet) -> Result<usize> {
        let on = self.data_parallel(set)?.filter(|_| !self.is_asynchronous());
        Ok(on.map_or(1, |on| on.devices.len()))
    }

    /// Its name on the command line.
    pub fn name(&self) -> &'static str {
        match self {
            Strategy::OneDevice => "one-device",
            Strategy::Mirrored { .. } => "mirrored",
            Strategy::CentralStorage { .. } => "central",
            Strategy::ParameterServer { .. } => "parameter-server",
            Strategy::Auto { .. } => "auto",
        }
    }

    /// The devices to compare strategies on: those of the fastest kind.
    pub(super) fn devices(set: &DeviceSet) -> Result<Vec<DeviceName>> {
        fastest(set)
    }

    /// True where each worker takes whole batches.
    pub(super) fn is_asynchronous(&self) -> bool {
        let updates = match self {
            Strategy::ParameterServer { updates, .. } => *updates,
            _ => Updates::InStep,
        };
        updates != Updates::InStep
    }

    /// True where pushes of workers overlap.
    pub(super) fn is_hogwild(&self) -> bool {
        matches!(self, Strategy::ParameterServer { updates, .. } if *updates == Updates::Hogwild)
    }

    /// The devices that share each batch, of those of a session; `None` where the placer decides.
    pub(super) fn data_parallel(&self, set: &DeviceSet) -> Result<Option<DataParallel>> {
        let (devices, servers, deal) = match self {
            Strategy::OneDevice | Strategy::Auto { .. } => return Ok(None),
            Strategy::Mirrored { devices } => {
                check_kinds(devices)?;
                (devices, Vec::new(), Deal::default())
            }
            Strategy::CentralStorage { central, devices } => {
                let central = central.clone().map_or_else(|| first_cpu(set), Ok);
                (devices, vec![central?], Deal::default())
            }
            Strategy::ParameterServer {
                servers,
                workers,
                deal,
                updates,
            } => {
                let servers = match (servers.is_empty(), updates) {
                    (false, _) => servers.clone(),
                    (true, Updates::InStep) => of_kind(set, first_cpu(set)?.kind),
                    (true, Updates::Asynchronous | Updates::Hogwild) => vec![first_cpu(set)?],
                };
                (workers, servers, *deal)
            }
        };
        let devices = match devices.is_empty() {
            true => fastest(set)?,
            false => devices.clone(),
        };
        // The only device has nothing to share; another one is not there, and is refused with the others.
        let is_there = |d: &DeviceName| set.devices.iter().any(|own| own.name == *d);
        let is_alone = devices.len() == 1 && set.devices.len() == 1;
        let is_alone = is_alone && devices.iter().chain(&servers).all(is_there);
        Ok((!is_alone).then_some(DataParallel {
            devices,
            servers,
            deal,
            shards: 0,
            parts: 1,
            sums: String::new(),
        }))
    }

    /// The device of a training on one, of those of a session.
    pub(super) fn alone(set: &DeviceSet) -> Result<DataParallel> {
        Ok(DataParallel {
            devices: fastest(set)?.into_iter().take(1).collect(),
            servers: Vec::new(),
            deal: Deal::default(),
            shards: 0,
            parts: 1,
            sums: String::new(),
        })
    }
}

/// The first CPU, or the first device.
fn first_cpu(set: &DeviceSet) -> Result<DeviceName> {
    let is_cpu = |d: &&Device| d.name.kind == DeviceKind::Cpu;
    let first = set.devices.iter().find(is_cpu).or(set.devices.first());
    let first = first.ok_or_else(|| Error::invalid("no device"))?;
    Ok(first.name.clone())
}

/// Errors on devices of several kinds: their kernels round differently, and their replicas would part.
fn check_kinds(devices: &[DeviceName]) -> Result<()> {
    let Some(first) = devices.first() else {
        return Ok(());
    };
    match devices.iter().find(|d| d.kind != first.kind) {
        None => Ok(()),
        Some(other) => {
            let message = format!(
                "{first} and {other}: replicas on devices of different kinds round differently"
            );
            Err(Error::invalid(message).hint("devices of one kind"))
        }
    }
}

/// All devices of the kind of the fastest one.
fn fastest(set: &DeviceSet) -> Result<Vec<DeviceName>> {
    let fastest = set.fastest();
    let fastest = fastest.ok_or_else(|| Error::invalid("no device"))?;
    Ok(of_kind(set, fastest.name.kind))
}

fn of_kind(set: &DeviceSet, kind: DeviceKind) -> Vec<DeviceName> {
    let own = set.devices.iter().filter(|d| d.name.kind == kind);
    own.map(|d| d.name.clone()).collect()
}
