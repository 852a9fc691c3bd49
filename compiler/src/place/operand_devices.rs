//! Cheap nodes of which nothing is asked follow the node that makes their operands, so that a pin
//! does not cut kernels in two.
//!
//! Passes join only nodes of equal requests. Without this, a pinned convolution keeps its bias and
//! activation, of which nobody asked anything, out of its kernel, and its layout cannot go further
//! than itself.

use super::Request;
use crate::ir::{AskedBy, Def, DeviceRequest, Graph, NodeId, Op, OpClass};
use crate::units::printable;
use std::sync::Arc;

/// Gives element-wise nodes, views and poolings the request that all nodes have that make their
/// operands (constants and graph inputs left out).
///
/// Only requests for devices alone spread, and only where every device that fits has kernels for
/// both nodes: nothing that could be placed before becomes an error. Nodes with control edges are
/// left alone, since they share no kernel.
pub fn follow_operands(g: &mut Graph, request: &Request) {
    let ordered = g.ordered();
    for id in (0..g.n_nodes() as u32).map(NodeId) {
        let node = g.node(id);
        let is_cheap = matches!(
            node.op.class(),
            OpClass::Map | OpClass::View | OpClass::Window
        );
        if !is_cheap || node.device.is_some() || !node.regions.is_empty() || ordered[id.0 as usize]
        {
            continue;
        }
        let followed = leader(g, id).filter(|&leader| can_follow(g, id, leader, request));
        if let Some(leader) = followed {
            let leader = g.node(leader);
            let asked = leader.device.as_ref().expect("a leader has a request");
            let by = super::pins::named(&asked.spec, asked.asked_by.as_str());
            // Who asked is told once, not once more for every node of a chain.
            let by = if by.starts_with("follows ") {
                by
            } else {
                format!("follows '{}' ({by})", printable(leader.origin.as_str()))
            };
            let own = DeviceRequest::of(asked.spec.clone(), AskedBy::new(&by));
            g.node_mut(id).device = Some(Arc::new(own));
        }
    }
}

/// The first node that makes an operand, if all that do have the same request for devices alone.
fn leader(g: &Graph, id: NodeId) -> Option<NodeId> {
    let makers = g
        .node(id)
        .inputs
        .iter()
        .filter_map(|&v| match g.value(v).def {
            Def::Node(maker, _) if !matches!(g.node(maker).op, Op::Constant { .. }) => Some(maker),
            _ => None,
        });
    let mut makers = makers.collect::<Vec<_>>().into_iter();
    let first = makers.next()?;
    let asked = g
        .node(first)
        .device
        .as_ref()
        .filter(|d| d.groups.is_empty())?;
    makers
        .all(|m| g.node(m).device.as_ref() == Some(asked))
        .then_some(first)
}

fn can_follow(g: &Graph, id: NodeId, leader: NodeId, request: &Request) -> bool {
    let Some(asked) = &g.node(leader).device else {
        return false;
    };
    let devices = request.devices.matching(&asked.spec);
    let runs = |&d: &usize| {
        let kernels = &request.devices.devices[d].kernels;
        kernels.lacks(g.node(id)).is_none() && kernels.lacks(g.node(leader)).is_none()
    };
    !devices.is_empty() && devices.iter().all(runs)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::place::{DeviceSet, Kernels, Pin, apply_pins};

    /// The requests of the nodes, after pins and following.
    fn requests(nodes: &str, pins: &[&str], r: &mut Request) -> Vec<String> {
        let text =
            format!("graph \"g\" {{\n%0 = input \"x\": f32[2, 2]\n{nodes}output \"y\" %1\n}}");
        let mut g = Graph::parse(&text).unwrap_or_else(|e| panic!("{e}\n{text}"));
        r.pins = pins.iter().map(|p| Pin::parse(p).unwrap()).collect();
        apply_pins(&mut g, r).unwrap();
        follow_operands(&mut g, r);
        let text = |(_, n): (NodeId, &crate::ir::Node)| {
            n.device.as_ref().map_or("-".to_owned(), |d| {
                format!("{} by {}", d.spec, d.asked_by.as_str())
            })
        };
        g.nodes()
            .filter(|(_, n)| !matches!(n.op, Op::Constant { .. }))
            .map(text)
            .collect()
    }

    const CHAIN: &str = "%1: f32[2, 2] = matmul(%0, %0) @ \"/a\"\n\
                         %2: f32[] = constant() {value = f32[] <1.0>} @ \"/c\"\n\
                         %3: f32[2, 2] = add(%1, %2) @ \"/bias\"\n\
                         %4: f32[2, 2] = relu(%3) @ \"/relu\"\n\
                         %5: f32[2, 2] = matmul(%4, %0) @ \"/b\"\n\
                         %6: f32[2, 2] = add(%5, %4) @ \"/join\"\n";

    fn request() -> Request {
        Request {
            devices: DeviceSet::parse("cpu:2", 2).unwrap(),
            ..Request::default()
        }
    }

    #[test]
    fn cheap_nodes_follow_and_others_stay_free() {
        let pin = "/device:CPU:1 by pin \"/a=/device:CPU:1\"";
        let follows = "/device:CPU:1 by follows '/a' (pin \"/a=/device:CPU:1\")";
        assert_eq!(
            requests(CHAIN, &["/a=cpu:1"], &mut request()),
            [pin, follows, follows, "-", "-"]
        );
        // Makers that disagree are not followed; makers that agree are.
        let found = requests(CHAIN, &["/a=cpu:1", "/b$=cpu:0"], &mut request());
        assert_eq!(found[4], "-");
        let found = requests(CHAIN, &["/a=cpu:1", "/b$=cpu:1"], &mut request());
        assert_eq!(
            found[4],
            "/device:CPU:1 by follows '/b' (pin \"/b$=/device:CPU:1\")"
        );
        // A node's own request, and groups, do not spread over others.
        let found = requests(CHAIN, &["/a=cpu:1", "/relu=cpu:0"], &mut request());
        assert_eq!(
            (&found[1][..], &found[2][..]),
            (follows, "/device:CPU:0 by pin \"/relu=/device:CPU:0\"")
        );
        let found = requests(CHAIN, &["/a=cpu:1", "/a=loc:@/b"], &mut request());
        assert_eq!((&found[1][..], &found[2][..]), ("-", "-"));
    }

    #[test]
    fn nodes_that_could_be_placed_stay_so() {
        let mut r = request();
        r.devices.devices[1].kernels = Kernels::default().without("relu", "not written");
        let found = requests(CHAIN, &["/a=cpu:1"], &mut r);
        assert!(
            found[1].starts_with("/device:CPU:1 by follows"),
            "{found:?}"
        );
        assert_eq!(found[2], "-", "no kernel");
        r.devices.devices[1].kernels = Kernels::default().without("matmul", "not written");
        assert_eq!(
            requests(CHAIN, &["/a=cpu:1"], &mut r)[1],
            "-",
            "the leader will go elsewhere"
        );
        let mut r = Request {
            fallback: crate::place::Fallback::Allow,
            ..request()
        };
        assert_eq!(
            requests(CHAIN, &["/a=/gpu:0"], &mut r)[1],
            "-",
            "the leader will go elsewhere"
        );
    }
}
