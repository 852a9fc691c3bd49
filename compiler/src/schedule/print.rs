//! Text form of schedules, for `dump --stage schedule`.

use super::{Action, Place, Schedule};
use crate::cost::Bytes;
use crate::ir::{Graph, ValueId};
use std::fmt::Write;

impl Schedule {
    /// One line per step: number, op, results with their places, operands, dependencies, origin. Values have their numbers in the graph.
    pub fn to_text(&self, g: &Graph) -> String {
        let mut out = String::new();
        self.write(g, &mut out)
            .expect("writing to a String does not fail");
        out
    }

    /// Arena size over the peak of live bytes, at least 1.
    pub fn arena_ratio(&self) -> f64 {
        if self.live_bytes == 0 {
            1.0
        } else {
            self.arena_bytes as f64 / self.live_bytes as f64
        }
    }

    fn write(&self, g: &Graph, out: &mut String) -> std::fmt::Result {
        let (arena, live) = (
            Bytes(self.arena_bytes as u64),
            Bytes(self.live_bytes as u64),
        );
        writeln!(
            out,
            "schedule {:?}: {} steps, arena {arena}, live peak {live}, ratio {:.3}",
            g.name,
            self.steps.len(),
            self.arena_ratio()
        )?;
        for (i, resident) in (0..).zip(&self.residents) {
            let how = match (resident.assignment, self.in_place.contains(&i)) {
                (None, _) => "read",
                (_, false) => "assigned",
                (_, true) => "assigned over its old value",
            };
            let (container, name) = (&resident.container, &resident.name);
            writeln!(out, "variable {name:?} of container {container:?}: {how}")?;
        }
        for (i, step) in self.steps.iter().enumerate() {
            let (what, origin) = match step.action {
                Action::Node(id) => (self.node_text(g, id), g.node(id).origin.to_string()),
                Action::CopyToOutput { value, output } => (
                    format!("output {output} = copy({})", self.value(value)),
                    String::new(),
                ),
            };
            write!(out, "{i:4}: {what}")?;
            if !step.deps.is_empty() {
                let deps: Vec<String> = step.deps.iter().map(u32::to_string).collect();
                write!(out, " after {}", deps.join(" "))?;
            }
            if !origin.is_empty() {
                write!(out, " @ {origin:?}")?;
            }
            writeln!(out)?;
        }
        Ok(())
    }

    fn node_text(&self, g: &Graph, id: crate::ir::NodeId) -> String {
        let node = g.node(id);
        let list = |ids: &[ValueId]| {
            ids.iter()
                .map(|&v| self.value(v))
                .collect::<Vec<_>>()
                .join(", ")
        };
        let scratch = match self.scratch.get(&id) {
            Some(at) if !at.is_empty() => {
                format!(
                    " scratch {}",
                    at.iter()
                        .map(|o| format!("+{o}"))
                        .collect::<Vec<_>>()
                        .join(" ")
                )
            }
            _ => String::new(),
        };
        format!(
            "{} = {}({}){scratch}",
            list(&node.outputs),
            node.op.label(),
            list(&node.inputs)
        )
    }

    fn value(&self, v: ValueId) -> String {
        match self.places[v.0 as usize] {
            Place::Arena(offset) => format!("%{}+{offset}", v.0),
            Place::Input(i) => format!("%{}:in{i}", v.0),
            Place::Output(i) => format!("%{}:out{i}", v.0),
            Place::Constant(_) => format!("%{}:const", v.0),
            Place::Variable(_) => format!("%{}:old", v.0),
            Place::Assigned(_) => format!("%{}:new", v.0),
        }
    }
}
