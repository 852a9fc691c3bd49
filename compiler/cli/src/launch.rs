//! `gristmill launch`: all tasks of a cluster on this machine.

use crate::cluster::{ClusterArgs, TrustArgs};
use crate::output::{errln, noteln, outlive_reader, outln};
use crate::{Cli, heading, signals};
use clap::{Args, CommandFactory};
use gristmill::distribute::{ClusterSpec, TaskName};
use gristmill::{Error, ErrorKind, Result};
use gristmill_runtime::cpu::n_cores;
use std::io::{BufRead, BufReader, Read};
use std::net::{TcpListener, ToSocketAddrs};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::Ordering;
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// Arguments of `launch`.
#[derive(Args)]
pub struct LaunchArgs {
    #[command(flatten)]
    cluster: ClusterArgs,
    #[command(flatten)]
    trust: TrustArgs,
    /// CPU threads of all tasks together, for verbs with `--threads`. Default: one per core.
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=1024), help_heading = heading::DEVICES)]
    threads: Option<u16>,
    /// A verb with its flags for each task, in place of `server`. It finds the cluster and its own task in the variable TF_CONFIG.
    #[arg(last = true, value_name = "VERB")]
    verb: Vec<String>,
}

/// The verb of tasks without another one.
const SERVER: &str = "server";

/// Time between two looks at the tasks.
const LOOK: Duration = Duration::from_millis(20);

/// Signals after which tasks are ended without their help.
const PATIENCE: usize = 3;

/// A task as a process.
struct Launched {
    name: TaskName,
    process: Child,
    /// The threads for its output.
    readers: Vec<JoinHandle<()>>,
    ended: Option<ExitStatus>,
}

/// Runs the verb: starts the tasks, and waits for all. When one fails, or a signal comes, the others are asked to end.
pub fn launch(args: &LaunchArgs) -> Result<()> {
    let (cluster, _) = args.cluster.read()?;
    let own = local_tasks(&cluster)?;
    let interrupt = signals::flag()?;
    // Tasks go on when nobody reads what they print.
    outlive_reader();
    let verb = args.verb_of(own.len())?;
    let n_others = cluster.tasks().count() - own.len();
    if n_others > 0 {
        noteln!("{n_others} tasks of the cluster are not on this machine");
    }
    let mut tasks = Vec::new();
    for name in own {
        match start(&cluster, &name, &verb) {
            Ok(task) => tasks.push(task),
            Err(e) => {
                let message = format!("{name} cannot be started: {e}");
                return end_all(tasks, Error::new(ErrorKind::DeviceFailed, message));
            }
        }
    }
    let (mut n_signals, mut failed) = (0, None);
    while n_running(&mut tasks) > 0 {
        let failure = tasks.iter().find_map(Launched::failure);
        if failed.is_none() && failure.is_some() {
            failed = failure;
            n_signals += 1;
            ask_to_end(&mut tasks, n_signals);
        }
        if interrupt.swap(false, Ordering::Relaxed) {
            n_signals += 1;
            ask_to_end(&mut tasks, n_signals);
        }
        thread::sleep(LOOK);
    }
    let failed = failed.or_else(|| tasks.iter().find_map(Launched::failure));
    let readers = tasks.into_iter().flat_map(|task| task.readers);
    // A reader has nothing but its output.
    readers.for_each(|reader| drop(reader.join()));
    failed.map_or(Ok(()), Err)
}

impl LaunchArgs {
    /// The verb and its flags, for each of `n_tasks` tasks.
    fn verb_of(&self, n_tasks: usize) -> Result<Vec<String>> {
        let mut verb = self.verb.clone();
        if verb.is_empty() {
            verb.push(SERVER.to_owned());
        }
        let command = Cli::command();
        let Some(known) = command.find_subcommand(&verb[0]) else {
            let message = format!("{:?} is not a verb", verb[0]);
            return Err(Error::invalid(message).hint("gristmill --help lists the verbs"));
        };
        let is_given = |flag: &str| verb.iter().any(|word| word.split('=').next() == Some(flag));
        let has_threads = known.get_arguments().any(|arg| arg.get_id() == "threads");
        let mut more = Vec::new();
        // A session runs on the threads of servers.
        if has_threads && !is_given("--threads") && !is_given("--session") {
            let all = self.threads.map_or_else(n_cores, usize::from);
            more.push(format!("--threads={}", (all / n_tasks).max(1)));
        }
        match verb[0] == SERVER {
            true => more.extend(self.trust.flags()),
            false => self.trust.needs_server(&verb[0])?,
        }
        verb.extend(more);
        Ok(verb)
    }
}

impl Launched {
    fn is_running(&mut self) -> bool {
        if self.ended.is_none() {
            // A process nobody can wait for has ended.
            self.ended = self.process.try_wait().unwrap_or_default();
        }
        self.ended.is_none()
    }

    /// The error of a task that has failed.
    fn failure(&self) -> Option<Error> {
        let status = self.ended.filter(|status| !status.success())?;
        let kind = match status.code() {
            Some(2) => ErrorKind::InvalidInput,
            Some(3) => ErrorKind::Unsupported,
            Some(4) => ErrorKind::Mismatch,
            Some(5) => ErrorKind::OutOfMemory,
            _ => ErrorKind::DeviceFailed,
        };
        let message = format!(
            "{} has ended with {status}, and the others with it",
            self.name
        );
        Some(Error::new(kind, message))
    }
}

/// Looks at all tasks; the number of those which go on.
fn n_running(tasks: &mut [Launched]) -> usize {
    let running = tasks
        .iter_mut()
        .filter_map(|task| task.is_running().then_some(()));
    running.count()
}

/// The tasks with an address of this machine. Errors if there are none.
fn local_tasks(cluster: &ClusterSpec) -> Result<Vec<TaskName>> {
    let is_own = |address: &str| {
        let found = address.to_socket_addrs();
        found.is_ok_and(|mut found| found.any(|at| TcpListener::bind((at.ip(), 0)).is_ok()))
    };
    let own = cluster.tasks().filter(|(_, address)| is_own(address));
    let own: Vec<TaskName> = own.map(|(name, _)| name.clone()).collect();
    if own.is_empty() {
        let addresses: Vec<&str> = cluster.tasks().map(|(_, address)| address).collect();
        let message = format!(
            "no task is on this machine: they are at {}",
            addresses.join(", ")
        );
        return Err(Error::invalid(message));
    }
    Ok(own)
}

fn start(cluster: &ClusterSpec, name: &TaskName, verb: &[String]) -> std::io::Result<Launched> {
    let mut command = Command::new(std::env::current_exe()?);
    command
        .args(verb)
        .env("TF_CONFIG", cluster.tf_config(name))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    // A terminal sends Ctrl-C to a whole group: the tasks hear of it from here, once.
    #[cfg(unix)]
    std::os::unix::process::CommandExt::process_group(&mut command, 0);
    let mut process = command.spawn()?;
    let out = process
        .stdout
        .take()
        .map(|out| lines(name, out, |line| outln!("{line}")));
    let err = process
        .stderr
        .take()
        .map(|err| lines(name, err, |line| errln!("{line}")));
    Ok(Launched {
        name: name.clone(),
        process,
        readers: out.into_iter().chain(err).collect(),
        ended: None,
    })
}

/// Prints each line with the name of its task.
fn lines(name: &TaskName, from: impl Read + Send + 'static, print: fn(&str)) -> JoinHandle<()> {
    let (name, mut from) = (name.to_string(), BufReader::new(from));
    thread::spawn(move || {
        let mut line = Vec::new();
        while from.read_until(b'\n', &mut line).is_ok_and(|n| n > 0) {
            let text = String::from_utf8_lossy(&line);
            print(&format!("{name}: {}", text.trim_end()));
            line.clear();
        }
    })
}

/// Asks the running tasks to end, which the first signal lets them do in good order.
fn ask_to_end(tasks: &mut [Launched], n_signals: usize) {
    for task in tasks.iter_mut().filter(|task| task.ended.is_none()) {
        #[cfg(unix)]
        if n_signals < PATIENCE {
            use rustix::process::{Pid, Signal, kill_process};
            // One that has just ended needs no signal.
            let _ = kill_process(Pid::from_child(&task.process), Signal::TERM);
            continue;
        }
        let _ = (task.process.kill(), n_signals);
    }
}

/// Ends the tasks of a launch that failed.
fn end_all(mut tasks: Vec<Launched>, error: Error) -> Result<()> {
    ask_to_end(&mut tasks, PATIENCE);
    for task in &mut tasks {
        // It was just killed.
        let _ = task.process.wait();
    }
    Err(error)
}
