//! Executors that share threads, memory and variables.

use super::super::team::Leader;
use super::*;
use std::collections::BTreeSet;
use std::thread::ThreadId;

fn shared(threads: usize) -> ExecOptions {
    ExecOptions {
        pool: Arc::new(Pool::new(threads)),
        ..ExecOptions::default()
    }
}

/// Calls inside of [`add_together`], which goes on once there are as many as [`N_CALLERS`] at the
/// same time.
static INSIDE: AtomicU64 = AtomicU64::new(0);
const N_CALLERS: usize = 3;

unsafe extern "C" fn add_together(args: *const *mut u8, begin: u64, end: u64) -> u32 {
    if begin == 0 {
        INSIDE.fetch_add(1, Ordering::SeqCst);
        while INSIDE.load(Ordering::SeqCst) < N_CALLERS as u64 {
            std::thread::yield_now();
        }
    }
    // SAFETY: as in `add`.
    unsafe { add(args, begin, end) }
}

/// y = (x + x) + (x + x), by one step that meets the other callers.
fn meeting(n: usize) -> Program {
    let buffers = vec![
        buffer("x", DType::F32, &[n], Loc::Input(0)),
        buffer("t", DType::F32, &[n], at(0)),
        buffer("y", DType::F32, &[n], Loc::Output(0)),
    ];
    let kernels = vec![
        kernel("add_together", add_together, 0),
        kernel("add", add, 0),
    ];
    let steps = vec![
        step(call(0, &[0, 0, 1], n), "/t", &[]),
        step(call(1, &[1, 1, 2], n), "/y", &[0]),
    ];
    let p = partition(0, n * 4, buffers, kernels, steps);
    program(vec![f32_io("x", &[n])], vec![f32_io("y", &[n])], vec![p])
}

/// No run can end before the others are under way; each has an arena of its own.
#[test]
fn as_many_runs_are_in_flight_as_there_are_callers() {
    watched(|| {
        let lanes = Lanes::concurrent(Arc::new(meeting(100)), &shared(2), N_CALLERS).unwrap();
        let run = |x: f32| {
            let y = lanes.run(&[Tensor::from_slice(&[x; 100], &[100]).unwrap()]);
            assert_eq!(y.unwrap()[0].as_slice::<f32>(), [4.0 * x; 100]);
        };
        std::thread::scope(|s| {
            for caller in 0..N_CALLERS {
                s.spawn(move || run(caller as f32));
            }
        });
    });
}

#[test]
fn a_limit_bounds_the_runs_in_flight() {
    let limited = |limit: Option<usize>| {
        let mut p = simple(16, 0);
        p.partitions[0].memory_limit = limit;
        let lanes = Lanes::concurrent(Arc::new(p), &shared(1), 4).unwrap();
        lanes.n_lanes()
    };
    let memory = simple(16, 0).memory_use()[0].1;
    let (own, constants) = (memory.arena_bytes, memory.constant_bytes);
    assert_eq!(limited(None), 4);
    assert_eq!(limited(Some(3 * own + constants)), 3);
    assert_eq!(limited(Some(own + constants)), 1);
}

#[test]
fn programs_with_several_devices_have_one_lane() {
    let lanes = Lanes::concurrent(Arc::new(there_and_back(8)), &shared(2), 4).unwrap();
    assert_eq!(lanes.n_lanes(), 1);
}

/// Followers go to the run that begins, and none is in two runs.
#[test]
fn runs_in_flight_share_the_followers() {
    let pool = Pool::new(4);
    pool.start(0).unwrap();
    let core = pool.core();
    let [mut first, mut second] = [(); 2].map(|()| Leader::new(Patience::for_threads(4)));
    let all = core.hire(first.team(), 3);
    let none = core.hire(second.team(), 3);
    assert_eq!((all.n, none.n), (3, 0));
    drop((all, none));
    let (one, two) = (core.hire(second.team(), 1), core.hire(first.team(), 3));
    assert_eq!((one.n, two.n), (1, 2));
    assert_eq!(threads_of(&mut second, 1 + one.n), 2);
    assert_eq!(threads_of(&mut first, 1 + two.n), 3);
    drop((one, two));
    let all = core.hire(second.team(), 3);
    assert_eq!(threads_of(&mut second, 1 + all.n), 4);
}

/// Number of threads that a job runs on whose chunks wait until all have come.
fn threads_of(leader: &mut Leader, size: usize) -> usize {
    let seen: Mutex<BTreeSet<String>> = Mutex::default();
    let name = |id: ThreadId| format!("{id:?}");
    leader.set_size(size);
    let outcome = leader.run(size as u64, 1, &|_, _, _| {
        lock(&seen).insert(name(std::thread::current().id()));
        while lock(&seen).len() < size {
            std::thread::yield_now();
        }
        0
    });
    assert_eq!(outcome, Ok(()));
    lock(&seen).len()
}

/// Callers of two executors come and go, so that followers change teams while kernels run.
#[test]
fn followers_that_change_teams_leave_results_alone() {
    let rounds = if cfg!(miri) { 3 } else { 300 };
    watched(move || {
        let options = shared(3);
        let programs = [simple(1000, 0), simple(77, 64), simple(400, 8)];
        let executors = programs.map(|p| Executor::new(Arc::new(p), &options).unwrap());
        let repeat = |executor: &Executor, n: usize| {
            for round in 0..rounds {
                let x = vec![round as f32; n];
                let y = executor.run(&[Tensor::from_slice(&x, &[n]).unwrap()]);
                let expected = vec![round as f32 * 2.0 + 10.0; n];
                assert_eq!(y.unwrap()[0].as_slice::<f32>(), expected);
            }
        };
        std::thread::scope(|s| {
            for (executor, n) in executors.iter().zip([1000, 77, 400]) {
                s.spawn(move || repeat(executor, n));
            }
        });
        assert_eq!(options.pool.n_started(), 2);
    });
}

#[test]
fn executors_of_many_shapes_share_threads_and_the_largest_arena() {
    let options = shared(3);
    let sizes = [20_000usize, 90_000, 7, 30_000];
    let executors = sizes.map(|n| Executor::new(Arc::new(simple(n, 0)), &options).unwrap());
    for (executor, n) in executors.iter().zip(sizes) {
        let x = Tensor::from_slice(&vec![1f32; n], &[n]).unwrap();
        let y = executor.run(&[x]).unwrap();
        assert_eq!(y[0].as_slice::<f32>(), vec![12.0; n]);
    }
    let arenas = executors
        .iter()
        .map(|e| e.program().partitions[0].arena_bytes);
    let largest = arenas.max().unwrap().next_multiple_of(64);
    assert_eq!(options.pool.idle_bytes(), largest);
    assert_eq!(options.pool.n_started(), 2);
}

/// Helpers lead devices for one run after the other, of whichever executor.
#[test]
fn executors_share_helpers() {
    watched(|| {
        let options = shared(2);
        let programs = [there_and_back(8), there_and_back(20)];
        let executors = programs.map(|p| Executor::new(Arc::new(p), &options).unwrap());
        for _ in 0..20 {
            for (executor, n) in executors.iter().zip([8, 20]) {
                let x = Tensor::from_slice(&vec![1f32; n], &[n]).unwrap();
                assert_eq!(
                    executor.run(&[x]).unwrap()[0].as_slice::<f32>(),
                    vec![5.0; n]
                );
            }
        }
        assert_eq!(options.pool.n_started(), 2, "a follower and a helper");
    });
}

/// Without a lock around the whole run, one caller's assignment would be lost when another has read
/// before it.
#[test]
fn no_assignment_of_concurrent_runs_is_lost() {
    let (n_callers, n_runs) = (4, if cfg!(miri) { 5 } else { 200 });
    let options = shared(1);
    let lanes = Lanes::concurrent(Arc::new(counter()), &options, n_callers).unwrap();
    assert_eq!(lanes.n_lanes(), 1);
    let other = Executor::new(Arc::new(counter()), &options).unwrap();
    let x = Tensor::from_slice(&[1f32, 2.0], &[2]).unwrap();
    std::thread::scope(|s| {
        for caller in 0..n_callers {
            let (lanes, other, x) = (&lanes, &other, std::slice::from_ref(&x));
            s.spawn(move || {
                for _ in 0..n_runs {
                    let run = if caller % 2 == 0 {
                        lanes.run(x)
                    } else {
                        other.run(x)
                    };
                    run.unwrap();
                }
            });
        }
    });
    let runs = (n_callers * n_runs) as f32;
    let value = options.resources.get("c", "v").unwrap().unwrap();
    assert_eq!(value.as_slice::<f32>(), [1.0 + runs, 2.0 + 2.0 * runs]);
}

/// Readers inside of [`add_while_reading`], as [`INSIDE`] counts callers.
static READERS: AtomicU64 = AtomicU64::new(0);

unsafe extern "C" fn add_while_reading(args: *const *mut u8, begin: u64, end: u64) -> u32 {
    READERS.fetch_add(1, Ordering::SeqCst);
    while READERS.load(Ordering::SeqCst) < N_CALLERS as u64 {
        std::thread::yield_now();
    }
    // SAFETY: as in `add`.
    unsafe { add(args, begin, end) }
}

/// No reader can end before the others are under way; an assignment is before or behind each of them.
#[test]
fn runs_that_only_read_variables_are_side_by_side() {
    watched(|| {
        let options = shared(1);
        let mut reader = counter();
        let p = &mut reader.partitions[0];
        p.steps.pop();
        p.kernels = vec![kernel("add", add_while_reading, 0)];
        let lanes = Lanes::concurrent(Arc::new(reader), &options, N_CALLERS).unwrap();
        assert_eq!(lanes.n_lanes(), N_CALLERS);
        let writer = Executor::new(Arc::new(counter()), &options).unwrap();
        let x = Tensor::from_slice(&[1f32, 2.0], &[2]).unwrap();
        let x = std::slice::from_ref(&x);
        std::thread::scope(|s| {
            for _ in 0..N_CALLERS {
                s.spawn(|| {
                    let mut last = 0.0;
                    for _ in 0..50 {
                        let y = lanes.run(x).unwrap();
                        let y = y[0].as_slice::<f32>();
                        assert!(y[0] >= last && y[1] == 2.0 * y[0], "{y:?} after {last}");
                        last = y[0];
                    }
                });
            }
            while READERS.load(Ordering::SeqCst) < N_CALLERS as u64 {
                std::thread::yield_now();
            }
            (0..20).for_each(|_| _ = writer.run(x).unwrap());
        });
        let y = lanes.run(x).unwrap();
        assert_eq!(y[0].as_slice::<f32>(), [22.0, 44.0]);
    });
}

/// A host that makes calls in order, those on threads of its own, twice, or none.
enum Odd {
    OneByOne,
    Threads,
    Twice,
    Lazy,
    Broken,
}

impl HostThreads for Odd {
    fn parallel(&self, n: usize, share: &(dyn Fn(usize) + Sync)) {
        match self {
            Odd::OneByOne => (0..n).for_each(share),
            Odd::Threads => std::thread::scope(|s| {
                (0..n).for_each(|i| _ = s.spawn(move || share(i)));
            }),
            Odd::Twice => std::thread::scope(|s| {
                (0..2 * n).for_each(|_| _ = s.spawn(move || share(7)));
            }),
            Odd::Lazy => {}
            Odd::Broken => panic!("no thread is left"),
        }
    }
}

/// A pool of a host that runs tasks at once, later on another thread, never, or after the run.
#[test]
fn tasks_of_a_host_may_be_late_or_lost() {
    let x = Tensor::from_slice(&[3.0f32; 1000], &[1000]).unwrap();
    let late = Arc::new(Mutex::new(Vec::<Task>::new()));
    let own = late.clone();
    let hosts: [Arc<dyn HostThreads>; 4] = [
        Arc::new(Spawning::new(|task: Task| task())),
        Arc::new(Spawning::new(|task: Task| drop(std::thread::spawn(task)))),
        Arc::new(Spawning::new(drop::<Task>)),
        Arc::new(Spawning::new(move |task: Task| {
            own.lock().unwrap().push(task)
        })),
    ];
    for host in hosts {
        let options = ExecOptions {
            pool: Arc::new(Pool::hosted(3, host)),
            ..ExecOptions::default()
        };
        let executor = Executor::new(Arc::new(simple(1000, 8)), &options).unwrap();
        for _ in 0..20 {
            let y = executor.run(std::slice::from_ref(&x)).unwrap();
            assert_eq!(y[0].as_slice::<f32>(), [16.0; 1000]);
        }
    }
    let late = std::mem::take(&mut *late.lock().unwrap());
    assert!(!late.is_empty());
    late.into_iter().for_each(|task| task());
    let broken = Spawning::new(|_: Task| panic!("no thread is left"));
    let options = ExecOptions {
        pool: Arc::new(Pool::hosted(3, Arc::new(broken))),
        ..ExecOptions::default()
    };
    let executor = Executor::new(Arc::new(simple(1000, 8)), &options).unwrap();
    let error = executor.run(&[x]).unwrap_err().to_string();
    assert!(error.contains("no thread is left"), "{error}");
}

#[test]
fn threads_of_a_host_take_the_place_of_followers() {
    let x = Tensor::from_slice(&[3.0f32; 1000], &[1000]).unwrap();
    for host in [Odd::OneByOne, Odd::Threads, Odd::Twice, Odd::Lazy] {
        let options = ExecOptions {
            pool: Arc::new(Pool::hosted(3, Arc::new(host))),
            ..ExecOptions::default()
        };
        let executor = Executor::new(Arc::new(simple(1000, 8)), &options).unwrap();
        assert_eq!(options.pool.n_started(), 0);
        for _ in 0..20 {
            let y = executor.run(std::slice::from_ref(&x)).unwrap();
            assert_eq!(y[0].as_slice::<f32>(), [16.0; 1000]);
        }
    }
    let options = ExecOptions {
        pool: Arc::new(Pool::hosted(3, Arc::new(Odd::Broken))),
        ..ExecOptions::default()
    };
    let executor = Executor::new(Arc::new(simple(1000, 8)), &options).unwrap();
    let error = executor.run(&[x]).unwrap_err().to_string();
    assert!(error.contains("no thread is left"), "{error}");
}
