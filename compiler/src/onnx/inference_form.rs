//! The inference form of nodes that a file has in training form.
//!
//! `BatchNormalization` loses `training_mode` and all results but the first; `Dropout` loses the operand that turns it on. Before operator set
//! 7, both get `is_test = 1`. Any runtime then computes the results of evaluations, at batches of any size.

use super::load::{Model, OPSETS, domain, opsets_of};
use super::proto::{AttributeProto, GraphProto, NodeProto, TensorProto, attribute_type};
use crate::error::Result;
use crate::units::plural;
use std::collections::BTreeSet;
use std::fmt;

/// Numbers of nodes that were converted from training form to inference form.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Converted {
    /// `BatchNormalization` nodes.
    pub batch_norms: usize,
    /// `Dropout` nodes.
    pub dropouts: usize,
}

impl Converted {
    /// True when the file had no node in training form.
    pub fn is_empty(&self) -> bool {
        *self == Converted::default()
    }
}

impl fmt::Display for Converted {
    /// `2 BatchNormalization nodes, 1 Dropout node`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let counts = [
            (self.batch_norms, "BatchNormalization node"),
            (self.dropouts, "Dropout node"),
        ];
        let texts = counts.into_iter().filter(|(n, _)| *n > 0);
        let texts: Vec<String> = texts.map(|(n, noun)| plural(n, noun)).collect();
        f.write_str(&texts.join(", "))
    }
}

/// Changes to a node.
pub(super) struct Change {
    /// Leading operands that stay.
    pub n_inputs: usize,
    /// Leading results that stay.
    pub n_outputs: usize,
    /// The attribute that goes.
    pub dropped: &'static str,
    /// An attribute in its place.
    pub added: Option<AttributeProto>,
    /// `Identity` nodes for results that went and that other nodes use.
    pub copies: Vec<NodeProto>,
}

/// Conversion of the nodes of a model, in the order of the file.
pub(super) struct Conversion<'m> {
    model: &'m Model,
    names: Names<'m>,
    /// Version of the standard operator set where the nodes are.
    opset: i64,
    n_functions: usize,
    converted: Converted,
}

/// Names of values in all graphs of a model.
#[derive(Default)]
struct Names<'m> {
    /// Operands of nodes, and results of graphs.
    used: BTreeSet<&'m str>,
    /// Constants that are false.
    off: BTreeSet<&'m str>,
    /// Other constants.
    on: BTreeSet<&'m str>,
}

impl<'m> Conversion<'m> {
    pub fn new(model: &'m Model) -> Conversion<'m> {
        let mut names = Names::default();
        names.graph(&model.graph);
        for function in &model.proto.functions {
            names.nodes(&function.node);
            names
                .used
                .extend(function.output.iter().map(String::as_str));
        }
        Conversion {
            model,
            names,
            opset: *OPSETS.end(),
            n_functions: 0,
            converted: Converted::default(),
        }
    }

    /// Numbers of nodes so far.
    pub fn converted(&self) -> Converted {
        self.converted
    }

    /// The next nodes are those of the main graph.
    pub fn enter_main(&mut self) {
        self.opset = opset(self.model.opsets.get(""));
    }

    /// The next nodes are those of the next function.
    pub fn enter_function(&mut self) -> Result<()> {
        if let Some(function) = self.model.proto.functions.get(self.n_functions) {
            self.opset = opset(opsets_of(&function.opset_import)?.get(""));
        }
        self.n_functions += 1;
        Ok(())
    }

    /// True for a node that may have a training form, whatever its attributes are.
    pub fn concerns(node: &NodeProto) -> bool {
        let has_form = matches!(node.op_type.as_str(), "BatchNormalization" | "Dropout");
        has_form && domain(&node.domain).is_empty()
    }

    /// The changes to such a node; `None` for one that is in inference form.
    pub fn change(&mut self, node: &NodeProto) -> Option<Change> {
        match node.op_type.as_str() {
            "BatchNormalization" => self.batch_norm(node),
            "Dropout" => self.dropout(node),
            _ => None,
        }
    }

    fn batch_norm(&mut self, node: &NodeProto) -> Option<Change> {
        let flag = self.flag(node, "training_mode")?;
        self.converted.batch_norms += 1;
        let (mean, variance) = (node.input.get(3), node.input.get(4));
        // The last two are results of old operator sets.
        let sources = [None, mean, variance, mean, variance];
        let moved = node.output.iter().zip(sources);
        let moved = moved.filter_map(|(to, from)| Some((from?, to)));
        let used = moved.filter(|(_, to)| self.names.used.contains(to.as_str()));
        let copies = used.map(|(from, to)| NodeProto {
            op_type: "Identity".to_owned(),
            input: vec![from.clone()],
            output: vec![to.clone()],
            ..NodeProto::default()
        });
        Some(Change {
            n_outputs: 1,
            copies: copies.collect(),
            ..flag
        })
    }

    fn dropout(&mut self, node: &NodeProto) -> Option<Change> {
        let change = match self.opset < 7 {
            true => self.flag(node, "")?,
            false => {
                let switch = node.input.get(2).filter(|name| !name.is_empty())?;
                if self.names.is_off(switch) {
                    return None;
                }
                let has_ratio = !node.input[1].is_empty();
                Change {
                    n_inputs: 1 + usize::from(has_ratio),
                    ..unchanged(node)
                }
            }
        };
        self.converted.dropouts += 1;
        Some(change)
    }

    /// The change of the attribute that says which form a node has; `None` in inference form.
    fn flag(&self, node: &NodeProto, name: &'static str) -> Option<Change> {
        let find = |name: &str| node.attribute.iter().find(|a| a.name == name);
        if self.opset < 7 {
            let is_test = find("is_test").is_some_and(|a| a.i != 0);
            return (!is_test).then(|| Change {
                dropped: "is_test",
                added: Some(AttributeProto {
                    name: "is_test".to_owned(),
                    r#type: attribute_type::INT,
                    i: 1,
                    ..AttributeProto::default()
                }),
                ..unchanged(node)
            });
        }
        // A call of a function may decide.
        let is_training = |a: &AttributeProto| a.i != 0 || !a.ref_attr_name.is_empty();
        find(name).is_some_and(is_training).then(|| Change {
            dropped: name,
            ..unchanged(node)
        })
    }
}

fn opset(version: Option<&i64>) -> i64 {
    version.copied().unwrap_or(*OPSETS.end())
}

fn unchanged(node: &NodeProto) -> Change {
    Change {
        n_inputs: node.input.len(),
        n_outputs: node.output.len(),
        dropped: "",
        added: None,
        copies: Vec::new(),
    }
}

impl<'m> Names<'m> {
    fn graph(&mut self, g: &'m GraphProto) {
        self.used.extend(g.output.iter().map(|o| o.name.as_str()));
        for t in &g.initializer {
            self.constant(&t.name, t);
        }
        self.nodes(&g.node);
    }

    fn nodes(&mut self, nodes: &'m [NodeProto]) {
        for node in nodes {
            self.used.extend(node.input.iter().map(String::as_str));
            for a in &node.attribute {
                a.g.iter().chain(&a.graphs).for_each(|g| self.graph(g));
                if let ("Constant", Some(t), [result]) =
                    (node.op_type.as_str(), &a.t, &node.output[..])
                {
                    self.constant(result, t);
                }
            }
        }
    }

    fn constant(&mut self, name: &'m str, t: &TensorProto) {
        match is_false(t) {
            true => self.off.insert(name),
            false => self.on.insert(name),
        };
    }

    /// True for a constant that is false in all graphs.
    fn is_off(&self, name: &str) -> bool {
        self.off.contains(name) && !self.on.contains(name)
    }
}

/// True for a `bool` tensor of zeros.
fn is_false(t: &TensorProto) -> bool {
    const BOOL: i32 = 9;
    let has_elements = !t.raw_data.is_empty() || !t.int32_data.is_empty();
    let is_zero = t.raw_data.iter().all(|&b| b == 0) && t.int32_data.iter().all(|&i| i == 0);
    t.data_type == BOOL && has_elements && is_zero
}

#[cfg(test)]
mod tests {
    use super::super::load::{Specialisation, load};
    use super::super::proto::{ModelProto, OperatorSetIdProto, ValueInfoProto};
    use super::*;
    use crate::interp::run;
    use crate::onnx::Weights;
    use gristmill_runtime::Tensor;
    use prost::Message;
    use std::fs;

    fn node(op_type: &str, input: &[&str], output: &[&str]) -> NodeProto {
        NodeProto {
            op_type: op_type.to_owned(),
            input: input.iter().map(|&name| name.to_owned()).collect(),
            output: output.iter().map(|&name| name.to_owned()).collect(),
            ..NodeProto::default()
        }
    }

    fn integer(name: &str, i: i64) -> AttributeProto {
        AttributeProto {
            name: name.to_owned(),
            r#type: attribute_type::INT,
            i,
            ..AttributeProto::default()
        }
    }

    /// A tensor of `[1, 2]`, or of `[2]`.
    fn floats(name: &str, dims: &[i64], elements: [f32; 2]) -> TensorProto {
        TensorProto {
            name: name.to_owned(),
            data_type: 1,
            dims: dims.to_vec(),
            float_data: elements.to_vec(),
            ..TensorProto::default()
        }
    }

    fn flag(name: &str, value: u8) -> TensorProto {
        TensorProto {
            name: name.to_owned(),
            data_type: 9,
            raw_data: vec![value].into(),
            ..TensorProto::default()
        }
    }

    /// Results of a model with constants alone.
    fn model(opset: i64, node: Vec<NodeProto>, outputs: &[&str]) -> ModelProto {
        let named = |name: &&str| ValueInfoProto {
            name: (*name).to_owned(),
            ..Default::default()
        };
        let graph = GraphProto {
            node,
            initializer: vec![
                floats("x", &[1, 2], [1.0, 3.0]),
                floats("scale", &[2], [2.0, 2.0]),
                floats("offset", &[2], [0.5, 0.5]),
                floats("mean", &[2], [1.0, 2.0]),
                floats("var", &[2], [4.0, 4.0]),
                flag("on", 1),
                flag("off", 0),
            ],
            output: outputs.iter().map(named).collect(),
            ..GraphProto::default()
        };
        ModelProto {
            ir_version: 8,
            graph: Some(graph),
            opset_import: vec![OperatorSetIdProto {
                domain: String::new(),
                version: opset,
            }],
            ..ModelProto::default()
        }
    }

    /// Results of the inference form of a model, and its nodes.
    fn converted(model: &ModelProto) -> (Converted, Vec<Vec<f64>>, Vec<NodeProto>) {
        let folder = tempfile::tempdir().unwrap();
        let (old, new) = (folder.path().join("old"), folder.path().join("new"));
        fs::write(&old, model.encode_to_vec()).unwrap();
        let old = load(&old).unwrap();
        let left_open = old.left_open(&Specialisation::default()).unwrap();
        assert!(!left_open.warnings.is_empty());
        let converted = old.write_for_inference(&Weights::new(), &new).unwrap();
        let new = load(&new).unwrap();
        let graph = new.graph(&Specialisation::default()).unwrap();
        let results = run(&graph, &[]).unwrap();
        let nodes = new.graph_proto().node.clone();
        (
            converted,
            results.iter().map(Tensor::to_f64s).collect(),
            nodes,
        )
    }

    const OPERANDS: [&str; 5] = ["x", "scale", "offset", "mean", "var"];

    #[test]
    fn normalisations_take_running_statistics_and_dropouts_nothing() {
        let mut norm = node("BatchNormalization", &OPERANDS, &["n", "moved", "unused"]);
        norm.attribute = vec![integer("training_mode", 1)];
        let nodes = vec![
            norm,
            node("Dropout", &["n", "", "on"], &["d"]),
            node("Dropout", &["d", "", "off"], &["y"]),
        ];
        let (converted, results, nodes) = converted(&model(17, nodes, &["y", "moved"]));
        assert_eq!(
            converted.to_string(),
            "1 BatchNormalization node, 1 Dropout node"
        );
        let near = |a: f64, b: f64| (a - b).abs() < 1e-4;
        assert!(
            near(results[0][0], 0.5) && near(results[0][1], 1.5),
            "{results:?}"
        );
        assert_eq!(results[1], [1.0, 2.0]);
        let [norm, copy, first, second] = &nodes[..] else {
            panic!("{nodes:?}");
        };
        assert!(norm.attribute.is_empty() && norm.output == ["n"]);
        assert_eq!(
            (&*copy.op_type, &copy.input[..]),
            ("Identity", &["mean".to_owned()][..])
        );
        assert_eq!(
            (&first.input[..], second.input.len()),
            (&["n".to_owned()][..], 3)
        );
    }

    #[test]
    fn old_operator_sets_have_a_flag_for_it() {
        let mut norm = node("BatchNormalization", &OPERANDS, &["n"]);
        norm.attribute = vec![integer("is_test", 0)];
        let nodes = vec![norm, node("Dropout", &["n"], &["y"])];
        let (converted, results, nodes) = converted(&model(6, nodes, &["y"]));
        assert_eq!((converted.batch_norms, converted.dropouts), (1, 1));
        assert!((results[0][1] - 1.5).abs() < 1e-4, "{results:?}");
        for node in nodes {
            assert_eq!(node.attribute, [integer("is_test", 1)]);
        }
    }
}
