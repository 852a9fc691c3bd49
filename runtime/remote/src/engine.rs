//! The work of a task beside talk: plans of programs, compilation of parts, and their runs.

use crate::TaskName;
use crate::contents::Document;
use crate::messages::{DeviceInfo, Fault};
use crate::outbox::PartWire;
use crate::turn::{StateUse, Turn};
use gristmill_runtime::exec::{Executor, Progress, Received, RemoteEnd, VariableState};
use gristmill_runtime::program::{IoSpec, Program};
use gristmill_runtime::{Error, Tensor};
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::oneshot;

/// Slow work.
pub type Job<T> = Pin<Box<dyn Future<Output = Result<T, Fault>> + Send>>;

/// Work on a thread where it may block.
pub fn in_thread<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, Fault> + Send + 'static,
) -> Job<T> {
    let handle = tokio::task::spawn_blocking(work);
    Box::pin(async move {
        handle.await.unwrap_or_else(|e| {
            let message = format!("a task of the server panicked: {e}");
            Err(Fault::new(gristmill_runtime::ErrorKind::Internal, message))
        })
    })
}

/// The question to whoever gave an order, after a wait: do they still want it?
pub struct Wanted(oneshot::Sender<()>);

impl Wanted {
    /// True if they do. Then they wait for the end of the work, however long it takes.
    pub fn ask(self) -> bool {
        self.0.send(()).is_ok()
    }
}

/// Work that begins with a wait for runs which have the variables, on a thread where it may block. After the
/// wait it asks whether it is wanted: that is so for some time. Errors after that time; then nothing is done.
pub fn in_thread_within<T: Send + 'static>(
    at_most: Duration,
    work: impl FnOnce(Wanted) -> Result<T, Fault> + Send + 'static,
) -> Job<T> {
    let (begun, mut begins) = oneshot::channel();
    let mut working = in_thread(move || work(Wanted(begun)));
    Box::pin(async move {
        tokio::select! {
            done = &mut working => return done,
            began = tokio::time::timeout(at_most, &mut begins) => if began.is_err() {
                begins.close();
                // It may have begun at the last moment.
                begins.try_recv().map_err(|_| variables_in_use(at_most))?;
            },
        }
        working.await
    })
}

/// The error of an order to set variables that was given up.
pub(crate) fn variables_in_use(waited: Duration) -> Fault {
    let message = format!("runs that use the variables have not ended within {waited:?}");
    let hint = "nothing was changed here; try again once the runs have ended";
    Fault::new(gristmill_runtime::ErrorKind::DeviceFailed, message).with_hint(hint)
}

/// The compiler and executor of a task. Text of programs and parts is its own affair: only engines write it and read it.
pub trait Engine: Send + Sync + 'static {
    /// Version of the program. Tasks of another version are refused.
    fn version(&self) -> String;

    /// The devices of this task.
    fn devices(&self) -> Vec<DeviceInfo>;

    /// The tasks named by a client's program.
    fn tasks(&self, program: &Document) -> Result<Vec<TaskName>, Fault>;

    /// Divides a client's program over devices of tasks; those of the first task are for nodes without a pin.
    fn plan(&self, program: Document, devices: Vec<(TaskName, Vec<DeviceInfo>)>) -> Job<Plan>;

    /// The variables of this task.
    fn variables(&self) -> Result<Vec<VariableState>, Fault>;

    /// Sets all variables of containers to their initial values, between runs. Errors, and changes nothing,
    /// when it would have to wait for longer.
    fn reset(&self, containers: Vec<String>, at_most: Duration) -> Job<()>;

    /// Compiles a part for this task. What leaves it goes to the wire.
    fn register(&self, part: Document, wire: Arc<PartWire>) -> Job<Made>;
}

/// A program divided over tasks.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Its inputs, in order.
    pub inputs: Vec<IoSpec>,
    /// Its outputs, in order.
    pub outputs: Vec<IoSpec>,
    /// The share of each task.
    pub shares: Vec<Arc<Share>>,
    /// Wishes that could not be met.
    pub warnings: Vec<String>,
    /// The device of each node, for people.
    pub placement: String,
}

/// The share of a task in a program.
#[derive(Clone, Debug)]
pub struct Share {
    /// The task.
    pub task: TaskName,
    /// Text and constants for its engine.
    pub part: Document,
    /// Index among the program's inputs of each input of the part.
    pub inputs: Vec<usize>,
    /// Index among the program's outputs of each output of the part.
    pub outputs: Vec<usize>,
}

/// A compiled part.
pub struct Made {
    /// The part.
    pub part: Arc<dyn Part>,
    /// Warnings of its compilation.
    pub warnings: Vec<String>,
}

/// A part of a program, ready to run.
pub trait Part: Send + Sync + 'static {
    /// Its inputs, in order.
    fn inputs(&self) -> Vec<IoSpec>;

    /// Tensors for other tasks, by the index in [`Outgoing::end`](gristmill_runtime::exec::Outgoing::end).
    fn outgoing(&self) -> Vec<RemoteEnd>;

    /// Tensors from other tasks, by the index of [`Part::receive`].
    fn incoming(&self) -> Vec<RemoteEnd>;

    /// Its use of variables.
    fn state_use(&self) -> StateUse;

    /// True if its runs hold devices which other runs wait for: see [`Executor::holds_devices`].
    fn holds_devices(&self) -> bool;

    /// Its variables.
    fn variables(&self) -> Vec<VariableState>;

    /// Takes a turn on its variables, once the runs before it have ended.
    fn hold(self: Arc<Self>) -> Job<Turn>;

    /// Runs once, as the run of this number.
    fn run(self: Arc<Self>, run: u64, feeds: Vec<Tensor>) -> Job<Vec<Tensor>>;

    /// Uses up the number of a run without a run: see [`Executor::skip`].
    fn skip(&self, run: u64);

    /// Sets its variables to their initial values, between runs. Errors, and changes nothing, when it would
    /// have to wait for longer.
    fn initialise(self: Arc<Self>, at_most: Duration) -> Job<()>;

    /// Takes bytes of an arriving tensor: see [`Executor::receive`].
    fn receive(&self, end: usize, run: u64, offset: usize, bytes: &[u8])
    -> Result<Received, Error>;

    /// Gives up a run: see [`Executor::abort`].
    fn abort(&self, run: u64, error: Error);

    /// The progress of the run under way: see [`Executor::progress`].
    fn progress(&self) -> Progress;
}

/// The outputs of a run.
fn ran(executor: &Executor, run: u64, feeds: &[Tensor]) -> Result<Vec<Tensor>, Error> {
    let specs = executor.program().outputs.iter();
    let outputs = specs.map(|o| Tensor::zeros(o.dtype, &o.shape));
    let mut outputs = outputs.collect::<Result<Vec<_>, Error>>()?;
    executor.run_as(run, feeds, &mut outputs)?;
    Ok(outputs)
}

/// Adds the variables of a program and of the bodies of its loops and branches, each once.
fn add_variables(program: &Program, found: &mut Vec<VariableState>) {
    for spec in &program.variables {
        let is_it = |v: &VariableState| v.container == spec.container && v.name == spec.name;
        if !found.iter().any(is_it) {
            found.push(VariableState {
                container: spec.container.clone(),
                name: spec.name.clone(),
                dtype: spec.dtype,
                shape: None,
            });
        }
    }
    let steps = program.partitions.iter().flat_map(|p| &p.steps);
    let bodies = steps.flat_map(|step| step.kind.sub_programs());
    bodies.for_each(|body| add_variables(body, found));
}

impl Part for Executor {
    fn inputs(&self) -> Vec<IoSpec> {
        self.program().inputs.clone()
    }

    fn outgoing(&self) -> Vec<RemoteEnd> {
        Executor::outgoing(self).to_vec()
    }

    fn incoming(&self) -> Vec<RemoteEnd> {
        Executor::incoming(self).cloned().collect()
    }

    fn state_use(&self) -> StateUse {
        match Executor::state_use(self) {
            [_, true] => StateUse::Assigns,
            [true, false] => StateUse::Reads,
            [false, false] => StateUse::None,
        }
    }

    fn holds_devices(&self) -> bool {
        Executor::holds_devices(self)
    }

    fn variables(&self) -> Vec<VariableState> {
        let mut found = Vec::new();
        add_variables(self.program(), &mut found);
        found
    }

    fn hold(self: Arc<Self>) -> Job<Turn> {
        Turn::of(self)
    }

    fn run(self: Arc<Self>, run: u64, feeds: Vec<Tensor>) -> Job<Vec<Tensor>> {
        in_thread(move || Ok(ran(&self, run, &feeds)?))
    }

    fn skip(&self, run: u64) {
        Executor::skip(self, run);
    }

    fn initialise(self: Arc<Self>, at_most: Duration) -> Job<()> {
        in_thread_within(at_most, move |wanted| {
            Ok(self.initialise_if(|| wanted.ask())?)
        })
    }

    fn receive(
        &self,
        end: usize,
        run: u64,
        offset: usize,
        bytes: &[u8],
    ) -> Result<Received, Error> {
        Executor::receive(self, end, run, offset, bytes)
    }

    fn abort(&self, run: u64, error: Error) {
        Executor::abort(self, run, error);
    }

    fn progress(&self) -> Progress {
        Executor::progress(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use gristmill_runtime::DType;
    use gristmill_runtime::device::{DeviceKind, DeviceName};
    use gristmill_runtime::program::{BufferId, If, Partition, Step, StepKind, VariableSpec};

    fn program(variables: &[&str], steps: Vec<StepKind>) -> Program {
        let variables = variables.iter().map(|name| VariableSpec {
            container: "own".into(),
            name: (*name).into(),
            dtype: DType::F32,
            initial: None,
            in_place: false,
        });
        let steps = steps.into_iter().map(|kind| Step {
            kind,
            origin: "/if".into(),
            deps: vec![],
        });
        Program {
            name: "test".into(),
            inputs: vec![],
            outputs: vec![],
            variables: variables.collect(),
            partitions: vec![Partition {
                device: DeviceName::local(DeviceKind::Cpu, 0),
                arena_bytes: 0,
                buffers: vec![],
                constants: vec![],
                kernels: vec![],
                gpu_code: vec![],
                steps: steps.collect(),
                memory_limit: None,
            }],
        }
    }

    /// Work on a lock within a time, and whether it was done.
    async fn within(at_most: Duration, held: &Arc<std::sync::Mutex<bool>>) -> Result<(), Fault> {
        let held = held.clone();
        let work = in_thread_within(at_most, move |wanted| {
            let mut done = held.lock().unwrap();
            *done |= wanted.ask();
            Ok(())
        });
        work.await
    }

    #[test]
    fn work_given_up_is_not_done_later() {
        let runtime = tokio::runtime::Runtime::new().unwrap();
        let lock = Arc::new(std::sync::Mutex::new(false));
        let set = |at_most| runtime.block_on(within(at_most, &lock));
        let held = lock.lock().unwrap();
        let late = set(Duration::from_millis(50)).unwrap_err().to_string();
        let expected = "runs that use the variables have not ended within 50ms";
        assert_eq!(late, expected);
        drop(held);
        // The thread has the lock some time after.
        std::thread::sleep(Duration::from_millis(100));
        assert!(!*lock.lock().unwrap());
        set(Duration::from_secs(9)).unwrap();
        assert!(*lock.lock().unwrap());
    }

    #[test]
    fn variables_of_bodies_are_variables() {
        let branch = |names: &[&str]| Arc::new(program(names, vec![]));
        let body = StepKind::If(Box::new(If {
            cond: BufferId(0),
            then_branch: branch(&["a", "b"]),
            else_branch: branch(&["c", "b"]),
            args: vec![],
            results: vec![],
        }));
        let mut found = Vec::new();
        add_variables(&program(&["a"], vec![body]), &mut found);
        let names: Vec<&str> = found.iter().map(|v| v.name.as_str()).collect();
        assert_eq!(names, ["a", "b", "c"]);
        assert_eq!(found[2].container, "own");
    }
}
