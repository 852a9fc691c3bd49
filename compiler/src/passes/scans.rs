//! Smaller scans: without unread results and operands, stacks of the same elements, and stacks of the
//! elements of an operand.
//!
//! Such are in the gradient of a scan, which stacks the cotangent of each operand by itself, and hands on
//! elements for later products.

use super::Rebuild;
use super::cse::{dce, has_effect};
use crate::error::Result;
use crate::ir::{Graph, Node, NodeId, Op, Output, Type, ValueId, symbols_of};
use std::collections::BTreeSet;

/// The graph with smaller scans, in regions too.
pub fn trim_scans(g: &Graph) -> Result<Graph> {
    let mut r = Rebuild::new(g);
    let mut is_read: Vec<bool> = g.users().iter().map(|users| !users.is_empty()).collect();
    for o in &g.outputs {
        is_read[o.value.0 as usize] = true;
    }
    for (id, node) in g.nodes() {
        if node.regions.is_empty() || matches!(node.op, Op::Cluster { .. }) {
            r.copy(id, node)?;
            continue;
        }
        let mut node = node.clone();
        for region in &mut node.regions {
            *region = dce(&trim_scans(region)?)?;
        }
        match Trimmed::of(g, &node, &is_read)? {
            Some(trimmed) => trimmed.add_to(&mut r, id, &node)?,
            None => r.copy(id, &node)?,
        }
    }
    Ok(r.finish(g))
}

/// The value in the place of a stacked result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stacked {
    /// Result of a number of the smaller scan.
    Result(usize),
    /// The operand with the same elements.
    Operand(usize),
    Unread,
}

/// A smaller scan.
struct Trimmed {
    node: Node,
    /// Its operands, by number.
    operands: Vec<usize>,
    carried: usize,
    stacked: Vec<Stacked>,
}

impl Trimmed {
    /// The smaller scan of a node; `None` for one as small as can be, and for other nodes.
    fn of(g: &Graph, node: &Node, is_read: &[bool]) -> Result<Option<Trimmed>> {
        let (
            &Op::Scan {
                carried,
                scanned,
                ref length,
                reverse,
            },
            [body],
        ) = (&node.op, &node.regions[..])
        else {
            return Ok(None);
        };
        if has_effect(node) {
            return Ok(None);
        }
        let (made, stacked) = stacks(g, node, body, is_read);
        let body = with_outputs(body, carried, &made)?;
        let operands = needed(&body, carried);
        if made.len() == stacked.len() && operands.len() == node.inputs.len() {
            return Ok(None);
        }
        let op = Op::Scan {
            carried,
            scanned: operands
                .iter()
                .filter(|&&i| (carried..carried + scanned).contains(&i))
                .count(),
            length: length.clone(),
            reverse,
        };
        let node = Node {
            op,
            regions: vec![with_inputs(&body, &operands)?],
            ..node.clone()
        };
        Ok(Some(Trimmed {
            node,
            operands,
            carried,
            stacked,
        }))
    }

    /// Adds the scan, if it has results, in the place of `old`.
    fn add_to(&self, r: &mut Rebuild, id: NodeId, old: &Node) -> Result<()> {
        let (finals, stacks) = old.outputs.split_at(self.carried);
        let mut results = Vec::new();
        if !self.node.regions[0].outputs.is_empty() {
            let operand = |i: &usize| r.get(old.inputs[*i]);
            let inputs: Vec<ValueId> = self.operands.iter().map(operand).collect();
            results = r.graph.add_copy(&self.node, &inputs)?;
            r.mapped(id, old, &results[..finals.len()]);
        }
        for (&v, stacked) in stacks.iter().zip(&self.stacked) {
            match stacked {
                Stacked::Result(i) => r.set(v, results[*i]),
                Stacked::Operand(i) => r.set(v, r.get(old.inputs[*i])),
                Stacked::Unread => {}
            }
        }
        Ok(())
    }
}

/// The stacks to make of a scan's region, and the value in the place of each stacked result.
fn stacks<'b>(
    g: &Graph,
    node: &Node,
    body: &'b Graph,
    is_read: &[bool],
) -> (Vec<&'b Output>, Vec<Stacked>) {
    let Op::Scan {
        carried, scanned, ..
    } = node.op
    else {
        return (Vec::new(), Vec::new());
    };
    let mut made: Vec<&Output> = Vec::new();
    let mut stacked = Vec::new();
    for (output, &result) in body.outputs.iter().zip(&node.outputs).skip(carried) {
        let same = made.iter().position(|o| o.value == output.value);
        let operand = (carried..carried + scanned).find(|&i| {
            let is_same = body.inputs[i] == output.value;
            is_same && g.ty(node.inputs[i]) == g.ty(result)
        });
        stacked.push(match (same, operand) {
            _ if !is_read[result.0 as usize] => Stacked::Unread,
            (_, Some(operand)) => Stacked::Operand(operand),
            (Some(same), _) => Stacked::Result(carried + same),
            _ => {
                made.push(output);
                Stacked::Result(carried + made.len() - 1)
            }
        });
    }
    (made, stacked)
}

/// A region with its first outputs and others after them, without dead nodes.
fn with_outputs(region: &Graph, n_first: usize, others: &[&Output]) -> Result<Graph> {
    let mut r = Rebuild::new(region);
    for (id, node) in region.nodes() {
        r.copy(id, node)?;
    }
    let first = region.outputs.iter().take(n_first);
    for output in first.chain(others.iter().copied()) {
        let new = r.get(output.value);
        r.graph.add_output(&output.name, new);
    }
    dce(&r.graph)
}

/// Numbers of the inputs read by a region, carried ones, and those with the only value of a symbol.
fn needed(region: &Graph, carried: usize) -> Vec<usize> {
    let users = region.users();
    let is_output = |v: &ValueId| region.outputs.iter().any(|o| o.value == *v);
    let is_read = |v: &ValueId| !users[v.0 as usize].is_empty() || is_output(v);
    let inputs = region.inputs.iter().enumerate();
    let mut needed: BTreeSet<usize> = inputs
        .filter(|(i, v)| *i < carried || is_read(v))
        .map(|(i, _)| i)
        .collect();
    let known = |needed: &BTreeSet<usize>| {
        let types = needed.iter().map(|&i| region.ty(region.inputs[i]));
        types.flat_map(plain_symbols).collect::<BTreeSet<String>>()
    };
    for (i, &v) in region.inputs.iter().enumerate() {
        let symbols = symbols_of([region.ty(v)]);
        if !symbols.is_subset(&known(&needed)) {
            needed.insert(i);
        }
    }
    needed.into_iter().collect()
}

/// Symbols as extents of a type.
fn plain_symbols(ty: &Type) -> impl Iterator<Item = String> {
    let symbols = ty.shape.iter().filter_map(|d| d.as_symbol());
    symbols.map(str::to_owned)
}

/// A region with some of its inputs.
fn with_inputs(region: &Graph, inputs: &[usize]) -> Result<Graph> {
    let mut r = Rebuild::onto(region, Graph::new(&region.name));
    for &i in inputs {
        let v = region.inputs[i];
        let new = r
            .graph
            .add_input(&region.input_names[i], region.ty(v).clone());
        r.set(v, new);
    }
    for (id, node) in region.nodes() {
        r.copy(id, node)?;
    }
    Ok(r.finish(region))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::interp;
    use crate::ir::verify::verify;
    use crate::passes::tests::ramp;

    /// Sums of `x`, stacked once for each name, in a direction. The region reads no `z`.
    fn summing(outputs: &[&str], reverse: bool) -> Graph {
        let stacks: Vec<String> = (1..=4).map(|i| format!("%{}: f32[4, 2]", i + 3)).collect();
        let text = format!(
            r#"graph "g" {{
  %0 = input "h": f32[2]
  %1 = input "x": f32[4, 2]
  %2 = input "z": f32[4, 2]
  %3: f32[2], {} = scan(%0, %2, %1) {{carried = 1, scanned = 2, length = 4, reverse = {reverse}}} (graph "step" {{
    %0 = input "h": f32[2]
    %1 = input "z": f32[2]
    %2 = input "x": f32[2]
    %3: f32[2] = add(%0, %2)
    %4: f32[2] = mul(%2, %2)
    output "h" %3
    output "sum" %3
    output "again" %3
    output "x" %2
    output "square" %4
  }})
{}
}}
"#,
            stacks.join(", "),
            outputs.join("\n")
        );
        Graph::parse(&text).unwrap()
    }

    fn scan_of(g: &Graph) -> &Node {
        g.nodes()
            .find(|(_, n)| matches!(n.op, Op::Scan { .. }))
            .unwrap()
            .1
    }

    #[test]
    fn each_stack_of_elements_is_made_once() {
        for reverse in [false, true] {
            let all =
                ["h\" %3", "sum\" %4", "again\" %5", "x\" %6"].map(|o| format!("  output \"{o}"));
            let g = summing(&all.each_ref().map(String::as_str), reverse);
            let trimmed = trim_scans(&g).unwrap();
            verify(&trimmed).unwrap();
            let scan = scan_of(&trimmed);
            // `h` and one stack of sums of the operands `h` and `x`.
            assert_eq!((scan.outputs.len(), scan.inputs.len()), (2, 2), "{trimmed}");
            let region = &scan.regions[0];
            assert_eq!((region.n_nodes(), region.inputs.len()), (1, 2), "{trimmed}");
            let inputs = [ramp(&[2]), ramp(&[4, 2]), ramp(&[4, 2])];
            let run = |g: &Graph| interp::run(g, &inputs).unwrap();
            assert_eq!(run(&trimmed), run(&g));
            assert_eq!(trim_scans(&trimmed).unwrap(), trimmed);
        }
    }
}
