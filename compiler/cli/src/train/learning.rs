//! A model as `train` would take it: `check --train`, and the graph of a step for `dump`.

use super::super::args::DimFlags;
use super::super::output::outln;
use super::objective::{Aim, ObjectiveArgs, UpdateArgs};
use gristmill::DType;
use gristmill::ir::{Bindings, Graph};
use gristmill::onnx::Model;
use gristmill::train::{FixedTensor, Training, Weight, step_graph};
use gristmill::{Error, ErrorKind, Result};
use gristmill_runtime::units::{plural, printable};
use serde_json::{Value, json};

/// Name of the labels where there is no archive.
const LABEL: &str = "label";

/// Findings about a model that is to learn.
pub struct Learning {
    weights: Vec<Weight>,
    /// Other tensors that may be weights.
    fixed: Vec<FixedTensor>,
    /// Nodes without gradient.
    problems: Vec<Error>,
}

impl Learning {
    /// The findings for an objective and values of dims.
    pub fn of(model: &Model, objective: &ObjectiveArgs, set: &[String]) -> Result<Learning> {
        let aim = Aim::new(model, objective, DimFlags::sizes(set)?, LABEL)?;
        Ok(Learning {
            weights: aim.net.weights().to_vec(),
            fixed: aim.net.fixed().to_vec(),
            problems: aim.net.without_gradient(),
        })
    }

    fn n_learning(&self) -> usize {
        self.weights.iter().filter(|w| w.frozen.is_none()).count()
    }

    /// Prints them for people.
    pub fn print(&self) {
        let (n, all) = (
            self.n_learning(),
            plural(self.weights.len(), "float initialiser"),
        );
        outln!("training: {n} of {all} trainable");
        for w in &self.weights {
            let (name, ty) = (printable(&w.name), &w.ty);
            match &w.frozen {
                None => outln!("  {name}: {ty}"),
                Some(why) => outln!("  {name}: {ty}, frozen: {}", printable(why)),
            }
        }
        for t in &self.fixed {
            let (name, ty, why) = (printable(&t.name), &t.ty, t.why);
            outln!("  {name}: {ty}, frozen: {why}");
        }
        for problem in &self.problems {
            outln!("  {}", printable(&problem.to_string()));
        }
    }

    /// The same for machines.
    pub fn json(&self) -> Value {
        let weight =
            |w: &Weight| json!({ "name": w.name, "type": w.ty.to_string(), "frozen": w.frozen });
        let fixed =
            |t: &FixedTensor| json!({ "name": t.name, "type": t.ty.to_string(), "why": t.why });
        let problems = self.problems.iter();
        let problems = problems.map(|e| json!({ "node": e.node(), "message": e.to_string() }));
        json!({
            "weights": self.weights.iter().map(weight).collect::<Vec<_>>(),
            "fixed": self.fixed.iter().map(fixed).collect::<Vec<_>>(),
            "problems": problems.collect::<Vec<_>>(),
        })
    }

    /// An error when the model cannot be trained.
    pub fn verdict(self) -> Result<()> {
        match (self.problems.len(), self.n_learning()) {
            (0, 0) => Err(Error::invalid("no weight learns")),
            (0, _) => Ok(()),
            (n, _) => {
                let nodes = plural(n, "node");
                Err(Error::new(
                    ErrorKind::Unsupported,
                    format!("{nodes} between weights and output without gradient"),
                ))
            }
        }
    }
}

/// The graph of a step, with labels of `i64` where the loss is of classes.
pub fn step_of(
    model: &Model,
    objective: &ObjectiveArgs,
    update: &UpdateArgs,
    dims: Bindings,
) -> Result<Graph> {
    update.check()?;
    let aim = Aim::new(model, objective, dims, LABEL)?;
    aim.check_learning()?;
    let training = Training::from(update.update(1));
    step_graph("train", &training, |m| aim.build(m, DType::I64))
}
