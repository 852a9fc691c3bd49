//! Models and graphs, to be compiled.

use crate::error::{Error, Result};
use crate::ir::{Bindings, Graph};
use crate::onnx;
use crate::passes;
use std::sync::Arc;

/// A model or a graph, to be compiled.
#[derive(Clone)]
pub enum Source {
    /// An ONNX model.
    Onnx(Arc<onnx::Model>),
    /// A graph built in Rust or read from its text form.
    Graph(Arc<Graph>),
}

impl Source {
    /// The same with state: each pair of an input and an output becomes a variable of the input's name, zero at first, whose next value is the
    /// output. So the cache of a decoder, which takes it and gives it back, stays where it is; see [`guide::state`](crate::guide::state).
    /// Both must have one type; symbols in it have the sizes of `dims`, as [`Options::dims`](crate::Options::dims) gives them.
    pub fn keeping(&self, pairs: &[(String, String)], dims: &Bindings) -> Result<Source> {
        if pairs.is_empty() {
            return Ok(self.clone());
        }
        let graph = match self {
            Source::Graph(g) => g.as_ref().clone(),
            Source::Onnx(model) => {
                let spec = onnx::Specialisation::default();
                if let Some(warning) = model.left_open(&spec)?.warnings.first() {
                    let message = format!("state with nodes in their form for training: {warning}");
                    return Err(Error::unsupported(message));
                }
                model.graph(&spec)?
            }
        };
        Ok(Source::Graph(Arc::new(passes::keep(&graph, pairs, dims)?)))
    }
}

impl Source {
    /// The same with its variables in a container: see [`Options::container`](crate::Options::container).
    ///
    /// Errors when a graph uses a variable with types or initial values that contradict each other.
    pub(crate) fn in_container(mut self, container: &str) -> Result<Source> {
        if let Source::Graph(g) = &mut self
            && g.has_state()
        {
            if !container.is_empty() {
                Arc::make_mut(g).set_container(container);
            }
            g.check_state()?;
        }
        Ok(self)
    }
}

impl From<&onnx::Model> for Source {
    fn from(m: &onnx::Model) -> Source {
        Source::Onnx(Arc::new(m.clone()))
    }
}

impl From<Arc<onnx::Model>> for Source {
    fn from(m: Arc<onnx::Model>) -> Source {
        Source::Onnx(m)
    }
}

impl From<&Graph> for Source {
    fn from(g: &Graph) -> Source {
        Source::Graph(Arc::new(g.clone()))
    }
}
