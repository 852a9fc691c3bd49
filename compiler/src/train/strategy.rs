//! Devices that train one model together.

use crate::error::{Error, Result};
use crate::place::DeviceSet;
use gristmill_runtime::device::DeviceName;

/// The devices of a training, and what each of them computes.
///
/// Batches, losses, metrics, steps and checkpoints are those of one training whatever the strategy is: `n` replicas train as one device does with
/// the whole batch, up to the rounding of sums.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Strategy {
    /// One replica, whose nodes are placed as those of any program: on device scopes and pins, and else by predicted time.
    #[default]
    OneDevice,
    /// A replica of all variables on each device. Each computes the gradients of its share of the batch; their sums are exchanged, and each
    /// device makes the same update (TensorFlow's `MirroredStrategy`).
    ///
    /// Whatever a model computes over its batch, such as the statistics of batch normalisation, is over the whole batch. A batch with fewer
    /// examples than devices is computed by as many devices as it has examples.
    Mirrored {
        /// The devices. None: all devices of the session of the fastest device's kind.
        devices: Vec<DeviceName>,
    },
}

impl Strategy {
    /// Number of devices that share each batch, of those of a session.
    ///
    /// Errors with `InvalidInput` when the session has no device.
    pub fn n_replicas(&self, set: &DeviceSet) -> Result<usize> {
        Ok(self.replicas(set)?.len().max(1))
    }

    /// The devices with a replica, of those of a session; none where the placer decides.
    pub(super) fn replicas(&self, set: &DeviceSet) -> Result<Vec<DeviceName>> {
        match self {
            Strategy::OneDevice => Ok(Vec::new()),
            Strategy::Mirrored { devices } if devices.is_empty() => fastest(set),
            Strategy::Mirrored { devices } => {
                check_kinds(devices)?;
                Ok(devices.clone())
            }
        }
    }
}

/// Errors when devices have kernels that round differently: their replicas would part.
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
    let mut all = set.devices.iter();
    let first = all.next().ok_or_else(|| Error::invalid("no device"))?;
    let fastest = all.fold(first, |a, b| {
        if b.profile.flops_f32 > a.profile.flops_f32 {
            b
        } else {
            a
        }
    });
    let kind = fastest.name.kind;
    let own = set.devices.iter().filter(|d| d.name.kind == kind);
    Ok(own.map(|d| d.name.clone()).collect())
}
