//! A kernel's whole source: prelude, index type, signature, body.

use super::candidates::Resources;
use super::emit::Body;
use super::text::memory_type;
use gristmill_kernels::cuda::PRELUDE;
use gristmill_runtime::DType;
use gristmill_runtime::gpu::{GpuParam, TensorMap};

/// A kernel's parameters being declared: buffers in the order of the step's arguments.
#[derive(Default)]
pub(super) struct Parameters {
    declared: Vec<String>,
    n_reads: usize,
    maps: Vec<TensorMap>,
}

impl Parameters {
    /// Declares a buffer that is only read; gives its name.
    pub(super) fn read(&mut self, dtype: DType) -> String {
        let name = format!("a{}", self.declared.len());
        self.declared
            .push(format!("const {}* __restrict__ {name}", memory_type(dtype)));
        self.n_reads += 1;
        name
    }

    /// Declares a buffer that is written; gives its name. Comes after all that are only read.
    pub(super) fn write(&mut self, dtype: DType) -> String {
        let name = format!("r{}", self.declared.len() - self.n_reads);
        self.declared
            .push(format!("{}* __restrict__ {name}", memory_type(dtype)));
        name
    }

    /// Declares a tensor map of one of the buffers: `map0`, `map1`, in this order.
    pub(super) fn map(&mut self, map: TensorMap) {
        self.maps.push(map);
    }
}

/// One kernel as text.
pub(super) struct Source {
    /// Text after the prelude: index type and kernel.
    pub(super) kernel: String,
    pub(super) params: Vec<GpuParam>,
}

impl Source {
    /// The whole translation unit.
    pub(super) fn unit(&self) -> String {
        format!("{PRELUDE}\n{}", self.kernel)
    }
}

/// The source of kernel `entry`.
pub(super) fn source(
    entry: &str,
    resources: &Resources,
    wide: bool,
    parameters: &Parameters,
    body: Body,
) -> Source {
    let mut params: Vec<GpuParam> = (0..parameters.declared.len() as u32)
        .map(GpuParam::Buffer)
        .collect();
    let mut declared = parameters.declared.clone();
    for (i, map) in parameters.maps.iter().enumerate() {
        params.push(GpuParam::TensorMap(Box::new(map.clone())));
        declared.push(format!("const __grid_constant__ gm_map map{i}"));
    }
    if body.faults {
        params.push(GpuParam::Status);
        declared.push("u32* __restrict__ status".to_owned());
    }
    let ix = if wide { "long long" } else { "int" };
    let cluster = match resources.cluster {
        ..2 => String::new(),
        n => format!("__cluster_dims__({n}, 1, 1) "),
    };
    let least = Some(resources.per_multiprocessor)
        .filter(|n| *n > 0)
        .map_or(String::new(), |n| format!(", {n}"));
    let bounds = format!("{}{least}", resources.threads);
    let kernel = format!(
        "typedef {ix} ix;\ntypedef unsigned {ix} uix;\n\n\
         extern \"C\" __global__ void {cluster}__launch_bounds__({bounds})\n{entry}({}) {{\n{}}}\n",
        declared.join(", "),
        body.text
    );
    Source { kernel, params }
}
