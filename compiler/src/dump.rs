//! Texts of the stages of compilation, for snapshot tests of models.
//!
//! A text shows when an update of gristmill, or of the model, changes the graph, the fusion of its nodes or their devices:
//!
//! ```
//! use gristmill::dump::{self, Stage};
//! use gristmill::ir::{Dim, GraphBuilder, ScalarOp};
//! use gristmill::{DType, Options, TargetCpu};
//!
//! # fn main() -> gristmill::Result<()> {
//! let mut b = GraphBuilder::new("layer");
//! b.set_origin("/layer");
//! let x = b.input("x", DType::F32, [Dim::from("batch"), 4.into()]);
//! let y = b.map(ScalarOp::Neg, &[x])?;
//! let y = b.map(ScalarOp::Relu, &[y])?;
//! b.output("y", y);
//!
//! let options = Options {
//!     dims: [("batch".to_owned(), 8)].into(),
//!     target_cpu: TargetCpu::parse("x86-64-v3")?,
//!     ..Options::default()
//! };
//! let text = dump::text(&b.finish()?, &options, Stage::Clusters)?;
//! // With the crate insta: `insta::assert_snapshot!(text)`.
//! assert_eq!(
//!     text,
//!     r#"graph "layer" {
//!   %0 = input "x": f32[8, 4]
//!   %1: f32[8, 4] = cluster(%0) {kind = map, anchor = 1, root = 1} (graph "body" {
//!     %0 = input "a0": f32[8, 4]
//!     %1: f32[8, 4] = neg(%0) @ "/layer"
//!     %2: f32[8, 4] = relu(%1) @ "/layer"
//!     output "r0" %2
//!   }) @ "/layer"
//!   output "y" %1
//! }
//! "#
//! );
//! # Ok(())
//! # }
//! ```

pub use crate::pipeline::Stage;

use crate::compiled::{Compiled, InputShapes, Source};
use crate::error::{Error, Result};
use crate::options::Options;
use crate::session::{Session, Settings};
use std::collections::BTreeMap;

/// The text of a stage. No tensor is given: shapes suffice, with each open dim at the greatest size of its range in [`Options::ranges`].
///
/// The text depends on the model, the options and the version of gristmill. Constants of more than 16 elements are shown by their checksums; there
/// are no times of this machine and no paths of files but those of nodes: a graph that is built in Rust names file and line of its calls, unless
/// [`GraphBuilder::set_origin`](crate::ir::GraphBuilder::set_origin) says otherwise. It does not depend on the number of cores:
/// [`Settings::threads`] is 1 here by default, and stages before [`Stage::Schedule`] are the same with any number. With [`Options::target_cpu`] other than the
/// default, it does not depend on the CPU either; texts of generated code (`schedule`, `clif`, `asm`) can then be had on machines that run such code.
///
/// Errors with `InvalidInput` where a dim has no size, except for [`Stage::Graph`], or the value of an input decides shapes; otherwise as [`crate::compile`].
pub fn text(model: impl Into<Source>, options: &Options, stage: Stage) -> Result<String> {
    Session::new(&Settings::default())?.text(model, options, stage)
}

impl Session {
    /// [`text`] for the devices of the session.
    pub fn text(
        &self,
        model: impl Into<Source>,
        options: &Options,
        stage: Stage,
    ) -> Result<String> {
        let options = Options {
            keep_stages: true,
            ..options.clone()
        };
        let compiled = Session::new(&portable(self.settings()))?.prepare(model, &options)?;
        compiled.text(stage, false, &shapes)
    }
}

/// The settings without facts about this machine.
fn portable(settings: &Settings) -> Settings {
    Settings {
        threads: settings.threads.or(Some(1)),
        ..settings.clone()
    }
}

fn shapes(compiled: &Compiled) -> Result<InputShapes> {
    if let Some(name) = compiled.value_inputs().first() {
        let message =
            format!("the value of input {name:?} decides shapes: there is no text of all");
        return Err(Error::invalid(message));
    }
    let shapes = (0..compiled.inputs().len()).map(|i| shape(compiled, i));
    Ok(InputShapes {
        shapes: shapes.collect::<Result<_>>()?,
        values: BTreeMap::new(),
    })
}

fn shape(compiled: &Compiled, input: usize) -> Result<Vec<usize>> {
    compiled.declared_shape(input).map_err(|open| {
        let (name, ty) = &compiled.inputs()[input];
        let open = open.join(", ");
        let message = format!("input {name:?} has type {ty}: there is no size for {open}");
        Error::invalid(message).hint("Options::dims or Options::ranges")
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cost::DeviceProfile;
    use crate::ir::Graph;

    fn symbolic() -> Graph {
        let text = "graph \"g\" {\n%0 = input \"x\": f32[batch, 64]\n%1 = input \"w\": f32[64, 32]\n\
                    %2: f32[batch, 32] = matmul(%0, %1) @ \"/fc\"\n%3: f32[batch, 32] = relu(%2) @ \"/relu\"\noutput \"y\" %3\n}\n";
        Graph::parse(text).unwrap()
    }

    fn options(batch: usize) -> Options {
        Options {
            dims: [("batch".to_owned(), batch)].into(),
            ..Options::default()
        }
    }

    #[test]
    fn rates_that_are_assumed_follow_the_target_and_others_stay() {
        let mut settings = Settings::default();
        let rate = |settings: &Settings, options: &Options| {
            let session = Session::new(settings).unwrap();
            let prepared = session.prepare(&symbolic(), options).unwrap();
            prepared.config().settings.devices.devices[0]
                .profile
                .flops_f32
        };
        let mut options = options(8);
        for (name, lanes) in [("x86-64-v2", 4.0), ("x86-64-v3", 8.0), ("x86-64-v4", 16.0)] {
            options.target_cpu = crate::TargetCpu::parse(name).unwrap();
            let one = DeviceProfile::cpu(gristmill_kernels::Isa::Portable, 1).flops_f32;
            assert_eq!(rate(&settings, &options), one * lanes / 4.0);
        }
        settings.devices.devices[0].profile.flops_f32 = 1e9;
        assert_eq!(rate(&settings, &options), 1e9);
    }

    #[test]
    fn dims_without_a_size_are_named() {
        let e = text(&symbolic(), &Options::default(), Stage::Clusters).unwrap_err();
        let expected = "input \"x\" has type f32[batch, 64]: there is no size for batch (try: Options::dims or Options::ranges)";
        assert_eq!(e.to_string(), expected);
        let graph = text(&symbolic(), &Options::default(), Stage::Graph).unwrap();
        assert!(graph.contains("f32[batch, 32] = relu"), "{graph}");
    }

    #[test]
    fn threads_do_not_show_before_schedules() {
        let of = |threads: Option<usize>, stage| {
            let settings = Settings {
                threads,
                ..Settings::default()
            };
            let session = Session::new(&settings).unwrap();
            session.text(&symbolic(), &options(1 << 14), stage).unwrap()
        };
        for &stage in Stage::ALL.iter().filter(|s| **s < Stage::Schedule) {
            let one = of(None, stage);
            assert!(one.contains("/relu") || one.contains("/fc"), "{one}");
            assert_eq!(one, of(Some(2), stage), "{}", stage.name());
            assert_eq!(one, of(Some(7), stage), "{}", stage.name());
        }
        assert_eq!(of(None, Stage::Schedule), of(Some(1), Stage::Schedule));
    }
}
