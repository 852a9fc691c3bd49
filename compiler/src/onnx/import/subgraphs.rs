//! Functions and subgraphs: calls, regions, and bodies that are imported in place.

use super::super::load::opsets_of;
use super::super::proto::{AttributeProto, FunctionProto, GraphProto, NodeProto};
use super::{Call, Frame, Importer, MAX_DEPTH, Region, Scope, Slot, V};
use crate::error::{Error, Result};
use crate::ir::{Type, ValueId};
use crate::passes;
use std::collections::HashMap;
use std::rc::Rc;

impl<'m> Importer<'m> {
    /// Opens the scope of a function, or, without a call, of a subgraph.
    fn enter(
        &mut self,
        names: HashMap<&'m str, V>,
        call: Option<Call<'m>>,
        path: &str,
    ) -> Result<()> {
        if self.depth == MAX_DEPTH {
            return Err(Error::unsupported(format!(
                "functions and subgraphs nest deeper than {MAX_DEPTH}"
            )));
        }
        let opsets = match &call {
            None => self.scope().opsets.clone(),
            Some(c) if c.function.opset_import.is_empty() => Rc::new(self.model.opsets.clone()),
            Some(c) => Rc::new(opsets_of(&c.function.opset_import)?),
        };
        self.depth += 1;
        self.scopes.push(Scope {
            names,
            call,
            opsets,
            path: format!("{path}/"),
        });
        Ok(())
    }

    /// Closes the innermost scope.
    fn leave(&mut self) {
        self.scopes.pop();
        self.depth -= 1;
    }

    /// Inlines a call of a function of the model.
    pub(super) fn call(
        &mut self,
        f: &'m FunctionProto,
        node: &'m NodeProto,
        inputs: Vec<Option<V>>,
        path: &str,
    ) -> Result<Vec<V>> {
        self.check_call(f, node)?;
        let attributes = self.call_attributes(f, node)?;
        let operands = f.input.iter().zip(&inputs);
        let names = operands.filter_map(|(n, v)| Some((n.as_str(), (*v)?)));
        let call = Call {
            function: f,
            attributes,
        };
        self.enter(names.collect(), Some(call), path)?;
        let n_errors = self.errors.len();
        self.nodes(&f.node);
        let mut results = Vec::new();
        for o in f.output.iter().take(node.output.len()) {
            let missing = || {
                let name = &f.name;
                Error::invalid(format!(
                    "function {name:?} does not define its result {o:?}"
                ))
            };
            results.push(self.lookup(o).ok_or_else(missing));
        }
        self.leave();
        self.b().set_origin(path);
        if self.errors.len() > n_errors {
            // The reason was reported inside; results are unknown from here on.
            return Ok(Vec::new());
        }
        results.into_iter().collect()
    }

    /// Errors when a function calls itself, or with more operands or results than it has.
    fn check_call(&self, f: &FunctionProto, node: &NodeProto) -> Result<()> {
        let name = &f.name;
        let calls = |s: &Scope| s.call.as_ref().is_some_and(|c| std::ptr::eq(c.function, f));
        if self.scopes.iter().any(calls) {
            return Err(Error::invalid(format!("function {name:?} calls itself")));
        }
        let (inputs, outputs) = (node.input.len(), node.output.len());
        let (most_inputs, most_outputs) = (f.input.len(), f.output.len());
        if inputs > most_inputs || outputs > most_outputs {
            return Err(Error::invalid(format!(
                "function {name:?} takes {most_inputs} operands and gives {most_outputs} results; the call has {inputs} and {outputs}"
            )));
        }
        Ok(())
    }

    /// Values of the function's attributes: those of the call, or their defaults.
    fn call_attributes(
        &self,
        f: &'m FunctionProto,
        node: &'m NodeProto,
    ) -> Result<HashMap<&'m str, &'m AttributeProto>> {
        let defaults = f.attribute_proto.iter();
        let mut attributes: HashMap<&str, &AttributeProto> =
            defaults.map(|a| (a.name.as_str(), a)).collect();
        for a in &node.attribute {
            let name = a.name.as_str();
            if !attributes.contains_key(name) && !f.attribute.contains(&a.name) {
                let message = format!("function {:?} has no attribute {name:?}", f.name);
                return Err(Error::invalid(message));
            }
            if let Some(given) = self.resolve_attribute(a) {
                attributes.insert(name, given);
            }
        }
        Ok(attributes)
    }

    /// The attribute itself, or the one that the call of the surrounding function gives for it;
    /// `None` when it gives none.
    pub(super) fn resolve_attribute(&self, a: &'m AttributeProto) -> Option<&'m AttributeProto> {
        if a.ref_attr_name.is_empty() {
            return Some(a);
        }
        let call = self.scopes.iter().rev().find_map(|s| s.call.as_ref())?;
        call.attributes.get(a.ref_attr_name.as_str()).copied()
    }

    /// Imports a subgraph as a region with the given formal inputs. `captures` are outer values it
    /// must take first.
    ///
    /// Errors inside the region are kept for the report like all others; the region is then without
    /// use.
    pub fn region(
        &mut self,
        g: &'m GraphProto,
        formals: &[Type],
        captures: &[V],
        path: &str,
    ) -> Result<Region> {
        check_inputs(g, formals.len())?;
        self.enter(HashMap::new(), None, path)?;
        let n_errors = self.errors.len();
        self.frames.push(Frame::new(&g.name));
        self.formals(g, formals);
        let captured: Result<Vec<ValueId>> =
            captures.iter().map(|&v| self.materialise(v)).collect();
        self.initialisers(g);
        self.nodes(&g.node);
        self.outputs(g);
        let frame = self.frames.pop().expect("pushed above");
        self.leave();
        self.b().set_origin(path);
        captured?;
        self.last_error_since(n_errors)?;
        Ok(Region {
            graph: passes::prune(&frame.b.into_graph())?,
            captures: frame.captures,
        })
    }

    /// Defines the inputs of a region.
    fn formals(&mut self, g: &'m GraphProto, types: &[Type]) {
        let home = self.frames.len() - 1;
        for (info, ty) in g.input.iter().zip(types) {
            let v = self.slot(Slot {
                name: &info.name,
                ty: Some(ty.clone()),
                known: None,
                home,
            });
            let dims = ty.shape.0.iter();
            let id = self.b().input(&info.name, ty.dtype, dims);
            self.frames[home].ids.insert(v, id);
            self.define(&info.name, v);
        }
    }

    /// Imports a subgraph into the current frame, its inputs being `args`; the values of its
    /// outputs.
    ///
    /// Errors inside are kept for the report as in [`Importer::region`].
    pub fn inline(&mut self, g: &'m GraphProto, args: &[V], path: &str) -> Result<Vec<V>> {
        check_inputs(g, args.len())?;
        self.enter(HashMap::new(), None, path)?;
        let n_errors = self.errors.len();
        for (info, &v) in g.input.iter().zip(args) {
            self.define(&info.name, v);
        }
        self.initialisers(g);
        self.nodes(&g.node);
        let mut outputs = Vec::new();
        for o in &g.output {
            outputs.push(self.lookup(&o.name).ok_or_else(|| {
                let (graph, name) = (&g.name, &o.name);
                Error::invalid(format!(
                    "subgraph {graph:?}: output {name:?} is not defined"
                ))
            }));
        }
        self.leave();
        self.b().set_origin(path);
        self.last_error_since(n_errors)?;
        outputs.into_iter().collect()
    }

    /// Takes the last error back from the report, if there are more than `n`.
    fn last_error_since(&mut self, n: usize) -> Result<()> {
        if self.errors.len() == n {
            return Ok(());
        }
        Err(self.errors.pop().expect("one more than before"))
    }

    /// Runs `f`; when it fails, all that it reported on the way is forgotten and its error is
    /// given.
    pub fn attempt<T>(&mut self, f: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        let (n_errors, needs) = (self.errors.len(), self.needs.clone());
        f(self).inspect_err(|_| {
            self.errors.truncate(n_errors);
            self.needs = needs;
        })
    }
}

fn check_inputs(g: &GraphProto, expected: usize) -> Result<()> {
    let (name, n) = (&g.name, g.input.len());
    if n == expected {
        return Ok(());
    }
    let message = format!("subgraph {name:?} has {n} inputs, expected {expected}");
    Err(Error::invalid(message))
}
