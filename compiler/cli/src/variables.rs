//! `gristmill variables`: state that the tasks of a cluster keep for sessions.

use crate::cluster::TrustArgs;
use crate::output::{noteln, outln};
use crate::{heading, print_json};
use clap::Args;
use gristmill::distribute::{TaskState, VariableState};
use gristmill::{Result, Session, Settings};
use gristmill_runtime::printable::printable;
use gristmill_runtime::safetensors::label;
use serde_json::{Value, json};

/// Arguments of `variables`.
#[derive(Args)]
pub struct VariablesArgs {
    /// A task of the cluster; all its tasks are listed.
    #[arg(long, value_name = "grpc://HOST:PORT", help_heading = heading::DEVICES)]
    session: String,
    #[command(flatten)]
    trust: TrustArgs,
    /// Set all variables of a container to their initial values first, on every task. An empty name is the container of models without one.
    #[arg(long, value_name = "CONTAINER", help_heading = heading::INPUTS)]
    reset: Vec<String>,
    /// Print JSON.
    #[arg(long, help_heading = heading::OUTPUT)]
    json: bool,
}

/// Runs the verb.
pub fn variables(args: &VariablesArgs) -> Result<()> {
    let containers: Vec<&str> = args.reset.iter().map(String::as_str).collect();
    let credentials = args.trust.of_client()?;
    let session = Session::open_with(&args.session, &Settings::default(), &credentials)?;
    let tasks = session.cluster_tasks_after_reset(&containers)?;
    if args.json {
        let tasks = tasks
            .iter()
            .map(|task| tasks_json(task, variables_json(task)));
        print_json("variables", json!({ "tasks": tasks.collect::<Vec<_>>() }));
    } else {
        tasks.iter().for_each(print);
    }
    let silent = tasks.into_iter().find_map(|task| task.state.err());
    match silent.filter(|_| !args.reset.is_empty()) {
        None => Ok(()),
        Some(e) => Err(e.context("not every task was reset")),
    }
}

fn print(task: &TaskState) {
    outln!("{}", task.name);
    match &task.state {
        Err(e) => noteln!("{}: {e}", task.name),
        Ok(running) if running.variables.is_empty() => outln!("  no variables"),
        Ok(running) => running.variables.iter().for_each(|v| {
            let name = label(&v.container, &v.name);
            outln!("  {}: {}", printable(&name), type_text(v));
        }),
    }
}

fn type_text(v: &VariableState) -> String {
    match &v.shape {
        Some(shape) => format!("{}{shape:?}", v.dtype),
        None => format!("{}, never assigned", v.dtype),
    }
}

/// The head of a task in JSON, with more fields.
pub fn tasks_json(task: &TaskState, more: Value) -> Value {
    let mut json = json!({
        "task": task.name.to_string(),
        "address": task.address,
        "error": task.state.as_ref().err().map(ToString::to_string),
    });
    if let (Some(json), Value::Object(more)) = (json.as_object_mut(), more) {
        json.extend(more);
    }
    json
}

fn variables_json(task: &TaskState) -> Value {
    let variables = task.state.iter().flat_map(|running| &running.variables);
    let variables = variables.map(|v| {
        json!({
            "container": v.container,
            "name": v.name,
            "dtype": v.dtype.name(),
            "shape": v.shape,
        })
    });
    json!({ "variables": variables.collect::<Vec<_>>() })
}
