//! Decisions made once for all shapes of a model.

use crate::error::{Error, Result};
use crate::ir::{Bindings, Graph, Op, Type, symbols_of};
use crate::options::Options;
use crate::passes::{self, OpenRules};
use crate::pipeline::Config;
use crate::pipeline::{Fused, Lowered, OnOneDevice, Partitioned, fused_for};
use crate::session::Settings;
use std::collections::BTreeSet;
use std::sync::OnceLock;

/// The kernels of all shapes, if there are such.
pub(crate) enum AnyShape {
    /// Kernels over symbols.
    Fused(Box<Symbolic>),
    /// Shapes have no symbols, or depend on values of inputs.
    None,
    /// Kernels cannot be chosen without sizes, for this reason.
    Failed(String),
}

/// Kernels over symbols, and the inputs whose extents are the symbols.
pub(crate) struct Symbolic {
    /// A graph of inputs alone.
    inputs: Graph,
    /// Type rules contradicted by some sizes.
    rules: OpenRules,
    fused: Fused,
    on_one_device: OnceLock<Option<OnOneDevice>>,
}

impl AnyShape {
    /// Chooses kernels for all shapes of a graph, of whose inputs some are known.
    ///
    /// Errors when something failed. A graph refused without sizes gives [`AnyShape::Failed`].
    pub(crate) fn of(
        graph: Result<Graph>,
        shapes: &[Vec<usize>],
        config: Config,
    ) -> Result<AnyShape> {
        match graph.and_then(|graph| Symbolic::of(graph, shapes, config)) {
            Ok(symbolic) => Ok(AnyShape::Fused(Box::new(symbolic))),
            Err(e) if e.is_refusal() => Ok(AnyShape::Failed(e.to_string())),
            Err(e) => Err(e),
        }
    }

    /// The kernels for given shapes of the inputs, or the reason why there are none, where that is
    /// of interest.
    ///
    /// Errors when something failed. Sizes out of reach of those decisions give the reason.
    pub(crate) fn bind(
        &self,
        shapes: &[Vec<usize>],
        config: Config,
    ) -> Result<Result<Fused, Option<String>>> {
        match self {
            AnyShape::Fused(symbolic) => match symbolic.bind(shapes, config) {
                Ok(fused) => Ok(Ok(fused)),
                Err(e) if e.is_of_sizes() => Ok(Err(Some(e.to_string()))),
                Err(e) => Err(e),
            },
            AnyShape::None => Ok(Err(None)),
            AnyShape::Failed(why) => Ok(Err(Some(why.clone()))),
        }
    }

    /// The program of the only device for given shapes of the inputs. `None` where none was made for
    /// all shapes, or where these do not fit it.
    pub(crate) fn lower_on_one_device(
        &self,
        shapes: &[Vec<usize>],
        config: Config,
    ) -> Result<Option<Lowered>> {
        let AnyShape::Fused(symbolic) = self else {
            return Ok(None);
        };
        let Some(Some(on_one_device)) = symbolic.on_one_device.get() else {
            return Ok(None);
        };
        let lowered = symbolic.sizes(shapes);
        let lowered = lowered.and_then(|s| on_one_device.lower(&symbolic.fused, &s, config));
        match lowered {
            Ok(lowered) => Ok(Some(lowered)),
            Err(e) if e.is_of_sizes() => Ok(None),
            Err(e) => Err(e),
        }
    }

    /// Makes the graph of the only device for all shapes, from the decisions for the first ones.
    pub(crate) fn put_on_one_device(&self, first: &Partitioned, config: Config) -> Result<()> {
        let AnyShape::Fused(symbolic) = self else {
            return Ok(());
        };
        if symbolic.on_one_device.get().is_none() {
            let made = OnOneDevice::of(&symbolic.fused, first, config)?;
            // Another caller may have made the same.
            let _ = symbolic.on_one_device.set(made);
        }
        Ok(())
    }
}

/// The work for a further set of shapes, for `check`.
pub struct ShapeWork {
    /// The dims of any size.
    pub symbols: Vec<String>,
    /// Why each set of shapes goes all the way by itself; `None` where kernels are chosen once.
    pub reason: Option<String>,
}

impl ShapeWork {
    /// The work for a graph with inputs of these types; `None` where all are constant.
    pub fn of(inputs: &[(String, Type)], graph: Result<Graph>) -> Option<ShapeWork> {
        let config = Config {
            settings: &Settings::default(),
            options: &Options::default(),
        };
        let mut symbols = symbols_of(inputs.iter().map(|(_, ty)| ty));
        let reason = match graph {
            Ok(g) if passes::has_run_time_extents(&g) => why_parts_anew(&g, config, &mut symbols),
            _ if symbols.is_empty() => return None,
            graph => why_anew(graph, config),
        };
        Some(ShapeWork {
            symbols: symbols.into_iter().collect(),
            reason,
        })
    }
}

/// The reason why each set of shapes of a segment goes all the way by itself; adds the symbols of
/// all segments.
fn why_parts_anew(g: &Graph, config: Config, symbols: &mut BTreeSet<String>) -> Option<String> {
    let host = match passes::cut(g) {
        Ok(host) => host,
        Err(e) => return Some(e.to_string()),
    };
    let parts = passes::segments(&host);
    parts.iter().for_each(|part| symbols.extend(part.symbols()));
    let mut parts = parts.into_iter();
    parts.find_map(|part| why_anew(Ok(part.clone()), config))
}

/// The reason why each set of shapes of a graph goes all the way by itself.
fn why_anew(graph: Result<Graph>, config: Config) -> Option<String> {
    match AnyShape::of(graph, &[], config) {
        Ok(AnyShape::Failed(why)) => Some(why),
        Ok(AnyShape::Fused(_) | AnyShape::None) => None,
        Err(e) => Some(e.to_string()),
    }
}

impl Symbolic {
    fn of(graph: Graph, shapes: &[Vec<usize>], config: Config) -> Result<Symbolic> {
        if has_sums(&graph) {
            let why = "how devices exchange operands of an all_reduce depends on their sizes";
            return Err(Error::unsupported(why));
        }
        let first = graph.bindings_for(shapes).unwrap_or_default();
        Ok(Symbolic {
            inputs: inputs_of(&graph),
            rules: OpenRules::of(&graph),
            fused: fused_for(graph, &first, config)?,
            on_one_device: OnceLock::new(),
        })
    }

    /// Sizes of the symbols. Errors, as one of sizes, when these contradict a type rule.
    fn sizes(&self, shapes: &[Vec<usize>]) -> Result<Bindings> {
        let sizes = self.inputs.bindings_for(shapes)?;
        self.rules.check(&sizes).map_err(Error::of_sizes)?;
        Ok(sizes)
    }

    fn bind(&self, shapes: &[Vec<usize>], config: Config) -> Result<Fused> {
        let sizes = self.sizes(shapes)?;
        self.fused.bind(&sizes, config).map_err(Error::of_sizes)
    }
}

/// True when devices add up operands: how they exchange these depends on sizes.
fn has_sums(graph: &Graph) -> bool {
    let mut nodes = graph.nodes();
    nodes.any(|(_, node)| matches!(node.op, Op::AllReduce { .. }))
}

fn inputs_of(graph: &Graph) -> Graph {
    let mut inputs = graph.emptied();
    for (&v, name) in graph.inputs.iter().zip(&graph.input_names) {
        inputs.add_input(name, graph.ty(v).clone());
    }
    inputs
}
