//! Tasks as processes.

use gristmill::distribute::{
    ClusterSpec, Credentials, Keys, ServerOptions, TaskName, make_keys, serve_with,
};
use gristmill::place::DeviceSet;
use gristmill::{Result, Session, Settings};
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

fn task(task: u32) -> TaskName {
    TaskName {
        job: "worker".into(),
        task,
    }
}

/// One thread for kernels.
fn settings() -> Settings {
    Settings {
        threads: Some(1),
        ..Settings::default()
    }
}

/// The device of a task, as all tasks name it.
pub fn device(task: usize) -> String {
    format!("/job:worker/task:{task}/cpu:0")
}

/// A session of this process with so many devices.
pub fn one_process(n_devices: usize) -> Result<Session> {
    Session::new(&Settings {
        devices: DeviceSet::parse(&format!("cpu:{n_devices}"), 1)?,
        ..settings()
    })
}

/// A task, until its input ends: `serve NUMBER KEYS ADDRESS..`, without keys where `KEYS` is `-`.
pub fn serve(words: &[String]) -> Result<()> {
    let [number, keys, addresses @ ..] = words else {
        return Err(gristmill::Error::invalid("serve NUMBER KEYS ADDRESS.."));
    };
    let own = task(number.parse().expect("a number"));
    let spec = ClusterSpec::new((0..).map(task).zip(addresses.iter().cloned()))?;
    let options = ServerOptions {
        credentials: match keys.as_str() {
            "-" => Credentials::Local,
            folder => Credentials::Keys(Keys::of_task(folder.as_ref(), &own)?),
        },
        ..ServerOptions::default()
    };
    let server = serve_with(spec, own, &settings(), options)?;
    println!("ready");
    // Whoever started it ends, or wants it to end.
    let _ = std::io::stdin().read(&mut [0]);
    drop(server);
    Ok(())
}

/// Tasks, each a process, until the drop of this.
pub struct Tasks {
    processes: Vec<Child>,
    target: String,
    keys: Option<PathBuf>,
}

impl Tasks {
    /// Starts tasks; with keys in a folder, which are made there.
    pub fn start(n: u32, keys: Option<&Path>) -> Result<Tasks> {
        let spec = ClusterSpec::local((0..n).map(task))?;
        if let Some(folder) = keys {
            make_keys(folder, &spec, 1)?;
        }
        let addresses: Vec<&str> = spec.tasks().map(|(_, address)| address).collect();
        let mut tasks = Tasks {
            processes: Vec::new(),
            target: format!("grpc://{}", addresses[0]),
            keys: keys.map(Path::to_owned),
        };
        for number in 0..n {
            let process = crate::here(std::env::current_exe().and_then(|program| {
                Command::new(program)
                    .args(["serve", &number.to_string()])
                    .arg(keys.unwrap_or(Path::new("-")))
                    .args(&addresses)
                    .stdin(Stdio::piped())
                    .stdout(Stdio::piped())
                    .spawn()
            }))?;
            tasks.processes.push(process);
            let own = tasks.processes.last_mut().and_then(|p| p.stdout.as_mut());
            let out = BufReader::new(own.expect("it is piped"));
            crate::here(out.lines().next().unwrap_or(Ok(String::new())))?;
        }
        Ok(tasks)
    }

    /// A session on the first task.
    pub fn session(&self) -> Result<Session> {
        let credentials = match &self.keys {
            None => Credentials::Local,
            Some(folder) => Credentials::Keys(Keys::of_client(folder)?),
        };
        Session::open_with(&self.target, &settings(), &credentials)
    }
}

impl Drop for Tasks {
    fn drop(&mut self) {
        for process in &mut self.processes {
            // It may have ended.
            let _ = process.kill();
            let _ = process.wait();
        }
    }
}
