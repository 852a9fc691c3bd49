//! Tokens between parts: updates of variables in place wait until nothing can fail any more.
//!
//! A failed run leaves all variables as they were. So a kernel may write a variable's next value over the old one only after every
//! fallible node, also of other parts. Where nothing else orders a fallible node before the update, its part sends a token.

use super::Part;
use crate::error::Result;
use crate::ir::{Graph, NodeId, Op, OpClass, Origin};
use crate::schedule::{failing, has_updates, node_deps};
use std::collections::BTreeMap;

/// A token from one part to another, after these nodes.
struct Token {
    from: usize,
    to: usize,
    after: Vec<NodeId>,
    /// That of the first of them.
    origin: Origin,
}

/// Adds tokens, and notes the parts in which variables may be updated in place: none, unless all parts are in the memory of the
/// host. Kernels of other devices may fail at any time.
///
/// Tokens go between parts with other transfers alone. The order of steps in a part without any saves memory, which may be more than
/// the second buffer of a variable, and nothing else makes its device wait.
///
/// Tokens stand behind all other nodes, sends before receives: so there is still one order of all parts.
pub fn add_tokens(parts: &mut [Part]) -> Result<()> {
    if parts.iter().any(|part| part.device.kind.has_own_memory()) {
        return Ok(());
    }
    let mut tokens = needed(parts);
    permit_updates(parts, &tokens);
    tokens.retain(|token| parts[token.to].updates_in_place);
    let devices: Vec<_> = parts.iter().map(|part| part.device.clone()).collect();
    for token in &tokens {
        let to = &devices[token.to];
        parts[token.from].send_token(key(), to, &token.after, &token.origin)?;
    }
    for token in &tokens {
        parts[token.to].recv_token(key(), &devices[token.from], &token.origin)?;
    }
    Ok(())
}

/// Permits updates in place in parts whose tokens are all between parts with transfers.
fn permit_updates(parts: &mut [Part], tokens: &[Token]) {
    let has_transfers = |part: &Part| transfers(&part.graph).next().is_some();
    let can_wait: Vec<bool> = parts.iter().map(has_transfers).collect();
    for (to, part) in parts.iter_mut().enumerate() {
        let mut own = tokens.iter().filter(|token| token.to == to);
        part.updates_in_place = own.all(|token| can_wait[to] && can_wait[token.from]);
    }
}

/// Name of the transfer of a token; there is one at most from a device to another.
fn key() -> String {
    "nothing can fail".to_owned()
}

fn needed(parts: &[Part]) -> Vec<Token> {
    if parts.len() < 2 {
        return Vec::new();
    }
    let failing: Vec<_> = parts.iter().map(|part| failing(&part.graph)).collect();
    let targets = (0..parts.len()).filter(|&to| has_updates(&parts[to].graph));
    let union = Union::of(parts);
    let mut tokens = Vec::new();
    for to in targets {
        let before = union.before_transfers(to);
        for (from, failing) in failing.iter().enumerate().filter(|(from, _)| *from != to) {
            let late = failing.iter().filter(|id| !before[from][id.0 as usize]);
            let after: Vec<NodeId> = late.copied().collect();
            if let Some(&first) = after.first() {
                let origin = parts[from].graph.node(first).origin.clone();
                tokens.push(Token {
                    from,
                    to,
                    after,
                    origin,
                });
            }
        }
    }
    tokens
}

/// All parts, with the dependencies of their nodes.
struct Union<'p> {
    parts: &'p [Part],
    /// By part and node: nodes of the same part.
    deps: Vec<Vec<Vec<NodeId>>>,
    /// The part and the node of each `send`, by key, source and destination.
    sends: BTreeMap<(&'p str, String, &'p str), (usize, NodeId)>,
}

impl<'p> Union<'p> {
    fn of(parts: &'p [Part]) -> Union<'p> {
        let deps = |part: &Part| {
            let of_nodes = node_deps(&part.graph).into_iter();
            of_nodes.map(|deps| deps.into_iter().collect()).collect()
        };
        let mut sends = BTreeMap::new();
        for (p, part) in parts.iter().enumerate() {
            for (id, node) in part.graph.nodes() {
                if let Op::Send { key, to } = &node.op {
                    let from = part.device.to_string();
                    sends.insert((key.as_str(), from, to.as_str()), (p, id));
                }
            }
        }
        Union {
            parts,
            deps: parts.iter().map(deps).collect(),
            sends,
        }
    }

    /// By part and node: true for ancestors of the transfers of a part. Its updates come after all of these.
    fn before_transfers(&self, part: usize) -> Vec<Vec<bool>> {
        let all = |part: &Part| vec![false; part.graph.n_nodes()];
        let mut found: Vec<Vec<bool>> = self.parts.iter().map(all).collect();
        let mut left: Vec<(usize, NodeId)> = transfers(&self.parts[part].graph)
            .map(|id| (part, id))
            .collect();
        while let Some((p, id)) = left.pop() {
            if std::mem::replace(&mut found[p][id.0 as usize], true) {
                continue;
            }
            left.extend(self.deps[p][id.0 as usize].iter().map(|&d| (p, d)));
            left.extend(self.sender(p, id));
        }
        found
    }

    /// The `send` whose tensor a node receives.
    fn sender(&self, part: usize, id: NodeId) -> Option<(usize, NodeId)> {
        let part = &self.parts[part];
        let Op::Recv { key, from, .. } = &part.graph.node(id).op else {
            return None;
        };
        let to = part.device.to_string();
        self.sends
            .get(&(key.as_str(), from.clone(), to.as_str()))
            .copied()
    }
}

fn transfers(g: &Graph) -> impl Iterator<Item = NodeId> {
    let nodes = g.nodes();
    nodes.filter_map(|(id, n)| (n.op.class() == OpClass::Transfer).then_some(id))
}
