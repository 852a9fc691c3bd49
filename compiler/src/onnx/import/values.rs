//! Values of the model as constants and as IR values.

use super::super::tensor::{constant_of, tensor_of};
use super::symbolic::symbolic_tensor;
use super::{Contents, FOLD_LIMIT_BYTES, Importer, V, Weights};
use crate::error::{Error, Result};
use crate::ir::{Def, Graph, Op, Type, ValueId};
use gristmill_runtime::Tensor;
use std::collections::BTreeSet;

impl Importer<'_> {
    /// The constant that a value is, decoded; `None` when it is not known or contains symbols.
    pub fn constant(&mut self, v: V) -> Result<Option<Tensor>> {
        let slot = &mut self.slots[v.0 as usize];
        match &slot.known {
            Some(Contents::Tensor(t)) => Ok(Some(t.clone())),
            Some(Contents::Proto(p)) => {
                let t = tensor_of(p, &self.model.external)?;
                slot.known = Some(Contents::Tensor(t.clone()));
                Ok(Some(t))
            }
            _ => Ok(None),
        }
    }

    /// The IR value of a value in the current frame.
    pub fn materialise(&mut self, v: V) -> Result<ValueId> {
        self.materialise_in(v, self.frames.len() - 1)
    }

    pub(super) fn materialise_in(&mut self, v: V, frame: usize) -> Result<ValueId> {
        if let Some(&id) = self.frames[frame].ids.get(&v) {
            return Ok(id);
        }
        let id = match self.skipped(v) {
            Some(ty) if frame == 0 => {
                let name = format!("\0weight {}", v.0);
                self.frames[0].b.input(&name, ty.dtype, ty.shape.0)
            }
            Some(_) => self.capture(v, frame)?,
            None => self.made_in(v, frame)?,
        };
        self.frames[frame].ids.insert(v, id);
        Ok(id)
    }

    /// An IR value for contents that are known, or for a value of an outer frame.
    fn made_in(&mut self, v: V, frame: usize) -> Result<ValueId> {
        let slot = &self.slots[v.0 as usize];
        let (name, home) = (slot.name, slot.home);
        match &slot.known {
            Some(Contents::Proto(p)) => {
                let value = constant_of(p, &self.model.external)?;
                Ok(self.frames[frame].b.constant(value))
            }
            Some(Contents::Tensor(t)) => {
                let t = t.clone();
                Ok(self.frames[frame].b.constant(t))
            }
            Some(Contents::Dims(dims)) => {
                let (dims, ty) = (dims.clone(), self.ty(v)?.clone());
                let known = self.symbol_values(&dims, frame)?;
                symbolic_tensor(&mut self.frames[frame].b, &dims, &ty, &known)
                    .map_err(|e| e.context(format!("{name:?}")))
            }
            Some(known @ (Contents::List(_) | Contents::Absent)) => Err(known.not_a_tensor(name)),
            None if frame > home => self.capture(v, frame),
            None => Err(Error::internal(format!("value {name:?} has no IR value"))),
        }
    }

    /// Makes a value of the outer frame an input of a region.
    fn capture(&mut self, v: V, frame: usize) -> Result<ValueId> {
        self.materialise_in(v, frame - 1)?;
        let ty = self.ty(v)?.clone();
        let f = &mut self.frames[frame];
        f.captures.push(v);
        let n = f.captures.len() - 1;
        Ok(f.b.input(&format!("outer_{n}"), ty.dtype, ty.shape.0))
    }

    /// Type of a large initialiser that is not to be read.
    fn skipped(&self, v: V) -> Option<Type> {
        let slot = &self.slots[v.0 as usize];
        let unread =
            self.weights == Weights::Skip && matches!(slot.known, Some(Contents::Proto(_)));
        let ty = slot.ty.as_ref().filter(|_| unread)?;
        let is_large = ty.size_bytes().is_some_and(|b| b > FOLD_LIMIT_BYTES);
        is_large.then(|| ty.clone())
    }

    /// True for an input of floats that are data: code for each of their values would never be used
    /// again.
    fn is_data(&self, input: &str) -> bool {
        let graph = self.frames[0].b.graph();
        let named = graph.input_names.iter().zip(&graph.inputs);
        let found = named
            .filter(|(name, _)| *name == input)
            .map(|(_, &v)| graph.ty(v));
        let is_small = |ty: &Type| {
            ty.shape
                .n_elements()
                .as_usize()
                .is_some_and(|n| n <= MAX_REALS)
        };
        found
            .into_iter()
            .any(|ty| ty.dtype.is_float() && !is_small(ty))
    }

    /// Names the graph inputs and variables that a value is computed from, as needing a value, in
    /// the error and for the report.
    pub fn needs_value(&mut self, v: V, part: &str) -> Error {
        let mut inputs = BTreeSet::new();
        // The innermost frame that has the value decides: only the main graph has inputs of the
        // model.
        let inner = self.frames[1..].iter().any(|f| f.ids.contains_key(&v));
        let id = self.frames[0].ids.get(&v).filter(|_| !inner);
        if let Some(&id) = id {
            inputs_of(self.frames[0].b.graph(), id, &mut inputs);
        }
        let name = self.slots[v.0 as usize].name;
        if inputs.is_empty() {
            return Error::unsupported(format!(
                "{part} {name:?} must be known when the model is compiled"
            ));
        }
        let list: Vec<String> = inputs.iter().map(|n| format!("{n:?}")).collect();
        let list = list.join(", ");
        if let Some(data) = inputs.iter().find(|name| self.is_data(name)) {
            let message = format!("{part} {name:?} depends on the contents of {data:?}");
            return Error::unsupported(format!("{message}, which are no sizes but data"));
        }
        self.needs.extend(inputs);
        Error::unsupported(format!(
            "{part} {name:?} depends on the values of the inputs {list}"
        ))
        .hint("give the values of these inputs when compiling")
        .of_values()
    }
}

/// Elements of the largest input of floats whose contents may decide shapes, such as scales.
const MAX_REALS: usize = 16;

/// Inputs and variables that a value is computed from.
fn inputs_of(g: &Graph, id: ValueId, inputs: &mut BTreeSet<String>) {
    let mut seen = BTreeSet::new();
    let mut open = vec![id];
    while let Some(id) = open.pop() {
        if !seen.insert(id) {
            continue;
        }
        match g.value(id).def {
            Def::Input(i) if g.input_names[i as usize].starts_with('\0') => {}
            Def::Input(i) => inputs.extend([g.input_names[i as usize].clone()]),
            Def::Node(n, _) => {
                let node = g.node(n);
                if let Op::ReadVariable { name, .. } = &node.op {
                    inputs.insert(name.clone());
                }
                open.extend(&node.inputs);
            }
        }
    }
}
