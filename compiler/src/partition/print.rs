//! Text form of partitions, for `dump --stage partitions`.

use super::Part;
use crate::ir::print::PrintOptions;

/// The graph of each part after a line with its device and which inputs and outputs of the whole graph are its own.
pub fn to_text(parts: &[Part], options: PrintOptions) -> String {
    let list = |ids: &[u32]| ids.iter().map(u32::to_string).collect::<Vec<_>>().join(" ");
    let text = |p: &Part| {
        format!(
            "// {}: inputs [{}], outputs [{}]\n{}",
            p.device,
            list(&p.inputs),
            list(&p.outputs),
            p.graph.to_text(options)
        )
    };
    parts.iter().map(text).collect::<Vec<_>>().join("\n")
}
