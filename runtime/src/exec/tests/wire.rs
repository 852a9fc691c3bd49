//! The devices of a program as tasks of their own, each with its own executor, joined in memory.

use super::*;
use std::sync::OnceLock;
use std::sync::mpsc::{Receiver as Queue, Sender};

/// Bytes of a piece.
const PIECE: usize = 24;

/// Hands tensors to a thread.
struct Courier(Mutex<Sender<Outgoing>>);

impl Wire for Courier {
    fn send(&self, tensor: Outgoing) {
        // A test that is over takes no more tensors.
        let _ = self.0.lock().unwrap().send(tensor);
    }
}

/// An executor for each device of a program, and the tensors that each has sent.
struct Tasks {
    executors: Vec<Executor>,
    sent: Vec<Queue<Outgoing>>,
}

fn task(index: u32) -> DeviceName {
    DeviceName {
        job: Some("worker".into()),
        task: index,
        ..cpu(0)
    }
}

/// The device `index` of a program as a task sees it: its own is local, all others are of other tasks.
fn renamed(device: &DeviceName, index: u32) -> DeviceName {
    match device.index == index {
        true => cpu(0),
        false => task(device.index),
    }
}

/// The part of a program that one task runs.
fn part(whole: &Program, index: usize) -> Program {
    let mut own = whole.partitions[index].clone();
    let number = own.device.index;
    own.device = cpu(0);
    for step in &mut own.steps {
        if let StepKind::Send { key, .. } | StepKind::Recv { key, .. } = &mut step.kind {
            key.source = renamed(&key.source, number);
            key.destination = renamed(&key.destination, number);
        }
    }
    let is_own = |i: usize| own.buffers.iter().any(|b| b.loc == Loc::Output(i as u32));
    let n_outputs = whole.outputs.len();
    let outputs = match (0..n_outputs).any(is_own) {
        true => whole.outputs.clone(),
        false => vec![],
    };
    program(whole.inputs.clone(), outputs, vec![own])
}

fn tasks(whole: &Program, threads: usize) -> Tasks {
    let (mut executors, mut sent) = (Vec::new(), Vec::new());
    for index in 0..whole.partitions.len() {
        let (sender, receiver) = mpsc::channel();
        let options = ExecOptions {
            pool: Arc::new(Pool::new(threads)),
            wire: Some(Arc::new(Courier(Mutex::new(sender)))),
            ..ExecOptions::default()
        };
        let own = Arc::new(part(whole, index));
        executors.push(Executor::new(own, &options).unwrap());
        sent.push(receiver);
    }
    Tasks { executors, sent }
}

impl Tasks {
    /// Brings a tensor of task `from` to its receiver, piece by piece.
    fn carry(&self, from: usize, tensor: &Outgoing) -> Result<Received, Error> {
        let key = &self.executors[from].outgoing()[tensor.end].key;
        let to = &self.executors[key.destination.task as usize];
        let source = task(from as u32);
        let is_it = |end: &RemoteEnd| end.key.source == source && end.key.tensor == key.tensor;
        let end = to.incoming().position(is_it).unwrap();
        let (bytes, mut last) = (tensor.as_ref(), Received::Part);
        for (i, piece) in bytes.chunks(PIECE).enumerate() {
            last = to.receive(end, tensor.run, i * PIECE, piece)?;
        }
        Ok(last)
    }

    /// One run of all tasks, the one of `late` beginning last; a task that fails aborts all.
    fn run(&self, run: u64, x: &Tensor, late: usize) -> Vec<Result<Vec<Tensor>, Error>> {
        let n_left = AtomicUsize::new(self.executors.len());
        let executors = &self.executors;
        let n_left_here = &n_left;
        let work = move |index: usize| {
            let executor = &executors[index];
            if index == late {
                std::thread::sleep(Duration::from_millis(1));
            }
            let mut outputs = executor.new_outputs()?;
            let ran = executor.run_as(run, std::slice::from_ref(x), &mut outputs);
            n_left_here.fetch_sub(1, Ordering::SeqCst);
            if let Err(e) = &ran {
                let others = executors.iter();
                others.for_each(|other| other.abort(run, e.clone()));
            }
            ran.map(|()| outputs)
        };
        let work = &work;
        std::thread::scope(|scope| {
            let runs: Vec<_> = (0..self.executors.len())
                .map(|index| scope.spawn(move || work(index)))
                .collect();
            while n_left.load(Ordering::SeqCst) > 0 {
                for (from, sent) in self.sent.iter().enumerate() {
                    sent.try_iter().for_each(|tensor| {
                        self.carry(from, &tensor).unwrap();
                    });
                }
                std::thread::yield_now();
            }
            runs.into_iter().map(|r| r.join().unwrap()).collect()
        })
    }
}

fn filled(value: f32, n: usize) -> Tensor {
    Tensor::from_slice(&vec![value; n], &[n]).unwrap()
}

#[test]
fn tasks_compute_as_one_process_does() {
    watched(|| {
        for (threads, n) in [(1, 16), (2, 100)] {
            let tasks = tasks(&there_and_back(n), threads);
            for run in 1..if cfg!(miri) { 3 } else { 100 } {
                let late = (run % 3) as usize;
                let results = tasks.run(run, &filled(run as f32, n), late);
                let y = results[0].as_ref().unwrap();
                assert_eq!(y[0].as_slice::<f32>(), vec![5.0 * run as f32; n]);
                assert_eq!(results[1], Ok(vec![]));
            }
        }
    });
}

#[test]
fn a_task_that_fails_ends_the_run_of_all_and_the_next_run_works() {
    watched(|| {
        let tasks = tasks(&there_and_back(64), 1);
        for round in 0..if cfg!(miri) { 1 } else { 20 } {
            let results = tasks.run(2 * round + 1, &filled(f32::NAN, 64), 0);
            let expected =
                "in node \"/u\": on /device:CPU:0: an index is out of range for its axis";
            for result in results {
                assert_eq!(result.unwrap_err().to_string(), expected);
            }
            let results = tasks.run(2 * round + 2, &filled(3.0, 64), 1);
            let y = results[0].as_ref().unwrap();
            assert_eq!(y[0].as_slice::<f32>(), [15.0; 64]);
        }
    });
}

/// A program of one step that receives `[n]` from task 1 and gives it.
fn receiver(n: usize) -> Executor {
    let tasks = tasks(&two_stages(n, add, add), 1);
    tasks.executors.into_iter().nth(1).unwrap()
}

#[test]
fn pieces_are_checked_and_late_ones_dropped() {
    let executor = receiver(4);
    let x = [filled(0.0, 4)];
    let bytes = filled(2.0, 4);
    let error = |run, offset, bytes: &[u8]| {
        let error = executor.receive(0, run, offset, bytes).unwrap_err();
        error.to_string()
    };
    assert_eq!(error(1, 4, &[0; 4]), MESSAGES[0]);
    assert_eq!(error(1, 0, &[0; 17]), MESSAGES[1]);
    assert_eq!(error(1, 0, &vec![0; 1 << 20]), MESSAGES[1]);
    assert!(executor.receive(1, 1, 0, &[]).is_err(), "an unknown end");
    // A tensor may come before its run.
    let piece = |run, range: std::ops::Range<usize>| {
        executor.receive(0, run, range.start, &bytes.as_bytes()[range])
    };
    assert_eq!(piece(1, 0..8), Ok(Received::Part));
    assert_eq!(piece(1, 8..16), Ok(Received::Whole));
    assert_eq!(error(1, 16, &[]), MESSAGES[1]);
    let mut y = executor.new_outputs().unwrap();
    executor.run_as(1, &x, &mut y).unwrap();
    assert_eq!(y[0].as_slice::<f32>(), [4.0; 4]);
    assert_eq!(piece(1, 0..16), Ok(Received::Late));
    let again = executor.run_as(1, &x, &mut y).unwrap_err();
    let expected = "run 1 cannot begin: run 1 has ended before it";
    assert_eq!(again.to_string(), expected);
    // Half a tensor of a run that never begins hides nothing of a later one.
    assert_eq!(piece(2, 0..8), Ok(Received::Part));
    assert_eq!(piece(3, 0..16), Ok(Received::Whole));
    executor.run_as(3, &x, &mut y).unwrap();
    assert_eq!(piece(2, 8..16), Ok(Received::Late));
}

const MESSAGES: [&str; 2] = [
    "tensor \"t\" from /job:worker/replica:0/task:0/device:CPU:0, run 1: byte 4 came, byte 0 was expected",
    "tensor \"t\" from /job:worker/replica:0/task:0/device:CPU:0, run 1: more than its 16 bytes came",
];

#[test]
fn an_abort_ends_a_run_that_waits_or_has_not_begun() {
    watched(|| {
        let executor = receiver(4);
        let x = [filled(0.0, 4)];
        let mut y = executor.new_outputs().unwrap();
        let lost = Error::new(ErrorKind::DeviceFailed, "lost /job:worker/replica:0/task:0");
        executor.abort(1, lost.clone());
        executor.abort(1, Error::invalid("another"));
        assert_eq!(executor.run_as(1, &x, &mut y), Err(lost.clone()));
        executor.abort(1, lost.clone());
        std::thread::scope(|scope| {
            let run = scope.spawn(|| executor.run_as(2, &x, &mut y));
            std::thread::sleep(Duration::from_millis(5));
            executor.abort(2, lost.clone());
            assert_eq!(run.join().unwrap(), Err(lost.clone()));
        });
        // Tensors that fail to arrive for an aborted run are late.
        assert_eq!(executor.receive(0, 2, 0, &[0; 16]), Ok(Received::Late));
    });
}

/// Keeps what it is lent.
#[derive(Default)]
struct Keeper(Mutex<Vec<Outgoing>>);

impl Wire for Keeper {
    fn send(&self, tensor: Outgoing) {
        self.0.lock().unwrap().push(tensor);
    }
}

#[test]
fn a_run_waits_for_lent_memory_which_outlives_the_executor() {
    watched(|| {
        let keeper = Arc::new(Keeper::default());
        let options = ExecOptions {
            wire: Some(keeper.clone()),
            ..ExecOptions::default()
        };
        let program = Arc::new(part(&two_stages(8, add, add), 0));
        let executor = Executor::new(program, &options).unwrap();
        let begun = OnceLock::new();
        executor.run_as(1, &[filled(1.0, 8)], &mut []).unwrap();
        std::thread::scope(|scope| {
            let next = scope.spawn(|| {
                let ran = executor.run_as(2, &[filled(3.0, 8)], &mut []);
                begun.set(()).unwrap();
                ran
            });
            std::thread::sleep(Duration::from_millis(10));
            assert_eq!(begun.get(), None, "memory of run 1 is still lent");
            let first = keeper.0.lock().unwrap().pop().unwrap();
            assert_eq!(first.as_ref(), filled(2.0, 8).as_bytes());
            drop(first);
            next.join().unwrap().unwrap();
        });
        // An abort ends the wait.
        executor.abort(3, Error::invalid("enough"));
        let ended = executor.run_as(3, &[filled(5.0, 8)], &mut []);
        assert_eq!(ended, Err(Error::invalid("enough")));
        drop(executor);
        let last = keeper.0.lock().unwrap().pop().unwrap();
        assert_eq!((last.run, last.as_ref()), (2, filled(6.0, 8).as_bytes()));
    });
}

#[test]
fn remote_ends_need_a_wire() {
    let program = Arc::new(part(&two_stages(4, add, add), 0));
    assert_eq!(program.validate(), Vec::<String>::new());
    let error = Executor::new(program, &ExecOptions::default())
        .err()
        .unwrap();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    let expected = "tensor \"t\" goes from /device:CPU:0 to /job:worker/replica:0/task:1/device:CPU:0, a device of another task: it takes a \
                    session on a cluster";
    assert_eq!(error.to_string(), expected);
}

/// A send of variable v, in a buffer, to another task.
fn shipping(buffer: u32) -> StepKind {
    StepKind::Send {
        key: Key {
            source: cpu(0),
            destination: task(1),
            tensor: "v".into(),
        },
        buffer: BufferId(buffer),
    }
}

/// An executor of a program that sends v, or of one that updates it, with what it sends.
fn with_keeper(p: Program, resources: &Arc<Resources>) -> (Executor, Arc<Keeper>) {
    let keeper = Arc::new(Keeper::default());
    let options = ExecOptions {
        wire: Some(keeper.clone()),
        resources: resources.clone(),
        ..ExecOptions::default()
    };
    (Executor::new(Arc::new(p), &options).unwrap(), keeper)
}

#[test]
fn a_variable_is_lent_as_it_is_and_assigned_elsewhere() {
    let updating = state::accumulator(true, true);
    let place = buffer("v", DType::F32, &[2], Loc::Variable(0));
    let steps = vec![step(shipping(0), "/ship", &[])];
    let mut p = program(
        vec![],
        vec![],
        vec![partition(0, 0, vec![place], vec![], steps)],
    );
    p.variables = updating.variables.clone();
    p.variables[0].in_place = false;
    let resources = Arc::new(Resources::default());
    let ((ships, kept), (updates, _)) = (
        with_keeper(p, &resources),
        with_keeper(updating, &resources),
    );
    let value = || resources.get("c", "v").unwrap().unwrap();
    ships.run_as(1, &[], &mut []).unwrap();
    let lent = kept.0.lock().unwrap().pop().unwrap();
    assert_eq!(lent.as_ref().as_ptr(), value().as_bytes().as_ptr());
    let one = filled(1.0, 2);
    updates.run(&[one.clone(), one]).unwrap();
    assert_eq!(value(), state::floats(&[2.0, 3.0]));
    assert_eq!(lent.as_ref(), state::floats(&[1.0, 2.0]).as_bytes());
}

#[test]
fn a_variable_that_the_run_assigns_is_staged() {
    for in_place in [false, true] {
        let mut p = state::accumulator(in_place, true);
        let own = &mut p.partitions[0];
        // Sent before the check and the update.
        for step in &mut own.steps {
            step.deps.iter_mut().for_each(|dep| dep.0 += 1);
            step.deps.push(StepId(0));
        }
        own.steps.insert(0, step(shipping(2), "/ship", &[]));
        let resources = Arc::new(Resources::default());
        let (both, kept) = with_keeper(p, &resources);
        let one = filled(1.0, 2);
        both.run(&[one.clone(), one]).unwrap();
        let lent = kept.0.lock().unwrap().pop().unwrap();
        assert_eq!(lent.as_ref(), state::floats(&[1.0, 2.0]).as_bytes());
    }
}

/// Set to let [`gated`] go on.
static IS_OPEN: AtomicBool = AtomicBool::new(false);

/// Adds once it may.
unsafe extern "C" fn gated(args: *const *mut u8, begin: u64, end: u64) -> u32 {
    while !IS_OPEN.load(Ordering::SeqCst) {
        std::thread::yield_now();
    }
    // SAFETY: the arguments are those of the other kernel.
    unsafe { add(args, begin, end) }
}

/// Waits for a progress, and gives its count.
fn progress_of(executor: &Executor, steps: &[&str], awaited: &[&str]) -> u64 {
    loop {
        let Progress {
            count,
            steps: at,
            awaited: absent,
            ..
        } = executor.progress();
        let at: Vec<&str> = at.iter().map(|(_, origin)| origin.as_str()).collect();
        let absent: Vec<&str> = absent.iter().map(|end| end.key.tensor.as_str()).collect();
        if at == steps && absent == awaited {
            return count;
        }
        std::thread::yield_now();
    }
}

#[test]
fn progress_names_steps_and_absent_tensors() {
    watched(|| {
        let mut whole = there_and_back(16);
        whole.partitions[1].kernels[0] = kernel("gated", gated, 0);
        let tasks = &tasks(&whole, 1);
        let [first, second] = [0, 1].map(|i| &tasks.executors[i]);
        let x = &filled(1.0, 16);
        std::thread::scope(|scope| {
            let runs = tasks.executors.iter().map(|executor| {
                scope.spawn(move || {
                    let mut outputs = executor.new_outputs().unwrap();
                    let inputs = &[x.clone()][..executor.program().inputs.len()];
                    executor.run_as(1, inputs, &mut outputs).unwrap();
                })
            });
            let runs: Vec<_> = runs.collect();
            progress_of(first, &[], &["u"]);
            let before = progress_of(second, &[], &["t"]);
            tasks.carry(0, &tasks.sent[0].recv().unwrap()).unwrap();
            let at = progress_of(second, &["/u"], &[]);
            assert!(at > before + 1, "pieces and steps count");
            assert_eq!(second.progress().count, at);
            IS_OPEN.store(true, Ordering::SeqCst);
            tasks.carry(1, &tasks.sent[1].recv().unwrap()).unwrap();
            runs.into_iter().for_each(|run| run.join().unwrap());
        });
        assert!(!second.progress().is_sending);
        progress_of(first, &[], &[]);
        progress_of(second, &[], &[]);
    });
}
