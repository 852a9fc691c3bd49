//! Text form of placements, for `dump --stage placed` and `place`.

use super::Placement;
use crate::ir::Graph;
use std::fmt::Write;

impl Placement {
    /// The prediction, then one line per node in order of start: device, start, end, op, origin, reason. Constants are not listed.
    pub fn to_text(&self, g: &Graph) -> String {
        let mut out = String::new();
        self.write(g, &mut out).expect("writing to a String does not fail");
        out
    }

    fn write(&self, g: &Graph, out: &mut String) -> std::fmt::Result {
        writeln!(out, "placement {:?}: {}, predicted {}", g.name, self.algorithm, self.makespan)?;
        for (device, peak) in self.devices.iter().zip(&self.peak_bytes) {
            writeln!(out, "  {device}: peak {peak}")?;
        }
        for c in &self.candidates {
            let memory = if c.fits_memory { "" } else { ", over a memory limit" };
            let plural = if c.n_devices == 1 { "" } else { "s" };
            writeln!(out, "  candidate {}: {} on {} device{plural}{memory}", c.algorithm, c.makespan, c.n_devices)?;
        }
        for w in &self.warnings {
            writeln!(out, "  warning: {w}")?;
        }
        let mut order: Vec<usize> = (0..self.nodes.len()).collect();
        order.sort_by_key(|&i| (self.nodes[i].as_ref().map(|p| p.start), i));
        for i in order {
            let Some(p) = &self.nodes[i] else { continue };
            let node = g.node(crate::ir::NodeId(i as u32));
            let attrs: Vec<String> = node.op.attrs().into_iter().map(|(_, v)| v).collect();
            let (device, name) = (&self.devices[p.device], node.op.name());
            writeln!(
                out,
                "{device} {}..{} {name} {} @ {:?}: {}",
                p.start,
                p.end,
                attrs.join(" "),
                node.origin.as_str(),
                p.reason
            )?;
        }
        Ok(())
    }
}
