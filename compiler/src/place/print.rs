//! Text form of placements, for `dump --stage placed` and `place`.

use super::Placement;
use crate::cost::{Bytes, Nanos};
use crate::ir::Graph;
use std::fmt::Write;

impl Placement {
    /// The prediction, then one line per node in order of start: device, start, end, op, origin,
    /// reason. Constants are not listed.
    pub fn to_text(&self, g: &Graph) -> String {
        let mut out = self.summary(g);
        self.write_nodes(g, &mut out)
            .expect("writing to a String does not fail");
        out
    }

    /// The same with the origins of the predicted times, for `place`: they depend on the machine.
    pub fn to_text_with_sources(&self, g: &Graph) -> String {
        self.summary_with_sources(g) + &self.nodes_text(g)
    }

    /// The nodes without the prediction.
    pub fn nodes_text(&self, g: &Graph) -> String {
        let mut out = String::new();
        self.write_nodes(g, &mut out)
            .expect("writing to a String does not fail");
        out
    }

    /// The prediction and the origins of its times, without the nodes.
    pub fn summary_with_sources(&self, g: &Graph) -> String {
        let sources = &self.sources;
        let hint = match sources.assumed {
            0 => "",
            _ => " (`gristmill calibrate` measures this machine's rates)",
        };
        format!("{}  predicted times: {sources}{hint}\n", self.summary(g))
    }

    /// The prediction, without the nodes.
    pub fn summary(&self, g: &Graph) -> String {
        let mut out = String::new();
        self.write_summary(g, &mut out)
            .expect("writing to a String does not fail");
        out
    }

    fn write_summary(&self, g: &Graph, out: &mut String) -> std::fmt::Result {
        writeln!(
            out,
            "placement {:?}: {}, predicted {}",
            g.name, self.algorithm, self.makespan
        )?;
        let (bound, name) = &self.lower_bound;
        match self.makespan.0 {
            m if m == bound.0 => writeln!(
                out,
                "  optimal for these kernels: the {name} bound is {bound}"
            )?,
            m => {
                let gap = 100.0 * (m as f64 / bound.0.max(1) as f64 - 1.0);
                writeln!(out, "  lower bound {bound} ({name}), gap {gap:.1} %")?;
            }
        }
        for rival in &self.rivals {
            let chosen = if rival.kernels == self.joining {
                " (chosen)"
            } else {
                ""
            };
            let (kernels, time) = (rival.kernels, Nanos(rival.makespan_ns));
            writeln!(out, "  kernels {kernels}: {time}{chosen}")?;
        }
        if let Some(s) = &self.stream {
            let (n, time, in_flight) = (s.samples, s.time(), s.in_flight);
            writeln!(
                out,
                "  stream: {n} runs in {time}, one every {}, {in_flight} under way at a time",
                s.period
            )?;
            writeln!(
                out,
                "  no placement is predicted to take less than {} for them",
                s.lower_bound
            )?;
        }
        for (device, peak) in self.devices.iter().zip(&self.peak_bytes) {
            writeln!(out, "  {device}: peak {peak}")?;
        }
        for c in &self.candidates {
            let memory = if c.score.0 == Bytes::ZERO {
                ""
            } else {
                ", over a memory limit"
            };
            let plural = if c.n_devices == 1 { "" } else { "s" };
            writeln!(
                out,
                "  candidate {}: {} on {} device{plural}{memory}",
                c.algorithm, c.score.1, c.n_devices
            )?;
        }
        let n_parked = self.copies.iter().filter(|c| c.parked.is_some()).count();
        for (n, what) in [
            (
                self.copies.len() - n_parked,
                "nodes that run more than once",
            ),
            (
                n_parked,
                "results that are parked on another device for a while",
            ),
        ] {
            if n > 0 {
                writeln!(out, "  {what}: {n}")?;
            }
        }
        for w in &self.warnings {
            writeln!(out, "  warning: {w}")?;
        }
        Ok(())
    }

    fn write_nodes(&self, g: &Graph, out: &mut String) -> std::fmt::Result {
        let starts = self.nodes.iter().map(|p| p.as_ref().map(|p| p.start));
        let starts: Vec<_> = starts
            .chain(self.copies.iter().map(|c| Some(c.placed.start)))
            .collect();
        let mut order: Vec<usize> = (0..starts.len()).collect();
        order.sort_by_key(|&i| (starts[i], i));
        for i in order {
            let (id, p) = match i.checked_sub(self.nodes.len()) {
                Some(copy) => (self.copies[copy].node, &self.copies[copy].placed),
                None => match &self.nodes[i] {
                    Some(p) => (crate::ir::NodeId(i as u32), p),
                    None => continue,
                },
            };
            let node = g.node(id);
            let is_parked = i
                .checked_sub(self.nodes.len())
                .is_some_and(|copy| self.copies[copy].parked.is_some());
            let device = &self.devices[p.device];
            let label = if is_parked {
                "keep".to_owned()
            } else {
                node.op.label()
            };
            writeln!(
                out,
                "{device} {}..{} {label} @ {:?}: {}",
                p.start,
                p.end,
                node.origin.as_str(),
                p.reason
            )?;
        }
        Ok(())
    }
}
