//! The forms in which a cluster is written down: TOML, JSON, lists of hosts, and the variable `TF_CONFIG`.

use crate::{ClusterSpec, TaskName};
use gristmill_runtime::Error;
use serde::Deserialize;
use serde::de::{Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use std::collections::BTreeMap;
use std::fmt;

/// The value of `format` in a file, which need not have one.
const FORMAT: &str = "gristmill/cluster/1";

impl ClusterSpec {
    /// Reads a file's text, TOML or JSON: `[jobs]` with a list of addresses for each job, or with addresses by task.
    ///
    /// ```toml
    /// [jobs]
    /// ps = ["10.0.0.1:2222"]
    /// worker = { 0 = "10.0.0.2:2222", 3 = "10.0.0.5:2222" }
    /// ```
    ///
    /// Errors with `InvalidInput`, with line and column where there are any, and as [`ClusterSpec::new`] does.
    pub fn parse(text: &str) -> Result<ClusterSpec, Error> {
        let file: File = match text.trim_start().starts_with('{') {
            true => serde_json::from_str(text).map_err(|e| Error::invalid(e.to_string()))?,
            false => toml::from_str(text).map_err(|e| Error::invalid(e.to_string().trim_end()))?,
        };
        if let Some(format) = file.format.filter(|format| format != FORMAT) {
            let message = format!("format {format:?}: expected {FORMAT:?}, or none");
            return Err(Error::invalid(message));
        }
        file.jobs.into_spec()
    }

    /// The cluster of lists of hosts by job, as in `--ps_hosts a:2222,b:2222 --worker_hosts c:2222`: addresses between commas, of tasks
    /// from 0 on.
    ///
    /// Errors as [`ClusterSpec::new`] does.
    pub fn of_hosts<'a>(
        jobs: impl IntoIterator<Item = (&'a str, &'a str)>,
    ) -> Result<ClusterSpec, Error> {
        let list = |hosts: &str| {
            hosts
                .split(',')
                .map(|host| host.trim().to_owned())
                .collect()
        };
        let jobs = jobs.into_iter();
        let jobs = jobs.map(|(job, hosts)| (job.to_owned(), Tasks::List(list(hosts))));
        Jobs(jobs.collect()).into_spec()
    }

    /// The cluster and the own task of a value of `TF_CONFIG`: `{"cluster": {"worker": [..]}, "task": {"type": "worker", "index": 0}}`.
    ///
    /// Errors with `InvalidInput` on another form, on a task outside the cluster, and as [`ClusterSpec::new`] does.
    pub fn of_tf_config(text: &str) -> Result<(ClusterSpec, TaskName), Error> {
        let config: TfConfig = serde_json::from_str(text)
            .map_err(|e| Error::invalid(e.to_string()).context("TF_CONFIG"))?;
        let task = TaskName {
            job: config.task.kind,
            task: config.task.index,
        };
        let spec = config.cluster.into_spec();
        let spec = spec.map_err(|e| e.context("TF_CONFIG"))?;
        spec.address(&task).map_err(|e| e.context("TF_CONFIG"))?;
        Ok((spec, task))
    }

    /// The value of `TF_CONFIG` with this cluster for one of its tasks.
    pub fn tf_config(&self, task: &TaskName) -> String {
        let mut jobs: BTreeMap<&str, BTreeMap<String, &str>> = BTreeMap::new();
        for (name, address) in self.tasks() {
            let job = jobs.entry(&name.job).or_default();
            job.insert(name.task.to_string(), address);
        }
        let own = serde_json::json!({ "type": task.job, "index": task.task });
        serde_json::json!({ "cluster": jobs, "task": own }).to_string()
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    format: Option<String>,
    jobs: Jobs,
}

#[derive(Deserialize)]
struct TfConfig {
    cluster: Jobs,
    task: Task,
}

#[derive(Deserialize)]
struct Task {
    #[serde(rename = "type")]
    kind: String,
    index: u32,
}

/// Jobs with their tasks.
#[derive(Deserialize)]
struct Jobs(BTreeMap<String, Tasks>);

impl Jobs {
    fn into_spec(self) -> Result<ClusterSpec, Error> {
        let mut all = Vec::new();
        for (job, tasks) in self.0 {
            let name = |task| TaskName {
                job: job.clone(),
                task,
            };
            match tasks {
                Tasks::List(list) => all.extend((0..).map(name).zip(list)),
                Tasks::ByTask(map) => {
                    for (number, address) in map {
                        let number = number.parse::<u32>().map_err(|_| {
                            Error::invalid(format!("job {job:?}: task {number:?} is no number"))
                        })?;
                        all.push((name(number), address));
                    }
                }
            }
        }
        ClusterSpec::new(all)
    }
}

/// The addresses of a job's tasks.
enum Tasks {
    List(Vec<String>),
    ByTask(BTreeMap<String, String>),
}

impl<'de> Deserialize<'de> for Tasks {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Tasks, D::Error> {
        deserializer.deserialize_any(TasksVisitor)
    }
}

struct TasksVisitor;

impl<'de> Visitor<'de> for TasksVisitor {
    type Value = Tasks;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of addresses, or addresses by task")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Tasks, A::Error> {
        let mut addresses = Vec::new();
        while let Some(address) = list.next_element()? {
            addresses.push(address);
        }
        Ok(Tasks::List(addresses))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Tasks, A::Error> {
        let mut addresses = BTreeMap::new();
        while let Some((task, address)) = map.next_entry::<String, String>()? {
            if addresses.insert(task.clone(), address).is_some() {
                return Err(A::Error::custom(format!("task {task} is there twice")));
            }
        }
        Ok(Tasks::ByTask(addresses))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(job: &str, task: u32) -> TaskName {
        TaskName {
            job: job.to_owned(),
            task,
        }
    }

    const TOML: &str = r#"
[jobs]
ps = ["127.0.0.1:2221", "127.0.0.1:2222"]
worker = ["127.0.0.1:2223", "[::1]:2224", "localhost:2225"]
"#;

    #[test]
    fn all_forms_are_one_cluster() {
        let spec = ClusterSpec::parse(TOML).unwrap();
        let json = r#"{"format": "gristmill/cluster/1", "jobs": {
            "worker": {"2": "localhost:2225", "0": "127.0.0.1:2223", "1": "[::1]:2224"},
            "ps": ["127.0.0.1:2221", "127.0.0.1:2222"]}}"#;
        let hosts = [
            ("worker", "127.0.0.1:2223,[::1]:2224, localhost:2225"),
            ("ps", "127.0.0.1:2221,127.0.0.1:2222"),
        ];
        let config = r#"{"cluster": {"ps": ["127.0.0.1:2221", "127.0.0.1:2222"],
            "worker": ["127.0.0.1:2223", "[::1]:2224", "localhost:2225"]},
            "task": {"type": "worker", "index": 2}, "environment": "cloud"}"#;
        let (of_config, own) = ClusterSpec::of_tf_config(config).unwrap();
        let again = ClusterSpec::of_tf_config(&of_config.tf_config(&own));
        assert_eq!(again.unwrap(), (of_config.clone(), own.clone()));
        assert_eq!(own, name("worker", 2));
        let others = [
            ClusterSpec::parse(json).unwrap(),
            ClusterSpec::of_hosts(hosts).unwrap(),
            of_config,
        ];
        for other in others {
            assert_eq!(other, spec);
            assert_eq!(other.digest(), spec.digest());
            assert!(spec.differences("a", &other, "b").is_empty());
        }
        assert_eq!(spec.jobs(), ["ps", "worker"]);
        assert_eq!((spec.n_tasks("ps"), spec.n_tasks("chief")), (2, 0));
        assert_eq!(spec.address(&own).unwrap(), "localhost:2225");
        let names: Vec<String> = spec.tasks().map(|(name, _)| name.to_string()).collect();
        assert_eq!(names[2], "/job:worker/task:0");
        assert_eq!(names.len(), 5);
    }

    /// The first worker of a widely copied script names one parameter server where the others name two.
    #[test]
    fn clusters_that_differ_are_told_apart() {
        let spec = ClusterSpec::parse(TOML).unwrap();
        let hosts = [
            ("ps", "127.0.0.1:2221"),
            ("worker", "127.0.0.1:2223,[::1]:2224,localhost:2226"),
        ];
        let other = ClusterSpec::of_hosts(hosts).unwrap();
        assert_ne!(spec.digest(), other.digest());
        let lines = spec.differences("/job:ps/task:0", &other, "/job:worker/task:0");
        insta::assert_snapshot!(lines.join("\n"), @r#"
/job:ps/task:1: 127.0.0.1:2222 in the cluster of /job:ps/task:0, nothing in that of /job:worker/task:0
/job:worker/task:2: localhost:2225 in the cluster of /job:ps/task:0, localhost:2226 in that of /job:worker/task:0
"#);
    }

    fn error(text: &str) -> String {
        ClusterSpec::parse(text).unwrap_err().to_string()
    }

    #[test]
    fn what_is_wrong_with_a_cluster_is_said() {
        let hosts = |list: &str| {
            ClusterSpec::of_hosts([("ps", list)])
                .unwrap_err()
                .to_string()
        };
        let absent = |job, task| {
            let spec = ClusterSpec::parse(TOML).unwrap();
            spec.address(&name(job, task)).unwrap_err().to_string()
        };
        let config = |task: &str| {
            let text = format!(r#"{{"cluster": {{"ps": ["a:1"]}}, "task": {task}}}"#);
            ClusterSpec::of_tf_config(&text).unwrap_err().to_string()
        };
        let all = [
            error(""),
            error("[jobs]"),
            error("[jobs]\nps = 7"),
            error("[jobs]\nps = [\"a:1\", 2]"),
            error("[jobs]\nps = []"),
            error("[jobs]\nps = { a = \"b:1\" }"),
            error("{\"jobs\": {\"ps\": [\"a:1\"}}"),
            error("{\"jobs\": {\"ps\": {\"1\": \"a:1\", \"1\": \"b:1\"}}}"),
            error("format = \"gristmill/cluster/9\"\n[jobs]\nps = [\"a:1\"]"),
            error("[jobs]\nlocalhost = [\"a:1\"]"),
            error("[jobs]\n\"a/b\" = [\"a:1\"]"),
            error("[tasks]\nps = [\"a:1\"]"),
            hosts("a:1,a:1"),
            hosts(""),
            hosts("a"),
            hosts(":1"),
            hosts("a:0"),
            hosts("a:65536"),
            hosts("::1:5"),
            hosts("http://a:5"),
            absent("ps", 2),
            absent("chief", 0),
            config(r#"{"type": "ps", "index": 1}"#),
            config(r#"{"type": "ps"}"#),
        ];
        insta::assert_snapshot!(all.join("\n"), @r#"
TOML parse error at line 1, column 1
  |
1 | 
  | ^
missing field `jobs`
a cluster without a task
TOML parse error at line 2, column 6
  |
2 | ps = 7
  |      ^
invalid type: integer `7`, expected a list of addresses, or addresses by task
TOML parse error at line 2, column 14
  |
2 | ps = ["a:1", 2]
  |              ^
invalid type: integer `2`, expected a string
a cluster without a task
job "ps": task "a" is no number
expected `,` or `]` at line 1 column 23
task 1 is there twice at line 1 column 40
format "gristmill/cluster/9": expected "gristmill/cluster/1", or none
job "localhost": it is the name of a process without a cluster; use another name
job "a/b": expected a letter, then letters, digits and '_'
TOML parse error at line 1, column 2
  |
1 | [tasks]
  |  ^^^^^
unknown field `tasks`, expected `format` or `jobs`
/job:ps/task:0 and /job:ps/task:1 are both at a:1: each task has an address of its own
/job:ps/task:0: address "": no port, expected HOST:PORT, as in 10.0.0.7:2222 or [::1]:2222
/job:ps/task:0: address "a": no port, expected HOST:PORT, as in 10.0.0.7:2222 or [::1]:2222
/job:ps/task:0: address ":1": no host, expected HOST:PORT, as in 10.0.0.7:2222 or [::1]:2222
/job:ps/task:0: address "a:0": the port is no number from 1 to 65535, expected HOST:PORT, as in 10.0.0.7:2222 or [::1]:2222
/job:ps/task:0: address "a:65536": the port is no number from 1 to 65535, expected HOST:PORT, as in 10.0.0.7:2222 or [::1]:2222
/job:ps/task:0: address "::1:5": a host with colons and without brackets, expected HOST:PORT, as in 10.0.0.7:2222 or [::1]:2222
/job:ps/task:0: address "http://a:5": a host with colons and without brackets, expected HOST:PORT, as in 10.0.0.7:2222 or [::1]:2222
/job:ps/task:2 is not in the cluster: tasks of ps are 0, 1
/job:chief/task:0 is not in the cluster: its jobs are ps, worker
TF_CONFIG: /job:ps/task:1 is not in the cluster: tasks of ps are 0
TF_CONFIG: missing field `index` at line 1 column 51
"#);
    }
}
