//! Programs whose batch is divided among devices.

use super::Compiled;
use crate::error::{Error, Result};
use crate::ir::Type;
use crate::options::DataParallel;
use std::collections::BTreeSet;

/// The inputs whose first axis is the batch.
pub(super) fn batched(inputs: &[(String, Type)]) -> Vec<String> {
    let first = inputs.iter().find_map(|(_, ty)| ty.shape.first());
    let has_batch = |(_, ty): &&(String, Type)| first.is_some() && ty.shape.first() == first;
    let own = inputs.iter().filter(has_batch);
    own.map(|(name, _)| name.clone()).collect()
}

/// Errors when the devices of [`Options::data_parallel`](crate::Options::data_parallel) are not there, or the
/// model or another option does not go with them.
pub(super) fn check(compiled: &Compiled) -> Result<()> {
    let options = &compiled.options;
    let Some(on) = &options.data_parallel else {
        return Ok(());
    };
    let set = &compiled.session().settings().devices;
    for (devices, shares) in [
        (&on.devices, "shares"),
        (&on.servers, "shares of the variables"),
    ] {
        let mut seen = BTreeSet::new();
        if let Some(device) = devices.iter().find(|&d| !seen.insert(d)) {
            let message = format!("device {device} is named twice: it would have two {shares}");
            return Err(Error::invalid(message).hint("each device once"));
        }
    }
    for device in on.devices.iter().chain(&on.servers) {
        if !set.devices.iter().any(|d| d.name == *device) {
            let all: Vec<String> = set.devices.iter().map(|d| d.name.to_string()).collect();
            let message = format!("device {device} is not there");
            return Err(Error::invalid(message).hint(format!("one of {}", all.join(", "))));
        }
    }
    if on.devices.is_empty() {
        return Err(Error::invalid("no device to share a batch"));
    }
    check_shards(on)?;
    if !options.pins.is_empty() || options.plan.is_some() {
        let message = "pins (--pin) or a plan (--plan), and a strategy (--strategy, Options::data_parallel): both say where nodes run";
        return Err(Error::invalid(message).hint("one of them"));
    }
    match compiled.open.is_some() || !compiled.is_whole() {
        true => Err(not_fixed()),
        false => Ok(()),
    }
}

/// Errors on shards in numbers without a tree of pairs, and on more devices than shards.
fn check_shards(on: &DataParallel) -> Result<()> {
    let (shards, n) = (on.shards, on.devices.len());
    if shards == 0 {
        return Ok(());
    }
    if !shards.is_power_of_two() {
        let message = format!("{shards} shards: expected a power of two, such as 2, 4 or 8");
        return Err(Error::invalid(message));
    }
    match n.is_power_of_two() && n <= shards {
        true => Ok(()),
        false => {
            let message = format!(
                "{shards} shards on {n} devices: expected 1, 2, 4, .. devices, up to as many as shards"
            );
            Err(Error::invalid(message).hint("other devices, or shards: 0"))
        }
    }
}

/// The error of a model whose extents a run decides.
pub(super) fn not_fixed() -> Error {
    let message = "the data decides extents or the structure of the model, so that its batch cannot be divided";
    Error::unsupported(message).hint("without the devices that share a batch")
}
