//! The stages whose text can be dumped, as one table.

use super::Lowered;
use crate::codegen::cuda::{self, nvrtc};
use crate::error::{Error, Result};
use crate::ir::print::PrintOptions;
use crate::ir::{Graph, Op};
use crate::partition;
use crate::partition::Part;
use crate::schedule::Schedule;
use gristmill_runtime::DeviceName;
use gristmill_runtime::device::DeviceKind;
use gristmill_runtime::gpu::GpuCode;

/// The text of a stage.
type Text = fn(&Lowered, PrintOptions) -> Result<String>;

/// Origin of the text.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Maker {
    /// Compilation, on its way.
    Compilation,
    /// A compiler or disassembler of its own, which runs when the stage is asked for by name.
    Tool,
}

macro_rules! stages {
    ($($(#[doc = $doc:literal])* $stage:ident $name:literal $maker:ident $text:expr;)*) => {
        /// A stage whose text can be dumped.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
        pub enum Stage {
            $($(#[doc = $doc])* $stage),*
        }

        impl Stage {
            /// All stages in order.
            pub const ALL: &'static [Stage] = &[$(Stage::$stage),*];

            /// Name on the command line.
            pub fn name(self) -> &'static str {
                match self { $(Stage::$stage => $name),* }
            }

            /// Description in one line.
            pub fn doc(self) -> &'static str {
                match self { $(Stage::$stage => concat!($($doc),*).trim_ascii()),* }
            }

            fn maker(self) -> Maker {
                match self { $(Stage::$stage => Maker::$maker),* }
            }

            fn text(self) -> Text {
                match self { $(Stage::$stage => $text),* }
            }
        }
    };
}

stages! {
    /// the imported graph, constants folded
    Graph "graph" Compilation |l, print| Ok(l.graph.to_text(print));
    /// the parts that are compiled one by one, where a run decides extents
    Segments "segments" Compilation |l, print| Ok(l.graph.to_text(print));
    /// after equality saturation
    Rewritten "rewritten" Compilation |l, print| Ok(l.rewritten.to_text(print));
    /// one node per kernel
    Clusters "clusters" Compilation |l, print| Ok(l.clusters.to_text(print));
    /// device of each cluster, and why
    Placed "placed" Compilation |l, _| Ok(l.placement.to_text(&l.clusters));
    /// one graph per device, with send and recv
    Partitions "partitions" Compilation |l, print| Ok(partition::to_text(&l.partitions, print));
    /// order, dependencies and arena offsets
    Schedule "schedule" Compilation |l, _| Ok(l.schedule_text());
    /// Cranelift IR of the generated kernels
    Clif "clif" Compilation |l, _| Ok(l.clif.clone());
    /// disassembly of the generated kernels
    Asm "asm" Compilation |l, _| Ok(l.asm.clone());
    /// CUDA C++ that the clusters would be on a GPU
    Cuda "cuda" Compilation |l, _| l.cuda_text();
    /// PTX of the same, compiled by NVRTC
    Ptx "ptx" Tool |l, _| l.compiled_cuda(|_, code| Ok(code.ptx.clone()));
    /// disassembly of the same, by nvdisasm
    Sass "sass" Tool |l, _| l.compiled_cuda(|nvrtc, code| cuda::disassemble(nvrtc, &code.cubin));
}

impl Stage {
    /// The stage of a name.
    pub fn parse(name: &str) -> Option<Stage> {
        Stage::ALL.iter().copied().find(|s| s.name() == name)
    }

    /// True for stages whose text shows generated code or depends on it.
    pub(crate) fn needs_code(self) -> bool {
        matches!(self, Stage::Schedule | Stage::Clif | Stage::Asm)
    }

    /// False for stages that need a compiler of their own, which runs only when one of them is asked for by name.
    pub fn is_cheap(self) -> bool {
        self.maker() == Maker::Compilation
    }
}

/// CUDA sources of one graph, and the device or architecture that they are for.
struct Sources {
    target: String,
    generated: cuda::Generated,
}

/// A graph whose CUDA sources are still to be made.
struct Pending<'l> {
    target: String,
    device: &'l DeviceName,
    graph: Graph,
}

impl Lowered {
    /// The text of a stage. `full` prints constants so that graphs parse back.
    ///
    /// Errors with `Unsupported` for stages whose compiler or disassembler is not installed, with `InvalidInput` when
    /// [`Options::keep_stages`](crate::Options::keep_stages) was off.
    pub fn text(&self, stage: Stage, full: bool) -> Result<String> {
        if !self.has_stages {
            let hint = "Options::keep_stages";
            return Err(Error::invalid("the stages were not kept").hint(hint));
        }
        stage.text()(self, PrintOptions::of(full))
    }

    fn schedule_text(&self) -> String {
        let mut text = String::new();
        for (part, schedule) in self.partitions.iter().zip(&self.schedules) {
            text += &device_schedule(part, schedule);
        }
        for choice in &self.report.choices {
            text += &format!("// {}: {choice}\n", choice.kernel);
        }
        text + &self.program.to_string()
    }

    fn cuda_text(&self) -> Result<String> {
        let mut text = String::new();
        let mut previous = None;
        for Sources { target, generated } in self.cuda()? {
            if previous.is_none() {
                text = format!("// for {target}\n{}\n", cuda::PRELUDE);
            } else if previous.as_ref() != Some(&target) {
                text += &format!("// for {target}\n\n");
            }
            text += &generated.listing;
            previous = Some(target);
        }
        Ok(text)
    }

    /// CUDA sources of the partitions on GPUs, as they run there; where there is none, of all clusters, as they would. Those of
    /// regions follow their graph.
    fn cuda(&self) -> Result<Vec<Sources>> {
        let mut pending = self.gpu_graphs();
        pending.reverse();
        let mut made = Vec::new();
        while let Some(Pending {
            target,
            device,
            graph,
        }) = pending.pop()
        {
            let plain = graph
                .nodes()
                .filter(|(_, n)| !matches!(n.op, Op::Cluster { .. }));
            for region in plain.flat_map(|(_, node)| node.regions.iter().rev()) {
                let graph = self.settings.clustered(region)?;
                pending.push(Pending {
                    target: target.clone(),
                    device,
                    graph,
                });
            }
            let generated = self.settings.cuda(&graph, device)?;
            made.push(Sources { target, generated });
        }
        Ok(made)
    }

    fn gpu_graphs(&self) -> Vec<Pending<'_>> {
        let mut graphs = Vec::new();
        for part in self
            .partitions
            .iter()
            .filter(|p| p.device.kind != DeviceKind::Cpu)
        {
            let arch = self.settings.gpu_options(&part.device).arch;
            graphs.push(Pending {
                target: format!("{}, {arch}", part.device),
                device: &part.device,
                graph: part.graph.clone(),
            });
        }
        if graphs.is_empty() {
            graphs.push(Pending {
                target: self.settings.gpu.arch.to_string(),
                device: &self.partitions[0].device,
                graph: self.clusters.clone(),
            });
        }
        graphs
    }

    /// The results of `show` for every distinct kernel, compiled by NVRTC.
    fn compiled_cuda(
        &self,
        show: impl Fn(&nvrtc::Nvrtc, &GpuCode) -> Result<String>,
    ) -> Result<String> {
        let nvrtc = nvrtc::get()?;
        let cache = nvrtc::Cache::of_user();
        let mut text = String::new();
        for Sources { generated, .. } in self.cuda()? {
            for code in generated.compile(nvrtc, cache.as_ref())? {
                text.push_str(&show(nvrtc, &code)?);
                text.push('\n');
            }
        }
        let warnings = cache.iter().flat_map(nvrtc::Cache::take_warnings);
        let warnings: String = warnings.map(|w| format!("// warning: {w}\n")).collect();
        Ok(warnings + &text)
    }
}

fn device_schedule(part: &Part, schedule: &Schedule) -> String {
    format!("// {}\n{}", part.device, schedule.to_text(&part.graph))
}
