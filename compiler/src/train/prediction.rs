//! Strategies compared by the predicted time of a step.

use super::model::Model;
use super::strategy::{Strategy, Updates};
use super::trainer::{Objective, Training, step_graph};
use crate::compiled::{Compiled, InputShapes};
use crate::cost::Bytes;
use crate::error::{Error, Result};
use crate::ir::Bindings;
use crate::options::Deal;
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
    /// Examples of a step.
    pub batch_size: usize,
    /// Predicted time of a step.
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
    /// Mirrored training on 1, 2, .. devices at the same batch per replica; the first is one device alone.
    pub scaled: Vec<Prediction>,
    /// The part of a step on one device without growth by its batch, such as the update of the weights.
    pub serial: f64,
}

impl Comparison {
    /// The strategies on a session's devices, for batches of a size. Nothing is compiled or run: the devices may
    /// be those of another machine.
    ///
    /// Errors as [`Trainer::in_session`](super::Trainer::in_session) does, and with `InvalidInput` when an extent
    /// beside the batch is not fixed.
    pub fn of(
        session: &Session,
        name: &str,
        training: &Training,
        batch_size: usize,
        build: impl Fn(&mut Model) -> Result<Objective>,
    ) -> Result<Comparison> {
        let predict = |strategy, n| {
            let training = Training {
                strategy,
                ..training.clone()
            };
            Prediction::of(session, name, &training, n, &build)
        };
        let own = |strategy| predict(strategy, batch_size);
        let devices = Strategy::devices(&session.settings().devices)?;
        let mut fixed = vec![own(Strategy::OneDevice)?];
        let alone = |n: usize| Strategy::Mirrored {
            devices: devices[..n].to_vec(),
        };
        let mut scaled = vec![predict(alone(1), batch_size)?];
        for n in counts(devices.len().min(batch_size)) {
            fixed.push(own(alone(n))?);
            scaled.push(predict(alone(n), n.saturating_mul(batch_size))?);
        }
        for strategy in with_servers(&devices) {
            fixed.push(own(strategy)?);
        }
        let twice = predict(alone(1), 2 * batch_size)?.step_ns as f64;
        let once = scaled[0].step_ns as f64;
        let serial = (2.0 * once - twice) / once.max(1.0);
        Ok(Comparison {
            fixed,
            scaled,
            serial: serial.clamp(0.0, 1.0),
        })
    }

    /// The strategy with the shortest step, the first of equals.
    pub fn best(&self) -> &Prediction {
        let best = self.fixed.iter().min_by_key(|p| p.step_ns);
        best.unwrap_or(&self.fixed[0])
    }
}

/// The strategies with variables on servers, for several devices.
fn with_servers(devices: &[DeviceName]) -> Vec<Strategy> {
    if devices.len() == 1 {
        return Vec::new();
    }
    let central = Strategy::CentralStorage {
        central: None,
        devices: devices.to_vec(),
    };
    let dealt = Strategy::ParameterServer {
        servers: Vec::new(),
        workers: devices.to_vec(),
        deal: Deal::BySize,
        updates: Updates::InStep,
    };
    vec![central, dealt]
}

/// Numbers of devices to look at: 2, 3 and 4, powers of two, and all.
fn counts(n: usize) -> impl Iterator<Item = usize> {
    (2..=n).filter(move |k| *k <= 4 || k.is_power_of_two() || *k == n)
}

impl Prediction {
    /// The prediction of a step on a batch of a size by the strategy of a training, in step.
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
        let mut graph = step_graph(name, training, build)?;
        graph.set_container(&options.container);
        let program = session.undeclared((&graph).into(), &options)?;
        let placement = program
            .plan_shapes(&shapes(&program, batch_size)?)?
            .placement;
        let mut busy = vec![0_u64; placement.devices.len()];
        for placed in placement.nodes.iter().flatten() {
            busy[placed.device] += placed.end.0.saturating_sub(placed.start.0);
        }
        let peaks = placement.peak_bytes.iter().map(|b| b.0);
        let on = options.data_parallel.as_ref();
        Ok(Prediction {
            n_replicas: on.map_or(1, |on| on.devices.len()),
            strategy: training.strategy.clone(),
            batch_size,
            step_ns: placement.makespan.0,
            busy_ns: busy.into_iter().max().unwrap_or(0),
            peak_bytes: placement.devices.into_iter().zip(peaks).collect(),
        })
    }
}

/// Shapes of the inputs for a batch.
fn shapes(program: &Compiled, batch_size: usize) -> Result<InputShapes> {
    let symbol = program.inputs().iter().find_map(|(_, ty)| {
        let first = ty.shape.first()?;
        let mut symbols = Vec::new();
        first.visit_symbols(&mut |symbol| symbols.push(symbol.to_owned()));
        symbols.pop()
    });
    let sizes: Bindings = symbol
        .map(|symbol| (symbol, batch_size))
        .into_iter()
        .collect();
    let shape = |(name, ty): &(String, crate::ir::Type)| {
        let shape = ty.shape.bind(&sizes).as_static();
        shape.ok_or_else(|| {
            let message =
                format!("input {name:?} ({ty}): the time of a step depends on its extents");
            Error::invalid(message).hint("fixed extents but for the batch")
        })
    };
    Ok(InputShapes {
        shapes: program.inputs().iter().map(shape).collect::<Result<_>>()?,
        values: Default::default(),
    })
}

impl fmt::Display for Prediction {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let peak = self.peak_bytes.iter().map(|(_, bytes)| *bytes).max();
        write!(
            f,
            "{:<17} {:>7} {:>7} {:>10} {:>10} {:>10} {:>11}",
            self.strategy.name(),
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
            "{:<17} {:>7} {:>7} {:>10} {:>10} {:>10} {:>11}",
            "strategy", "devices", "batch", "step", "compute", "waits", "peak memory"
        );
        let one = self.fixed[0].step_ns as f64;
        writeln!(f, "{header} {:>8}", "speed-up")?;
        for p in &self.fixed {
            let is_best = if p == self.best() {
                "  <- shortest"
            } else {
                ""
            };
            writeln!(f, "{p} {:>8.2}{is_best}", one / p.step_ns.max(1) as f64)?;
        }
        let Some(alone) = self.scaled.first().filter(|_| self.scaled.len() > 1) else {
            return Ok(());
        };
        let s = self.serial;
        writeln!(f)?;
        writeln!(
            f,
            "the same batch per replica; serial part of a step: {:.0} %",
            100.0 * s
        )?;
        writeln!(f, "{header} {:>8} {:>10}", "speed-up", "N-(N-1)s")?;
        for p in &self.scaled {
            let n = p.n_replicas as f64;
            let speed_up = n * alone.step_ns as f64 / p.step_ns.max(1) as f64;
            writeln!(f, "{p} {speed_up:>8.2} {:>10.2}", n - (n - 1.0) * s)?;
        }
        Ok(())
    }
}
