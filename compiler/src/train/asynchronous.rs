//! Workers in no step with each other: each pulls the variables, computes gradients of a batch of its own, and
//! pushes them, whatever the others have pushed meanwhile.

use super::data::Batch;
use super::trainer::{StepOutputs, Trainer, check_inputs, executable_for};
use crate::compiled::{Compiled, Executable, Outputs};
use crate::error::{Error, Result};
use crate::ir::random::STEP;
use crate::ir::{DeviceRequest, Graph, Op, ValueId};
use crate::options::{DataParallel, Options};
use crate::passes::{PushPull, place_on_servers, push_pull, without_assignment};
use crate::session::Session;
use gristmill_runtime::Tensor;
use gristmill_runtime::device::DeviceName;
use gristmill_runtime::program::IoSpec;
use gristmill_runtime::sync::lock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

/// A program whose results are written to the memory of earlier ones.
struct Repeated {
    program: Compiled,
    spare: Spare,
}

/// Results that nobody needs any more.
type Spare = Arc<Mutex<Vec<Vec<Tensor>>>>;

impl Repeated {
    fn new(program: Compiled) -> Repeated {
        Repeated {
            program,
            spare: Spare::default(),
        }
    }

    /// Runs with inputs by name.
    fn run(&self, inputs: impl IntoIterator<Item = (String, Tensor)>) -> Result<Results> {
        let inputs = self.program.bind(inputs)?;
        let Some(executable) = self.program.executable_for(&inputs)? else {
            let outputs = self.program.run_ordered(&inputs)?;
            let names = outputs.iter().map(|(name, _)| name.to_owned());
            return Ok(Results {
                names: names.collect(),
                values: outputs.into_tensors(),
                spare: Spare::default(),
            });
        };
        let specs = &executable.lowered.program.outputs;
        let mut values = lock(&self.spare).pop().unwrap_or_default();
        let fits = |(t, o): (&Tensor, &IoSpec)| t.dtype() == o.dtype && t.shape() == o.shape;
        if values.len() != specs.len() || !values.iter().zip(specs).all(fits) {
            let zeros = specs.iter().map(|o| Tensor::zeros(o.dtype, &o.shape));
            values = zeros.collect::<std::result::Result<_, _>>()?;
        }
        executable.run_into(&inputs, &mut values)?;
        Ok(Results {
            names: specs.iter().map(|o| o.name.clone()).collect(),
            values,
            spare: self.spare.clone(),
        })
    }
}

/// The results of a program, whose memory goes back to it.
#[derive(Debug)]
struct Results {
    names: Vec<String>,
    values: Vec<Tensor>,
    spare: Spare,
}

impl Results {
    fn iter(&self) -> impl Iterator<Item = (&String, &Tensor)> {
        self.names.iter().zip(&self.values)
    }

    fn get(&self, name: &str) -> Option<&Tensor> {
        self.iter().find(|(own, _)| *own == name).map(|(_, t)| t)
    }
}

impl Drop for Results {
    fn drop(&mut self) {
        lock(&self.spare).push(std::mem::take(&mut self.values));
    }
}

/// The programs of asynchronous training.
pub(super) struct Asynchronous {
    pull: Repeated,
    /// By worker: its device, and the program of gradients.
    workers: Vec<(DeviceName, Repeated)>,
    push: Compiled,
    /// Where pushes overlap: the container of the number of steps, which each of them raises by one.
    counts_in: Option<String>,
    /// Steps by [`Trainer::step`].
    n_steps: AtomicUsize,
}

impl Asynchronous {
    /// The programs of a step, whose graph has these gradients.
    ///
    /// Errors with `Unsupported`, naming the node, when the step cannot be cut.
    pub(super) fn new(
        session: &Session,
        options: &Options,
        on: &DataParallel,
        mut step: Graph,
        gradients: &[ValueId],
    ) -> Result<Asynchronous> {
        step.set_container(&options.container);
        let PushPull {
            mut pull,
            compute,
            mut push,
        } = push_pull(&step, gradients)?;
        add_number(&push, &mut pull)?;
        if options.updates_overlap {
            push = without_assignment(&push, STEP)?;
        }
        place_on_servers([&mut push, &mut pull], &on.servers, on.deal);
        let program = |graph: Graph| session.undeclared((&graph).into(), options);
        let worker = |device: &DeviceName| {
            let mut own = compute.clone();
            let request = DeviceRequest::from(device).into_requested();
            own.request_each(|_, _| request.clone());
            Ok((device.clone(), Repeated::new(program(own)?)))
        };
        Ok(Asynchronous {
            pull: Repeated::new(program(pull)?),
            workers: on.devices.iter().map(worker).collect::<Result<_>>()?,
            push: program(push)?,
            counts_in: options.updates_overlap.then(|| options.container.clone()),
            n_steps: 0.into(),
        })
    }

    /// True where pushes overlap.
    pub(super) fn is_hogwild(&self) -> bool {
        self.counts_in.is_some()
    }

    /// All programs.
    pub(super) fn programs(&self) -> impl Iterator<Item = &Compiled> + Clone {
        let workers = self.workers.iter().map(|(_, own)| &own.program);
        [&self.pull.program, &self.push].into_iter().chain(workers)
    }

    pub(super) fn n_workers(&self) -> usize {
        self.workers.len()
    }

    /// The worker of the next step: they take turns.
    pub(super) fn next(&self) -> usize {
        self.n_steps.fetch_add(1, Ordering::Relaxed) % self.workers.len()
    }
}

/// Adds the number of steps so far, which a push counts, to the values pulled.
fn add_number(push: &Graph, pull: &mut Graph) -> Result<()> {
    let is_number = |op: &Op| matches!(op, Op::ReadVariable { name, .. } if name == STEP);
    let mut nodes = push.nodes().map(|(_, node)| node);
    let read = nodes.find(|node| is_number(&node.op));
    let read = read.ok_or_else(|| Error::internal("a push does not count"))?;
    let number = pull.add_copy(read, &[])?[0];
    pull.add_output(STEP, number);
    Ok(())
}

/// A worker of asynchronous training ([`Updates::Asynchronous`](super::Updates::Asynchronous), [`Updates::Hogwild`](super::Updates::Hogwild)). Its three parts are for programs that
/// decide themselves when each happens; [`Trainer::step`] does one after the other, and [`Trainer::fit`] keeps all workers busy.
///
/// Workers are independent of each other: use each from a thread of its own.
#[derive(Clone, Copy)]
pub struct Worker<'t> {
    trainer: &'t Trainer,
    asynchronous: &'t Asynchronous,
    index: usize,
}

/// Values of the variables: at one time, unless pushes overlap.
#[derive(Debug)]
pub struct Pulled {
    values: Results,
    /// Number of steps before.
    number: u64,
}

/// Gradients of a batch by values of the variables.
#[derive(Debug)]
pub struct Gradients {
    worker: usize,
    /// Number of steps before the values.
    since: u64,
    outputs: Results,
}

impl Pulled {
    /// The values but for the number of steps.
    fn weights(&self) -> impl Iterator<Item = (String, Tensor)> {
        let all = self.values.iter().filter(|(name, _)| *name != STEP);
        all.map(|(name, t)| (name.clone(), t.clone()))
    }
}

impl Trainer {
    /// The workers of asynchronous training; none of any other.
    pub fn workers(&self) -> Vec<Worker<'_>> {
        let asynchronous = self.asynchronous();
        let workers = asynchronous.iter().flat_map(|a| {
            (0..a.n_workers()).map(|index| Worker {
                trainer: self,
                asynchronous: a,
                index,
            })
        });
        workers.collect()
    }
}

impl Worker<'_> {
    /// Its number, from 0.
    pub fn index(&self) -> usize {
        self.index
    }

    /// Its device.
    pub fn device(&self) -> &DeviceName {
        &self.asynchronous.workers[self.index].0
    }

    /// Reads all variables: at one time, between pushes, unless pushes [overlap](super::Updates::Hogwild).
    ///
    /// Errors as [`Compiled::run`] does.
    pub fn pull(&self) -> Result<Pulled> {
        let values = self.asynchronous.pull.run([])?;
        let number = values.get(STEP).and_then(|t| t.to_f64s().first().copied());
        let number = number.ok_or_else(|| Error::internal("a pull without a number of steps"))?;
        Ok(Pulled {
            values,
            number: number as u64,
        })
    }

    /// The gradients of a batch: inputs by name. No variable is read or assigned.
    ///
    /// Errors as [`Trainer::step`] does, with the worker's device.
    pub fn compute(&self, pulled: &Pulled, batch: Batch) -> Result<Gradients> {
        let program = &self.asynchronous.workers[self.index].1;
        check_inputs(self.trainer.program(), &batch)?;
        let outputs = program.run(batch.into_iter().chain(pulled.weights()));
        let on_device = |e: Error| e.context(format!("worker on {}", self.device()));
        Ok(Gradients {
            worker: self.index,
            since: pulled.number,
            outputs: outputs.map_err(on_device)?,
        })
    }

    /// Updates the variables. Pushes are exclusive, so that no update is lost, unless they [overlap](super::Updates::Hogwild).
    ///
    /// Errors as [`Compiled::run`] does, and with `InvalidInput` on gradients of another worker.
    pub fn push(&self, gradients: Gradients) -> Result<StepOutputs> {
        if gradients.worker != self.index {
            let (own, other) = (self.index, gradients.worker);
            let message = format!("worker {own}: a push of gradients of worker {other}");
            return Err(Error::invalid(message).hint("the worker that has computed them"));
        }
        let Asynchronous {
            push, counts_in, ..
        } = self.asynchronous;
        let names = push.inputs().iter().map(|(name, _)| name.as_str());
        let value = |name| Some((name, gradients.outputs.get(name)?.clone()));
        let pushed = push.run(names.filter_map(value))?;
        let computed = gradients.outputs.iter();
        let computed = computed.map(|(name, t)| (name.clone(), t.clone()));
        let computed = Outputs::of(computed.collect());
        let mut step = self.trainer.step_outputs(&[computed, pushed])?;
        if let Some(container) = counts_in {
            step.number = self.trainer.resources().count(container, STEP)? as u64;
        }
        Ok(StepOutputs {
            worker: gradients.worker,
            staleness: step.number.saturating_sub(gradients.since + 1),
            ..step
        })
    }

    /// True where it may push by itself, at any time.
    pub(super) fn pushes(&self) -> bool {
        self.asynchronous.is_hogwild()
    }

    /// The code of its gradients.
    pub(super) fn executable_for(&self, batch: &Batch) -> Result<Option<Arc<Executable>>> {
        check_inputs(self.trainer.program(), batch)?;
        let weights: Batch = self.pull()?.weights().collect();
        let given = [batch.clone(), weights].concat();
        executable_for(&self.asynchronous.workers[self.index].1.program, &given)
    }

    /// All three, one after the other.
    pub(super) fn step(&self, batch: Batch) -> Result<StepOutputs> {
        self.push(self.compute(&self.pull()?, batch)?)
    }
}
