//! A kernel's whole source: prelude, index type, functions, signature, body.

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
    /// Types of elements, of those only read and of those written.
    types: [Vec<&'static str>; 2],
    maps: Vec<TensorMap>,
}

impl Parameters {
    /// Declares a buffer that is only read; gives its name.
    pub(super) fn read(&mut self, dtype: DType) -> String {
        self.declare(false, memory_type(dtype))
    }

    /// Declares a buffer that is written; gives its name. Comes after all that are only read.
    pub(super) fn write(&mut self, dtype: DType) -> String {
        self.declare(true, memory_type(dtype))
    }

    /// Declares a buffer with elements of such a type.
    pub(super) fn declare(&mut self, is_written: bool, ty: &'static str) -> String {
        let (letter, modifier) = if is_written {
            ("r", "")
        } else {
            ("a", "const ")
        };
        let types = &mut self.types[usize::from(is_written)];
        let name = format!("{letter}{}", types.len());
        types.push(ty);
        self.declared
            .push(format!("{modifier}{ty}* __restrict__ {name}"));
        name
    }

    /// Type of the elements of buffer `i` of those only read (0) or written (1).
    pub(super) fn memory_type(&self, side: usize, i: usize) -> &'static str {
        self.types[side][i]
    }

    /// Declarations of all buffers.
    pub(super) fn declared(&self) -> &[String] {
        &self.declared
    }

    pub(super) fn has_maps(&self) -> bool {
        !self.maps.is_empty()
    }

    /// Declares a tensor map of one of the buffers: `map0`, `map1`, in this order.
    pub(super) fn map(&mut self, map: TensorMap) {
        self.maps.push(map);
    }
}

/// One kernel as text.
pub(super) struct Source {
    /// Text after the prelude: index type, functions and kernel.
    pub(super) kernel: String,
    pub(super) params: Vec<GpuParam>,
}

impl Source {
    /// The whole translation unit.
    pub(super) fn unit(&self) -> String {
        format!("{PRELUDE}\n{}", self.kernel)
    }
}

/// The source of kernel `entry`, which calls `functions`.
pub(super) fn source(
    entry: &str,
    resources: &Resources,
    wide: bool,
    parameters: &Parameters,
    functions: &str,
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
        "typedef {ix} ix;\ntypedef unsigned {ix} uix;\n\n{functions}\
         extern \"C\" __global__ void {cluster}__launch_bounds__({bounds})\n{entry}({}) {{\n{}}}\n",
        declared.join(", "),
        body.text
    );
    Source { kernel, params }
}
