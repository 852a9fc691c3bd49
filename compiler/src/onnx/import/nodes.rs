//! Nodes of the model: operands, handler, results.

use super::super::check::operator_name;
use super::super::load::domain;
use super::super::ops;
use super::super::proto::NodeProto;
use super::interface::possible;
use super::{Contents, Ctx, Importer, MAX_NODES, OpDef, Out, Outs, Slot, V, Visit, Visited, fold};
use crate::error::{Error, Result};
use crate::ir::ValueId;

impl<'m> Importer<'m> {
    pub(super) fn nodes(&mut self, nodes: &'m [NodeProto]) {
        for (index, node) in nodes.iter().enumerate() {
            self.n_nodes += 1;
            if self.n_nodes > MAX_NODES {
                let message = format!("the model expands to more than {MAX_NODES} nodes");
                self.errors.push(Error::unsupported(message));
                return;
            }
            let path = self.path_of(node, index);
            let values = self.visit(node, path);
            for (i, name) in node.output.iter().enumerate() {
                if !name.is_empty() {
                    let v = values.get(i).copied();
                    let v = v.unwrap_or_else(|| self.unplaced(name, None, None));
                    self.define(name, v);
                }
            }
        }
    }

    /// The results of a node; fewer than it has when it could not be imported.
    fn visit(&mut self, node: &'m NodeProto, path: String) -> Vec<V> {
        self.b().set_origin(&path);
        let (values, outcome) = match self.node(node, &path) {
            Ok(values) if values.is_empty() && n_wanted(node) > 0 => (values, Visited::Unreached),
            Ok(values) => (values, Visited::Imported),
            Err(e) => {
                self.errors.push(e.at(&path));
                (Vec::new(), Visited::Failed)
            }
        };
        let rules = std::mem::take(&mut self.rules);
        self.visits.push(Visit {
            path,
            operator: operator_name(node),
            outcome,
            rules,
            training: self.training.take(),
        });
        values
    }

    fn path_of(&mut self, node: &NodeProto, index: usize) -> String {
        let prefix = &self.scope().path;
        if !node.name.is_empty() {
            return format!("{prefix}{}", node.name);
        }
        let output = node.output.iter().find(|o| !o.is_empty());
        let output = output.map_or("", String::as_str);
        format!("{prefix}{}_{index}:{output}", node.op_type)
    }

    /// Imports one node; the results are empty when an operand could not be imported, which was
    /// reported before.
    fn node(&mut self, node: &'m NodeProto, path: &str) -> Result<Vec<V>> {
        let inputs = self.operands(node)?;
        let defined = |v: &V| self.slots[v.0 as usize].ty.is_some();
        if !inputs.iter().flatten().all(defined) {
            return Ok(Vec::new());
        }
        self.check_references(node)?;
        let node_domain = domain(&node.domain);
        let def = ops::find(node_domain, &node.op_type);
        let function = self
            .model
            .function(node_domain, &node.op_type, &node.overload);
        match (def, function) {
            // A standard operator's own handler is preferred to a body that comes with the model.
            (Some(def), _) if node_domain.is_empty() => self.handled(def, node, inputs),
            (_, Some(f)) => self.call(f, node, inputs, path),
            (Some(def), None) => self.handled(def, node, inputs),
            (None, None) => Err(unknown_operator(node)),
        }
    }

    /// Operands as values, `None` for absent ones.
    fn operands(&mut self, node: &'m NodeProto) -> Result<Vec<Option<V>>> {
        let mut inputs = Vec::with_capacity(node.input.len());
        for name in &node.input {
            if name.is_empty() {
                inputs.push(None);
                continue;
            }
            let v = self.lookup(name).ok_or_else(|| {
                let op = &node.op_type;
                Error::invalid(format!("{op}: operand {name:?} is not defined before it"))
            })?;
            inputs.push(Some(v));
            if self.slots[v.0 as usize].ty.is_none() {
                break;
            }
        }
        Ok(inputs)
    }

    /// Errors when an attribute refers to one of a function, outside a function.
    fn check_references(&self, node: &NodeProto) -> Result<()> {
        let in_function = self.scopes.iter().any(|s| s.call.is_some());
        let mut attributes = node.attribute.iter();
        let refers = attributes.find(|a| !a.ref_attr_name.is_empty() && !in_function);
        refers.map_or(Ok(()), |a| {
            let (name, outside) = (&a.name, "a function's, outside a function");
            Err(Error::invalid(format!(
                "attribute {name:?} refers to {outside}"
            )))
        })
    }

    fn handled(
        &mut self,
        def: &'static OpDef,
        node: &'m NodeProto,
        inputs: Vec<Option<V>>,
    ) -> Result<Vec<V>> {
        let (op, node_domain) = (&node.op_type, domain(&node.domain));
        let opset = self.scope().opsets.get(node_domain).copied();
        let opset = opset.ok_or_else(|| {
            Error::invalid(format!(
                "{op}: the model imports no operator set for domain {node_domain:?}"
            ))
        })?;
        self.handle(def, node, inputs, opset)
            .map_err(|e| e.context(format!("{op} (opset {opset})")))
    }

    fn handle(
        &mut self,
        def: &'static OpDef,
        node: &'m NodeProto,
        mut inputs: Vec<Option<V>>,
        opset: i64,
    ) -> Result<Vec<V>> {
        if opset < 6 && domain(&node.domain).is_empty() && !ops::unchanged_before_6(&node.op_type) {
            let e = Error::unsupported("operator sets below 6 are not supported");
            return Err(e.hint("export with opset 20"));
        }
        while inputs.last() == Some(&None) {
            inputs.pop();
        }
        check_arity(def, inputs.len())?;
        let mut cx = Ctx::new(self, node, inputs, opset);
        let outs = match super::super::shape_value::rule(&mut cx)? {
            Some(outs) => outs,
            None => {
                let outs = (def.run)(&mut cx)?;
                cx.check_attributes()?;
                outs
            }
        };
        let foldable = def.fold && cx.all_known();
        let source = cx.source_of_result();
        let results = self.bind(node, outs, foldable)?;
        self.note_source(&results, source);
        Ok(results)
    }

    /// Results of a handler as values of the model.
    fn bind(&mut self, node: &'m NodeProto, outs: Outs, foldable: bool) -> Result<Vec<V>> {
        let (n, wanted) = (outs.len(), n_wanted(node));
        if n < wanted {
            let last = wanted - 1;
            return Err(Error::unsupported(format!(
                "gives {n} results, result {last} is used"
            )));
        }
        let home = self.frames.len() - 1;
        let mut values = Vec::new();
        for (out, name) in outs.into_iter().take(wanted).zip(&node.output) {
            values.push(match out {
                Out::Same(v) => v,
                Out::Contents(ty, known) => self.slot(Slot {
                    name,
                    ty: Some(ty),
                    known: Some(known),
                    home,
                }),
                Out::Value(id) => self.bind_value(name, id, foldable)?,
            });
        }
        Ok(values)
    }

    /// An IR value of the current frame, or its contents where constants alone determine them.
    fn bind_value(&mut self, name: &'m str, id: ValueId, foldable: bool) -> Result<V> {
        let home = self.frames.len() - 1;
        let ty = possible(self.b().ty(id).clone())?;
        let mut known = None;
        if foldable {
            let graph = self.frames[home].b.graph();
            known = fold::constant_value(graph, id, &mut self.folding)?.map(Contents::Tensor);
        }
        let is_known = known.is_some();
        let v = self.slot(Slot {
            name,
            ty: Some(ty),
            known,
            home,
        });
        if !is_known {
            self.frames[home].ids.insert(v, id);
        }
        Ok(v)
    }
}

/// Number of results up to the last that has a name.
fn n_wanted(node: &NodeProto) -> usize {
    let last = node.output.iter().rposition(|o| !o.is_empty());
    last.map_or(0, |i| i + 1)
}

fn unknown_operator(node: &NodeProto) -> Error {
    let op = &node.op_type;
    Error::unsupported(match domain(&node.domain) {
        "" => format!("operator {op} is not supported"),
        other => format!("operator {op} of domain {other:?} is not supported"),
    })
}

fn check_arity(def: &OpDef, n: usize) -> Result<()> {
    let (least, most) = def.inputs;
    if (least..=most).contains(&n) {
        return Ok(());
    }
    let most = match most {
        usize::MAX => "any number".to_owned(),
        most => most.to_string(),
    };
    let message = format!("takes {least} to {most} operands, got {n}");
    Err(Error::invalid(message))
}
