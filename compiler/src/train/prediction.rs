//! Strategies compared by the predicted time of a step.

use super::model::Model;
use super::strategy::{Strategy, Updates};
use super::trainer::{Objective, Training, step_graph, step_graph_for};
use crate::compiled::{Compiled, InputShapes};
use crate::cost::Bytes;
use crate::error::{Error, Result};
use crate::ir::{Bindings, OpClass, Type};
use crate::options::Deal;
use crate::pipeline::Planned;
use crate::place::DeviceSet;
use crate::session::Session;
use gristmill_runtime::device::DeviceName;
use gristmill_runtime::units::time_ns;
use std::fmt;

/// A strategy with the prediction of a step.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Prediction {
    /// The strategy, with its devices by name.
    pub strategy: Strategy,
    /// Devices with a share of the batch; 1 where the placer decides.
    pub n_replicas: usize,
    /// The devices with the variables. None: each replica has all, or the placer decides.
    pub servers: Vec<DeviceName>,
    /// Examples of a step.
    pub batch_size: usize,
    /// Predicted time of a step. In micro-batches, each counts as a step on its own, with its exchange of gradients.
    pub step_ns: u64,
    /// Time of it in which the busiest device computes; in the rest it waits for tensors.
    pub busy_ns: u64,
    /// Predicted peak of memory, by device.
    pub peak_bytes: Vec<(DeviceName, u64)>,
}

/// The strategies for a batch, beside one device.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Comparison {
    /// The strategies at the same batch, [`Strategy::OneDevice`] first.
    pub fixed: Vec<Prediction>,
    /// Mirrored training on 1, 2, .. devices at the same batch per replica; the first is one device alone. None for a
    /// model with a fixed batch.
    pub scaled: Vec<Prediction>,
    /// The part of a step on one device without growth by its batch, such as the update of the weights. `None` as for
    /// `scaled`.
    pub serial: Option<f64>,
    /// Names of strategies that the model or the memory does not allow, with the reasons.
    pub left_out: Vec<(&'static str, String)>,
}

impl Comparison {
    /// The strategies on a session's devices, for batches of a size. Nothing is compiled or run: the devices may
    /// be those of another machine.
    ///
    /// Errors as [`Trainer::in_session`](super::Trainer::in_session) does, and with `InvalidInput` on a batch of 0
    /// examples, on another one than the model's fixed batch, and when a further extent is not fixed.
    pub fn of(
        session: &Session,
        name: &str,
        training: &Training,
        batch_size: usize,
        build: impl Fn(&mut Model) -> Result<Objective>,
    ) -> Result<Comparison> {
        let devices = Strategy::devices(&session.settings().devices)?;
        let predict = |n: usize, size: usize| {
            let devices = devices[..n].to_vec();
            let training = training.with_strategy(Strategy::Mirrored { devices });
            Prediction::of(session, name, &training, size, &build)
        };
        let mut compared = at_one_batch(session, name, training, batch_size, &build)?;
        let grows = step_graph(name, training, &build)?;
        let grows = grows.inputs.iter().any(|&v| symbol(grows.ty(v)).is_some());
        let all = [1].into_iter().chain(counts(devices.len()));
        for n in all.filter(|_| grows && devices.len() > 1) {
            // Memory may not have room for larger batches than asked for.
            let size = n.saturating_mul(batch_size);
            match predict(n, size) {
                Ok(prediction) => compared.scaled.push(prediction),
                Err(e) => compared
                    .left_out
                    .push(("mirrored", format!("batches of {size}: {e}"))),
            }
        }
        if let Some(once) = compared.scaled.first().filter(|p| p.n_replicas == 1)
            && let Ok(twice) = predict(1, batch_size.saturating_mul(2))
        {
            compared.serial = Some(serial_part(once, &twice));
        }
        Ok(compared)
    }

    /// The strategy with the shortest step, the first of equals.
    pub fn best(&self) -> &Prediction {
        let best = self.fixed.iter().min_by_key(|p| p.step_ns);
        best.expect("one device is always there")
    }
}

/// The part of a step without growth, by a step on a batch and one on twice as many examples.
fn serial_part(once: &Prediction, twice: &Prediction) -> f64 {
    let (once, twice) = (once.step_ns.max(1) as f64, twice.step_ns as f64);
    ((2.0 * once - twice) / once).clamp(0.0, 1.0)
}

/// The strategies at one batch. One device is among them; of others, those without a prediction are left out.
pub(super) fn at_one_batch(
    session: &Session,
    name: &str,
    training: &Training,
    batch_size: usize,
    build: &impl Fn(&mut Model) -> Result<Objective>,
) -> Result<Comparison> {
    let predict = |strategy| {
        let training = training.with_strategy(strategy);
        Prediction::of(session, name, &training, batch_size, build)
    };
    let mut compared = Comparison {
        fixed: vec![predict(Strategy::OneDevice)?],
        scaled: Vec::new(),
        serial: None,
        left_out: Vec::new(),
    };
    let mut devices = Strategy::devices(&session.settings().devices)?;
    // Each device has an example at least.
    devices.truncate((batch_size / training.accumulate.max(1)).max(1));
    let mirrored = counts(devices.len()).map(|n| Strategy::Mirrored {
        devices: devices[..n].to_vec(),
    });
    let set = &session.settings().devices;
    for strategy in mirrored.chain(with_servers(set, &devices)?) {
        let name = strategy.name();
        match predict(strategy) {
            Ok(prediction) => compared.fixed.push(prediction),
            Err(e) => compared.left_out.push((name, e.to_string())),
        }
    }
    Ok(compared)
}

/// The strategies with variables on servers, for several devices: on the first CPU, on all CPUs, and on the devices
/// themselves. Each set of servers is there once.
fn with_servers(set: &DeviceSet, devices: &[DeviceName]) -> Result<Vec<Strategy>> {
    if devices.len() == 1 {
        return Ok(Vec::new());
    }
    let central = Strategy::CentralStorage {
        central: None,
        devices: devices.to_vec(),
    };
    let dealt = |servers: &[DeviceName]| Strategy::ParameterServer {
        servers: servers.to_vec(),
        workers: devices.to_vec(),
        deal: Deal::BySize,
        updates: Updates::InStep,
    };
    let mut servers: Vec<Vec<DeviceName>> = Vec::new();
    let mut different = Vec::new();
    for strategy in [central, dealt(&[]), dealt(devices)] {
        let own = strategy.data_parallel(set)?.map(|on| on.servers);
        if let Some(own) = own.filter(|own| !servers.contains(own)) {
            servers.push(own);
            different.push(strategy);
        }
    }
    Ok(different)
}

/// Numbers of devices to look at: 2, 3 and 4, powers of two, and all.
fn counts(n: usize) -> impl Iterator<Item = usize> {
    (2..=n).filter(move |k| *k <= 4 || k.is_power_of_two() || *k == n)
}

impl Prediction {
    /// The prediction of a step on a batch of a size by the strategy of a training, in step; [`Strategy::Auto`] counts as
    /// one device. With [`Training::accumulate`] it is that of a part, as many times as there are parts.
    ///
    /// Errors as [`Comparison::of`] does.
    pub fn of(
        session: &Session,
        name: &str,
        training: &Training,
        batch_size: usize,
        build: impl Fn(&mut Model) -> Result<Objective>,
    ) -> Result<Prediction> {
        let options = training.options_for(&session.settings().devices)?;
        let mut graph = step_graph_for(name, training, &options, batch_size, build)?;
        graph.set_container(&options.container);
        let program = session.undeclared((&graph).into(), &options)?;
        let n_parts = training.accumulate.max(1);
        let shapes = shapes(&program, batch_size.div_ceil(n_parts))?;
        let planned = program.plan_shapes(&shapes)?;
        let busy_ns = busiest(&planned);
        let placement = planned.placement;
        let peaks = placement.peak_bytes.iter().map(|b| b.0);
        let on = options.data_parallel.as_ref();
        Ok(Prediction {
            n_replicas: on.map_or(1, |on| on.devices.len()),
            servers: on.map_or_else(Vec::new, |on| on.servers.clone()),
            strategy: training.strategy.clone(),
            batch_size,
            step_ns: placement.makespan.0.saturating_mul(n_parts as u64),
            busy_ns: busy_ns.saturating_mul(n_parts as u64),
            peak_bytes: placement.devices.into_iter().zip(peaks).collect(),
        })
    }
}

/// The time in which the busiest device computes. Exchange is no computation.
fn busiest(planned: &Planned) -> u64 {
    let placement = &planned.placement;
    let mut busy = vec![0_u64; placement.devices.len()];
    for (id, node) in planned.clusters.nodes() {
        if let Some(placed) = &placement.nodes[id.0 as usize]
            && node.op.class() != OpClass::Transfer
        {
            busy[placed.device] += placed.end.0.saturating_sub(placed.start.0);
        }
    }
    busy.into_iter().max().unwrap_or(0)
}

/// The symbol of the batch.
fn symbol(ty: &Type) -> Option<&str> {
    ty.shape.first()?.as_symbol()
}

/// Shapes of the inputs for a batch.
fn shapes(program: &Compiled, batch_size: usize) -> Result<InputShapes> {
    if batch_size == 0 {
        return Err(Error::invalid("a batch of 0 examples"));
    }
    let mut types = program.inputs().iter().map(|(_, ty)| ty);
    let symbol = types.find_map(symbol).map(str::to_owned);
    let sizes: Bindings = symbol.map(|s| (s, batch_size)).into_iter().collect();
    let shape = |(name, ty): &(String, Type)| {
        let own = ty.shape.first().and_then(|d| d.as_usize());
        if let Some(own) = own.filter(|own| *own != batch_size && sizes.is_empty()) {
            let message =
                format!("batches of {batch_size}: input {name:?} takes {own} examples at once");
            return Err(Error::invalid(message));
        }
        let shape = ty.shape.bind(&sizes).as_static();
        shape.ok_or_else(|| {
            let message =
                format!("input {name:?} ({ty}): the time of a step depends on its extents");
            Error::invalid(message).hint("fixed extents but for the batch, such as --set seq=128")
        })
    };
    Ok(InputShapes {
        shapes: program.inputs().iter().map(shape).collect::<Result<_>>()?,
        values: Default::default(),
    })
}

impl Prediction {
    /// The devices with the variables, in few letters: `cpu:0`, `4 gpus`, `each` of the replicas, or `-` for one device.
    fn place_of_variables(&self) -> String {
        let kind = |d: &DeviceName| d.kind.name().to_lowercase();
        match &self.servers[..] {
            [] if self.strategy == Strategy::OneDevice => "-".to_owned(),
            [] => "each".to_owned(),
            [one] => format!("{}:{}", kind(one), one.index),
            [first, rest @ ..] if rest.iter().all(|d| d.kind == first.kind) => {
                format!("{} {}s", self.servers.len(), kind(first))
            }
            all => format!("{} devices", all.len()),
        }
    }
}

impl fmt::Display for Prediction {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let peak = self.peak_bytes.iter().map(|(_, bytes)| *bytes).max();
        write!(
            f,
            "{:<17} {:>9} {:>7} {:>7} {:>10} {:>10} {:>10} {:>11}",
            self.strategy.name(),
            self.place_of_variables(),
            self.n_replicas,
            self.batch_size,
            time_ns(self.step_ns),
            time_ns(self.busy_ns),
            time_ns(self.step_ns.saturating_sub(self.busy_ns)),
            Bytes(peak.unwrap_or(0)).to_string(),
        )
    }
}

impl fmt::Display for Comparison {
    /// Two tables: at the same batch (Amdahl), and at the same batch per replica (Gustafson).
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let header = format!(
            "{:<17} {:>9} {:>7} {:>7} {:>10} {:>10} {:>10} {:>11}",
            "strategy", "variables", "devices", "batch", "step", "compute", "waits", "peak memory"
        );
        let one = self.fixed.first().map_or(0, |p| p.step_ns) as f64;
        write!(f, "{header} {:>8}", "speed-up")?;
        for p in &self.fixed {
            let is_best = if p == self.best() {
                "  <- shortest"
            } else {
                ""
            };
            write!(f, "\n{p} {:>8.2}{is_best}", one / p.step_ns.max(1) as f64)?;
        }
        for (name, why) in &self.left_out {
            write!(f, "\n{name}: {why}")?;
        }
        let (Some(alone), Some(s)) = (self.scaled.first(), self.serial) else {
            return Ok(());
        };
        let percent = 100.0 * s;
        write!(
            f,
            "\n\nthe same batch per replica; serial part of a step: {percent:.0} %\n"
        )?;
        write!(f, "{header} {:>8} {:>10}", "speed-up", "N-(N-1)s")?;
        for p in &self.scaled {
            let n = p.n_replicas as f64;
            let speed_up = n * alone.step_ns as f64 / p.step_ns.max(1) as f64;
            write!(f, "\n{p} {speed_up:>8.2} {:>10.2}", n - (n - 1.0) * s)?;
        }
        Ok(())
    }
}
