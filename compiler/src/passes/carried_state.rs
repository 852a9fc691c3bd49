//! Inputs that take what an output gave in the run before.

use super::Rebuild;
use crate::error::{Error, Result};
use crate::ir::{Bindings, Graph, Op, Origin};
use crate::nearest::unknown;
use gristmill_runtime::Tensor;

/// An input and an output that become a variable, by number.
struct Kept<'p> {
    input: usize,
    output: usize,
    name: &'p str,
}

/// Makes pairs of an input and an output variables of the input's name, zero at first: the next run takes as the input the output of
/// this one.
///
/// Errors with a name that is unknown or given twice, and with types that differ or have symbols other than `dims`.
pub fn keep(g: &Graph, pairs: &[(String, String)], dims: &Bindings) -> Result<Graph> {
    let kept = kept(g, pairs)?;
    let mut r = Rebuild::onto(g, g.emptied());
    for k in &kept {
        let read = r.graph.add1(k.read(g, dims)?, &[], &Origin::new(k.name))?;
        r.set(g.inputs[k.input], read);
    }
    for (i, (&v, name)) in g.inputs.iter().zip(&g.input_names).enumerate() {
        if kept.iter().all(|k| k.input != i) {
            let input = r.graph.add_input(name, g.ty(v).clone());
            r.set(v, input);
        }
    }
    for (id, node) in g.nodes() {
        r.copy(id, node)?;
    }
    for (i, output) in g.outputs.iter().enumerate() {
        let value = r.get(output.value);
        match kept.iter().find(|k| k.output == i) {
            Some(k) => {
                let origin = Origin::new(&output.name);
                r.graph.add1(k.assignment(), &[value], &origin)?;
            }
            None => r.graph.add_output(&output.name, value),
        }
    }
    Ok(r.graph)
}

fn kept<'p>(g: &Graph, pairs: &'p [(String, String)]) -> Result<Vec<Kept<'p>>> {
    let mut kept: Vec<Kept> = Vec::new();
    for (input, output) in pairs {
        let new = Kept::of(g, input, output)?;
        let is_new = |k: &Kept| k.input != new.input && k.output != new.output;
        if !kept.iter().all(is_new) {
            let message = format!("{input}={output}: each is kept once");
            return Err(Error::invalid(message));
        }
        kept.push(new);
    }
    Ok(kept)
}

/// Errors with the name of a variable that the graph has.
fn check_free(g: &Graph, name: &str) -> Result<()> {
    let own = (String::new(), name.to_owned());
    match g.variables().contains_key(&own) {
        true => Err(Error::invalid(format!(
            "input {name:?}: the graph has a variable of that name"
        ))),
        false => Ok(()),
    }
}

fn number<'n>(
    what: &str,
    name: &str,
    known: impl Iterator<Item = &'n str> + Clone,
) -> Result<usize> {
    let found = known.clone().position(|known| known == name);
    found.ok_or_else(|| Error::invalid(unknown(what, name, known)))
}

impl<'p> Kept<'p> {
    fn of(g: &Graph, name: &'p str, output: &str) -> Result<Kept<'p>> {
        check_free(g, name)?;
        let inputs = g.input_names.iter().map(String::as_str);
        let outputs = g.outputs.iter().map(|o| o.name.as_str());
        let (i, o) = (
            number("input", name, inputs)?,
            number("output", output, outputs)?,
        );
        let (ty, result) = (g.ty(g.inputs[i]), g.ty(g.outputs[o].value));
        if ty != result {
            return Err(Error::invalid(format!(
                "input {name:?} is {ty}, output {output:?} is {result}: what is kept has one type"
            )));
        }
        Ok(Kept {
            input: i,
            output: o,
            name,
        })
    }

    /// The variable in the place of the input.
    fn read(&self, g: &Graph, dims: &Bindings) -> Result<Op> {
        let ty = g.ty(g.inputs[self.input]);
        let extents = ty.shape.iter().map(|d| d.bind(dims).as_usize());
        let extents: Option<Vec<usize>> = extents.collect();
        let extents = extents.ok_or_else(|| {
            let message = format!(
                "input {:?} is {ty}: what is kept has known sizes",
                self.name
            );
            Error::invalid(message).hint("--set gives symbols a size")
        })?;
        Ok(Op::ReadVariable {
            container: String::new(),
            name: self.name.to_owned(),
            dtype: ty.dtype,
            shape: ty.shape.0.clone(),
            initial: Some(Tensor::zeros(ty.dtype, &extents)?.into()),
        })
    }

    fn assignment(&self) -> Op {
        Op::AssignVariable {
            container: String::new(),
            name: self.name.to_owned(),
        }
    }
}
