//! Texts of the stages of a model, of its segments, and of a model that has a graph for given sizes alone.

use super::segmented::PartShapes;
use super::{Compiled, Source};
use crate::error::{Error, Result};
use crate::ir::print::PrintOptions;
use crate::pipeline::{self, Stage};

impl Compiled {
    /// The text of a stage; `shapes` gives those of the inputs.
    #[doc(hidden)]
    pub fn text(&self, stage: Stage, full: bool, shapes: PartShapes) -> Result<String> {
        let known = match (&self.segmented, shapes(self)) {
            (Some(_), _) | (None, Err(_)) if stage == Stage::Graph => {
                return self.symbolic_text(full);
            }
            (Some(segmented), _) => return segmented.text(stage, full, shapes),
            (None, known) => known?,
        };
        match self.lower_for(stage, &known) {
            Err(e) if e.is_of_extents() => self.cut_for(&known)?.text(stage, full, shapes),
            lowered => lowered?.text(stage, full),
        }
    }

    /// The text of [`Stage::Graph`] where sizes of dims are not known.
    fn symbolic_text(&self, full: bool) -> Result<String> {
        if self.segmented.is_some() {
            return Ok(self.symbolic_graph()?.to_text(PrintOptions::of(full)));
        }
        match self.symbolic_graph() {
            Ok(graph) => pipeline::symbolic_text(graph, self.config(), full),
            Err(e) if e.is_refusal() => self.trial_text(e, full),
            Err(e) => Err(e),
        }
    }

    /// The text of the graph at some sizes, where none is the model for all of them.
    fn trial_text(&self, why: Error, full: bool) -> Result<String> {
        let Source::Onnx(m) = &self.source else {
            return Err(why);
        };
        let trial = m.trial(&self.specialisation())?;
        if !trial.imports {
            return Err(why);
        }
        let graph = m.graph(&trial.spec)?;
        let (sizes, why) = (trial.text(), why.to_string());
        let lines = [
            format!("sizes decide the graph: {why}"),
            format!("here {sizes}"),
        ];
        let lines = lines.iter().flat_map(|text| text.lines());
        let comment: String = lines.map(|line| format!("// {line}\n")).collect();
        Ok(comment + &graph.to_text(PrintOptions::of(full)))
    }
}
