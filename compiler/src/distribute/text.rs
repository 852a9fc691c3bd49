//! Programs and parts as text: JSON around the text form of graphs, with large constants beside it.

use super::constants::{Digests, Writer};
use crate::codegen::assemble::Interface;
use crate::error::{Error, Result};
use crate::ir::{Graph, NodeId, Type};
use crate::options::{ConvAlgorithm, Options, Precision};
use crate::partition::Part;
use crate::place::Fallback;
use gristmill_remote::Document;
use gristmill_runtime::DType;
use gristmill_runtime::device::DeviceName;
use gristmill_runtime::program::IoSpec;
use serde::{Deserialize, Serialize};

/// The name of a format, to be sure of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum Format {
    #[serde(rename = "gristmill/program/1")]
    Program,
    #[serde(rename = "gristmill/part/1")]
    Part,
}

/// Options that a client gives its programs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Wishes {
    opt_level: u8,
    /// Name of a [`Fallback`].
    fallback: String,
    precision: String,
    direct_convolutions: bool,
    updates_in_place: bool,
}

const FALLBACKS: [(&str, Fallback); 3] = [
    ("error", Fallback::Error),
    ("warn", Fallback::Warn),
    ("allow", Fallback::Allow),
];

impl Wishes {
    pub(super) fn of(options: &Options) -> Wishes {
        let fallback = FALLBACKS.iter().find(|(_, f)| *f == options.fallback);
        Wishes {
            opt_level: options.opt_level,
            fallback: fallback.map_or("error", |(name, _)| name).to_owned(),
            precision: options.precision.to_string(),
            direct_convolutions: options.conv == ConvAlgorithm::Direct,
            updates_in_place: options.updates_in_place,
        }
    }

    /// Errors on a name that is not one of ours.
    pub(super) fn options(&self) -> Result<Options> {
        let unknown =
            |what: &str, name: &str| Error::invalid(format!("there is no {what} {name:?}"));
        let fallback = FALLBACKS.iter().find(|(name, _)| *name == self.fallback);
        let precisions = Precision::NAMES;
        let precision = precisions.iter().find(|(name, _)| *name == self.precision);
        Ok(Options {
            opt_level: self.opt_level.min(3),
            fallback: fallback
                .ok_or_else(|| unknown("fallback", &self.fallback))?
                .1,
            precision: precision
                .ok_or_else(|| unknown("precision", &self.precision))?
                .1,
            conv: match self.direct_convolutions {
                true => ConvAlgorithm::Direct,
                false => ConvAlgorithm::Auto,
            },
            updates_in_place: self.updates_in_place,
            ..Options::default()
        })
    }
}

/// A client's program: a graph whose nodes ask for devices.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ProgramText {
    format: Format,
    pub(super) wishes: Wishes,
    graph: String,
}

impl ProgramText {
    pub(super) fn document(graph: &Graph, options: &Options, known: &Digests) -> Result<Document> {
        known.document(|writer| {
            written(&ProgramText {
                format: Format::Program,
                wishes: Wishes::of(options),
                graph: writer.text(graph),
            })
        })
    }

    pub(super) fn parse(program: &Document, known: &Digests) -> Result<(Graph, Wishes)> {
        let text: ProgramText = parsed(program.text())?;
        check(text.format, Format::Program)?;
        Ok((known.graph(&text.graph, program)?, text.wishes))
    }
}

/// A task's share of a program: the graphs of its devices, with the task's names of these.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct PartText {
    format: Format,
    wishes: Wishes,
    name: String,
    inputs: Vec<IoText>,
    outputs: Vec<IoText>,
    parts: Vec<DeviceText>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct IoText {
    name: String,
    dtype: String,
    shape: Vec<usize>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct DeviceText {
    device: String,
    inputs: Vec<u32>,
    outputs: Vec<u32>,
    updates_in_place: bool,
    graph: String,
}

impl PartText {
    pub(super) fn document(
        interface: &Interface,
        parts: &[Part],
        wishes: &Wishes,
        known: &Digests,
    ) -> Result<Document> {
        known.document(|writer| written(&PartText::of(interface, parts, wishes, writer)))
    }

    fn of(interface: &Interface, parts: &[Part], wishes: &Wishes, writer: &Writer<'_>) -> PartText {
        let io = |spec: &IoSpec| IoText {
            name: spec.name.clone(),
            dtype: spec.dtype.name().to_owned(),
            shape: spec.shape.clone(),
        };
        let device = |part: &Part| DeviceText {
            device: part.device.to_string(),
            inputs: part.inputs.clone(),
            outputs: part.outputs.clone(),
            updates_in_place: part.updates_in_place,
            graph: writer.text(&part.graph),
        };
        PartText {
            format: Format::Part,
            wishes: wishes.clone(),
            name: interface.name.clone(),
            inputs: interface.inputs.iter().map(io).collect(),
            outputs: interface.outputs.iter().map(io).collect(),
            parts: parts.iter().map(device).collect(),
        }
    }

    pub(super) fn parse(
        part: &Document,
        known: &Digests,
    ) -> Result<(Interface, Vec<Part>, Options)> {
        let text: PartText = parsed(part.text())?;
        check(text.format, Format::Part)?;
        let io = |io: &IoText| {
            let dtype = DType::parse(&io.dtype);
            let dtype = dtype.ok_or_else(|| Error::invalid(format!("dtype {:?}", io.dtype)))?;
            Ok(IoSpec::new(&io.name, dtype, &io.shape))
        };
        let interface = Interface {
            name: text.name.clone(),
            inputs: text.inputs.iter().map(io).collect::<Result<_>>()?,
            outputs: text.outputs.iter().map(io).collect::<Result<_>>()?,
        };
        let outputs = text.parts.iter().flat_map(|device| &device.outputs);
        let mut outputs: Vec<u32> = outputs.copied().collect();
        outputs.sort_unstable();
        if !outputs.into_iter().eq(0..interface.outputs.len() as u32) {
            let message = "outputs of a part are without a device, or have several";
            return Err(Error::invalid(message));
        }
        let devices = text.parts.iter();
        let parts = devices.map(|device| {
            let graph = known.graph(&device.graph, part)?;
            device.part(graph, &interface)
        });
        let parts = parts.collect::<Result<_>>()?;
        Ok((interface, parts, text.wishes.options()?))
    }
}

impl DeviceText {
    /// Errors unless inputs and outputs are those of the interface.
    fn part(&self, graph: Graph, interface: &Interface) -> Result<Part> {
        let device = DeviceName::parse(&self.device)?;
        if !device.is_local() {
            let message = format!("{device} is a device of another task");
            return Err(Error::invalid(message));
        }
        let inputs = graph.inputs.iter().map(|v| graph.ty(*v));
        let results = graph.outputs.iter().map(|o| graph.ty(o.value));
        let fit = fits(&self.inputs, &interface.inputs, inputs.collect())
            && fits(&self.outputs, &interface.outputs, results.collect());
        if !fit {
            let message = format!("inputs or outputs of {device} are not those of its task");
            return Err(Error::invalid(message));
        }
        Ok(Part {
            device,
            inputs: self.inputs.clone(),
            outputs: self.outputs.clone(),
            nodes: (0..graph.n_nodes() as u32)
                .map(|i| Some(NodeId(i)))
                .collect(),
            updates_in_place: self.updates_in_place,
            graph,
        })
    }
}

/// True if some of the inputs or outputs of a task have the types of a device's.
fn fits(numbers: &[u32], specs: &[IoSpec], types: Vec<&Type>) -> bool {
    let fits = |(n, ty): (&u32, &&Type)| {
        let same = |s: &IoSpec| s.dtype == ty.dtype && ty.static_shape().as_ref() == Some(&s.shape);
        specs.get(*n as usize).is_some_and(same)
    };
    numbers.len() == types.len() && numbers.iter().zip(&types).all(fits)
}

/// JSON of a value of ours.
fn written(value: &impl Serialize) -> Result<String> {
    serde_json::to_string(value).map_err(|e| Error::internal(e.to_string()))
}

fn parsed<'t, T: Deserialize<'t>>(text: &'t str) -> Result<T> {
    serde_json::from_str(text).map_err(|e| Error::invalid(format!("text of another task: {e}")))
}

fn check(found: Format, expected: Format) -> Result<()> {
    match found == expected {
        true => Ok(()),
        false => Err(Error::invalid(format!(
            "expected {expected:?}, found {found:?}"
        ))),
    }
}
