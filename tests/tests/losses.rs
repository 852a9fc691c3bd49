//! Servers and clients of a cluster that are killed or stopped while steps go on. Each step gives the right result or an error in time, later
//! steps go on, and the others are left with nothing.

use crate::distributed::{cluster, four, open, process, target, toml};
use crate::process::Serving;
use gristmill::distribute::ClusterSpec;
use gristmill::testing::{Rng, Setup};
use gristmill::{ErrorKind, Executable, Options, Result, Session, Tensor};
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::thread::sleep;
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Two workers and a task whose clients' programs are divided over them.
const TASKS: [(&str, u32); 3] = [("ps", 0), ("worker", 0), ("worker", 1)];
const MASTER: usize = 1;

/// Longest time of a step, and then some for a slow machine. The promise is four seconds.
const IN_TIME: Duration = Duration::from_secs(5);

/// Time for which a stopped server stays so.
const STOPPED: Duration = Duration::from_secs(30);

/// Time for all to be well again.
const RECOVERY: Duration = Duration::from_secs(30);

/// Steps that succeed in each test.
const N_STEPS: usize = 200;

/// Servers, as processes.
struct Machines {
    folder: TempDir,
    spec: ClusterSpec,
    servers: Vec<Serving>,
}

impl Machines {
    fn start() -> Machines {
        let folder = tempfile::tempdir().unwrap();
        let spec = cluster(&TASKS);
        std::fs::write(folder.path().join("cluster.toml"), toml(&spec)).unwrap();
        let servers = TASKS.map(|name| process(folder.path(), name)).into();
        Machines {
            folder,
            spec,
            servers,
        }
    }

    fn start_again(&mut self, i: usize) {
        // The earlier one has ended.
        let _ = self.servers[i].child.wait();
        self.servers[i] = process(self.folder.path(), TASKS[i]);
        let line = &self.servers[i].line;
        assert!(line.starts_with("serving grpc://"), "{line:?}");
    }

    fn signal(&self, i: usize, signal: &str) {
        self.servers[i].signal(signal);
    }

    fn session(&self) -> Result<Session> {
        open(&self.spec, TASKS[MASTER])
    }

    /// Numbers of open files and threads of servers.
    fn usage(&self, of: &[usize]) -> Vec<[usize; 2]> {
        let one = |i: &usize| {
            let process = Path::new("/proc").join(self.servers[*i].child.id().to_string());
            ["fd", "task"].map(|name| std::fs::read_dir(process.join(name)).unwrap().count())
        };
        of.iter().map(one).collect()
    }

    /// Waits until servers use no more than they did.
    fn check_usage(&self, of: &[usize], before: &[[usize; 2]]) {
        let began = Instant::now();
        loop {
            let now = self.usage(of);
            let is_more = |(now, before): (&[usize; 2], &[usize; 2])| {
                now.iter().zip(before).any(|(now, before)| now > before)
            };
            if !now.iter().zip(before).any(is_more) {
                return;
            }
            let shown = format!("open files and threads: {before:?}, then {now:?}");
            assert!(began.elapsed() < RECOVERY, "{shown}");
            sleep(Duration::from_millis(100));
        }
    }
}

fn model(session: &Session) -> Result<Arc<Executable>> {
    let graph = four("/job:ps/task:0/cpu:0", "/job:worker/task:1/cpu:0");
    let x = Tensor::from_slice(&[0.0f32], &[])?;
    let compiled = session.compile(&graph, &Options::default())?;
    compiled.for_inputs(&[x])
}

/// One step, whose result is right. Errors in time where something is lost.
fn step(model: &Executable, i: usize) -> Result<()> {
    let x = Tensor::from_slice(&[i as f32], &[])?;
    let began = Instant::now();
    let ran = model.run(&[x]);
    let took = began.elapsed();
    let ran = ran.inspect_err(|e| {
        assert_eq!(e.kind(), ErrorKind::DeviceFailed, "{e}");
        assert!(took < IN_TIME, "{took:?}: {e}");
    });
    assert_eq!(ran?["c"].as_slice::<f32>(), [2.0 * i as f32 + 3.0]);
    Ok(())
}

/// Steps until enough have succeeded; `at` is told their number before each. With `reopens`, an error begins another session.
fn steps(machines: &mut Machines, reopens: bool, mut at: impl FnMut(&mut Machines, usize)) {
    let mut own = None;
    let (mut n_done, mut last) = (0, Instant::now());
    while n_done < N_STEPS {
        at(machines, n_done);
        let made = match own.take() {
            Some(own) => Ok(own),
            None => machines
                .session()
                .and_then(|session| Ok((model(&session)?, session))),
        };
        let ran = made.and_then(|(model, session)| {
            let ran = step(&model, n_done);
            if ran.is_ok() || !reopens {
                own = Some((model, session));
            }
            ran
        });
        match ran {
            Ok(()) => (n_done, last) = (n_done + 1, Instant::now()),
            Err(e) => {
                let at_most = STOPPED + RECOVERY;
                assert!(last.elapsed() < at_most, "no step succeeds any more: {e}");
                sleep(Duration::from_millis(20));
            }
        }
    }
}

/// Numbers of steps, in order, before which something happens.
fn moments(rng: &mut Rng, n: usize) -> Vec<usize> {
    let mut moments: Vec<usize> = (0..n).map(|_| 5 + rng.below(N_STEPS - 10)).collect();
    moments.sort_unstable();
    moments
}

/// A server is killed at moments, some time into a step, and started again.
fn killed(of: usize, seed: u64) {
    let mut rng = Rng(seed);
    let mut moments = moments(&mut rng, 3);
    let mut machines = Machines::start();
    let others: Vec<usize> = (0..TASKS.len()).filter(|i| *i != of).collect();
    let mut before = None;
    let mut back: Option<Instant> = None;
    steps(&mut machines, of == MASTER, |machines, n_done| {
        if n_done == 4 && before.is_none() {
            before = Some(machines.usage(&others));
        }
        if back.is_some_and(|back| Instant::now() >= back) {
            back = None;
            machines.start_again(of);
        }
        if back.is_none() && moments.first().is_some_and(|m| n_done >= *m) {
            moments.remove(0);
            back = Some(Instant::now() + Duration::from_millis(50 + rng.below(400) as u64));
            let (pid, delay) = (machines.servers[of].child.id(), rng.below(1500) as u64);
            std::thread::spawn(move || {
                sleep(Duration::from_micros(delay));
                Serving::signal_to(pid, "KILL");
            });
        }
    });
    assert_eq!(moments, [0usize; 0]);
    machines.check_usage(&others, &before.unwrap());
}

#[test]
fn a_killed_task_costs_steps_and_no_more() {
    killed(0, 1);
}

#[test]
fn a_killed_master_costs_its_sessions_and_no_more() {
    killed(MASTER, 2);
}

/// A server is stopped for a while.
fn stopped(of: usize, seed: u64) {
    let mut rng = Rng(seed);
    let moment = moments(&mut rng, 1)[0];
    let mut machines = Machines::start();
    let all: Vec<usize> = (0..TASKS.len()).collect();
    let mut before = None;
    let mut state = (false, None::<Instant>);
    steps(&mut machines, false, |machines, n_done| {
        if n_done == 4 && before.is_none() {
            before = Some(machines.usage(&all));
        }
        if n_done == moment && !state.0 {
            machines.signal(of, "STOP");
            state = (true, Some(Instant::now() + STOPPED));
        }
        if state.1.is_some_and(|end| Instant::now() >= end) {
            machines.signal(of, "CONT");
            state.1 = None;
        }
    });
    assert_eq!(state, (true, None));
    machines.check_usage(&all, &before.unwrap());
}

#[test]
fn a_stopped_task_costs_steps_and_no_more() {
    stopped(2, 3);
}

#[test]
fn a_stopped_master_keeps_its_sessions() {
    stopped(MASTER, 4);
}

/// The variable that has the target of a client in a process of its own.
const TARGET: &str = "GRISTMILL_TEST_TARGET";

/// Steps without an end where the variable is set: other tests kill this process.
#[test]
fn a_client_of_its_own() {
    let Ok(target) = std::env::var(TARGET) else {
        return;
    };
    let session = Session::open(&target, &Setup::with_threads(1).settings).unwrap();
    let model = model(&session).unwrap();
    for i in 0.. {
        step(&model, i % 1000).unwrap();
        println!("step {i}");
    }
}

/// A client in a process of its own, and its lines.
fn client(target: &str) -> (std::process::Child, impl Iterator<Item = String> + use<>) {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "losses::a_client_of_its_own", "--nocapture"])
        .env(TARGET, target)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    (child, lines.map_while(std::io::Result::ok))
}

#[test]
fn killed_and_stopped_clients_leave_nothing() {
    let mut rng = Rng(5);
    let machines = Machines::start();
    let session = machines.session().unwrap();
    let own = model(&session).unwrap();
    let target = target(&machines.spec, TASKS[MASTER]);
    let all = [0, 1, 2];
    let mut before = Vec::new();
    for round in 0..8 {
        step(&own, round).unwrap();
        let (mut child, mut lines) = client(&target);
        let n = 1 + rng.below(N_STEPS);
        let has_begun = lines.any(|line| line.contains(&format!("step {n}")));
        assert!(has_begun, "the client ended by itself");
        if round % 4 == 3 {
            // Others go on meanwhile, and the servers end the connection.
            Serving::signal_to(child.id(), "STOP");
            let began = Instant::now();
            while began.elapsed() < Duration::from_secs(4) {
                step(&own, round).unwrap();
            }
        }
        child.kill().unwrap();
        child.wait().unwrap();
        if round == 0 {
            sleep(Duration::from_millis(500));
            before = machines.usage(&all);
        }
    }
    step(&own, 9).unwrap();
    machines.check_usage(&all, &before);
}

#[test]
fn a_server_that_is_asked_to_end_says_so() {
    let mut machines = Machines::start();
    let session = machines.session().unwrap();
    let own = model(&session).unwrap();
    step(&own, 1).unwrap();
    machines.signal(MASTER, "TERM");
    let status = machines.servers[MASTER].child.wait().unwrap();
    assert_eq!(status.code(), Some(0));
    let error = step(&own, 2).unwrap_err().to_string();
    let expected = "/job:worker/task:0 is shutting down (try: open another session)";
    assert_eq!(error, expected);
    machines.start_again(MASTER);
    let session = machines.session().unwrap();
    step(&model(&session).unwrap(), 3).unwrap();
}
