//! Specialisation: from the shapes of a model's inputs to an executable.

use super::any_shape::AnyShape;
use super::data_parallel;
use super::executable::Runner;
use super::{Compiled, Executable, InputShapes, Source, bound, segmented, specialisation};
use crate::error::Result;
use crate::ir::Graph;
use crate::onnx;
use crate::passes;
use crate::pipeline::{self, Fused, Lowered, Partitioned, Stage, generate, partitioned};
use crate::report::Scope;
use crate::session::cache::Key;
use crate::session::cluster::Cluster;
use crate::tune::tune;
use crate::units::size;
use gristmill_runtime::exec::{ExecOptions, Lanes};
use gristmill_runtime::program::Program;
use std::sync::Arc;
use std::sync::atomic::Ordering;

impl Compiled {
    pub(super) fn specialise(&self, inputs: InputShapes) -> Result<Arc<Executable>> {
        let make = || {
            let made = match self.session().cluster() {
                None => self.executable(self.lowered(&inputs)?)?,
                Some(cluster) => self.elsewhere(&**cluster, &inputs)?,
            };
            if made.lowered.report.scope == Scope::Alone {
                self.n_alone.fetch_add(1, Ordering::Relaxed);
            }
            let held = made.held();
            Ok((made, held))
        };
        let warn = |made: &mut Executable, bytes| {
            let warning = self.eviction_warning(bytes);
            self.common.add_warnings(std::slice::from_ref(&warning));
            made.lowered.report.warnings.push(warning);
        };
        self.specialisations
            .get_or_make(self.key(&inputs), make, warn)
    }

    pub(super) fn key(&self, inputs: &InputShapes) -> Key {
        let named = self.inputs.iter().map(|(name, _)| inputs.values.get(name));
        let deciding = named.enumerate().filter_map(|(i, value)| Some((i, value?)));
        let contents = deciding.map(|(i, value)| (i, value.as_bytes().to_vec()));
        (inputs.shapes.clone(), contents.collect())
    }

    fn eviction_warning(&self, bytes: u64) -> String {
        let limit = self.session().settings().specialisation_bytes;
        format!(
            "code and weights of all models of the session take {}, and may take {}: the least recently used code is dropped, and \
             compiled again when its shapes come back (Settings::specialisation_bytes)",
            size(bytes),
            size(limit)
        )
    }

    /// Makes a program ready to run.
    fn executable(&self, lowered: Lowered) -> Result<Executable> {
        self.options.target_cpu.check_runs_here()?;
        let exec_options = ExecOptions {
            pool: self.session().pool().clone(),
            resources: self.session().resources().clone(),
            drivers: self.session().drivers(&lowered.program)?,
            overlaps: self.options.updates_overlap,
            ..Default::default()
        };
        let program = lowered.program.clone();
        let lanes = match lowered.placement.stream {
            Some(stream) => Lanes::new(program, &exec_options, stream.in_flight as usize),
            None => {
                let limit = self.options.max_in_flight;
                let limit = limit.unwrap_or_else(gristmill_runtime::cpu::n_cores);
                Lanes::concurrent(program, &exec_options, limit)
            }
        }?;
        let runner = Runner::Here(lanes);
        Ok(Executable { lowered, runner })
    }

    /// The same on the tasks of a cluster.
    fn elsewhere(&self, cluster: &dyn Cluster, inputs: &InputShapes) -> Result<Executable> {
        let remote = cluster.compile(self.graph(inputs)?, &self.options)?;
        let program = Program {
            name: "elsewhere".to_owned(),
            inputs: remote.inputs().to_vec(),
            outputs: remote.outputs().to_vec(),
            ..Program::default()
        };
        let mut lowered = Lowered::elsewhere(program, self.config());
        lowered.report.warnings = remote.warnings().to_vec();
        self.common.add_warnings(remote.warnings());
        self.session()
            .log_placement(|| remote.placement().to_owned());
        let runner = Runner::Elsewhere(remote);
        Ok(Executable { lowered, runner })
    }

    /// The stages as far as the text of one of them needs. Code is generated, and devices must exist, where that text is about code.
    #[doc(hidden)]
    pub fn lower_for(&self, stage: Stage, inputs: &InputShapes) -> Result<Lowered> {
        let fused = self.fused(inputs)?;
        if stage.needs_code() {
            return self.lower(self.partitioned(fused)?);
        }
        let mut parts = pipeline::partitioned_anywhere(fused, self.config())?;
        if stage > Stage::Partitions && parts.check_presence(self.config()).is_ok() {
            tune(&mut parts, self.config())?;
        }
        Ok(parts.without_code(self.config()))
    }

    /// The program for given shapes.
    pub(super) fn lowered(&self, inputs: &InputShapes) -> Result<Lowered> {
        let lowered = self.lowered_quietly(inputs)?;
        self.common.add_warnings(&lowered.report.warnings);
        Ok(lowered)
    }

    fn lowered_quietly(&self, inputs: &InputShapes) -> Result<Lowered> {
        let any_shape = self.any_shape(inputs)?;
        if let Some(lowered) = any_shape.lower_on_one_device(&inputs.shapes, self.config())? {
            return Ok(lowered);
        }
        let parts = self.partitioned(self.fused(inputs)?)?;
        if parts.report.scope == Scope::AllShapes {
            any_shape.put_on_one_device(&parts, self.config())?;
        }
        let mut lowered = self.lower(parts)?;
        let placement = &lowered.placement;
        self.session()
            .log_placement(|| placement.device_log(&lowered.clusters));
        if self.specialisations.len() > 0 && !self.options.keep_stages {
            lowered.release_graphs();
        }
        Ok(lowered)
    }

    /// One graph per device, to be compiled with what all programs of the model share.
    fn partitioned(&self, fused: Fused) -> Result<Partitioned> {
        let mut parts = partitioned(fused, self.config())?;
        parts.settings.codegen.constants = self.session().constants().clone();
        parts.settings.codegen.workers = self.session().workers();
        let is_one_of_many = parts.report.scope == Scope::AllShapes;
        parts.settings.codegen.is_one_of_many = is_one_of_many;
        // A listing has all of a program's code.
        if is_one_of_many || !self.options.keep_stages {
            parts.settings.codegen.code = Some(self.session().code().clone());
        }
        Ok(parts)
    }

    fn lower(&self, mut parts: Partitioned) -> Result<Lowered> {
        tune(&mut parts, self.config())?;
        generate(parts, self.config())
    }

    /// The facts about an ONNX model that are known without inputs.
    pub(super) fn specialisation(&self) -> onnx::Specialisation {
        specialisation(&self.options)
    }

    /// The graph without sizes for dims that the options leave open, not yet rewritten.
    pub(super) fn symbolic_graph(&self) -> Result<Graph> {
        match &self.source {
            Source::Onnx(m) => m.graph(&self.specialisation()),
            Source::Graph(g) => bound(g, &self.options.dims),
        }
    }

    /// Fused kernels for given shapes: those of all shapes, where there are such and they take these.
    pub(super) fn fused(&self, inputs: &InputShapes) -> Result<Fused> {
        self.check_whole()?;
        let any_shape = self.any_shape(inputs)?;
        let why = match any_shape.bind(&inputs.shapes, self.config())? {
            Ok(bound) => return Ok(bound),
            Err(why) => why,
        };
        let graph = self.graph(inputs)?;
        let has_run_time_extents = passes::has_run_time_extents(&graph);
        let mut fused = match &self.options.data_parallel {
            Some(_) if has_run_time_extents => return Err(data_parallel::not_fixed()),
            None if has_run_time_extents => return Err(segmented::not_whole(None).of_extents()),
            Some(on) => {
                let batched = data_parallel::batched(&self.inputs);
                pipeline::fused_in_parts(graph, &batched, on, self.config())?
            }
            None => pipeline::fused(graph, self.config())?,
        };
        if let Some(why) = why {
            fused.add_note(format!("kernels were chosen for these shapes alone: {why}"));
        }
        Ok(fused)
    }

    /// The kernels of all shapes, of which these are the first.
    fn any_shape(&self, first: &InputShapes) -> Result<&AnyShape> {
        let made = self.any_shape.get_or_init(|| self.of_any_shape(first));
        made.as_ref().map_err(Clone::clone)
    }

    fn of_any_shape(&self, first: &InputShapes) -> Result<AnyShape> {
        let mut inputs = self.inputs.iter();
        let is_static = inputs.all(|(_, ty)| ty.static_shape().is_some());
        let is_alone = is_static || !self.value_inputs.is_empty();
        match is_alone || self.options.data_parallel.is_some() {
            true => Ok(AnyShape::None),
            false => AnyShape::of(self.symbolic_graph(), &first.shapes, self.config()),
        }
    }

    /// The graph for given shapes, not yet rewritten, and not divided among devices.
    #[doc(hidden)]
    pub fn graph(&self, inputs: &InputShapes) -> Result<Graph> {
        match &self.source {
            Source::Onnx(m) => {
                let names = self.inputs.iter().map(|(name, _)| name.clone());
                m.graph(&onnx::Specialisation {
                    shapes: names.zip(inputs.shapes.iter().cloned()).collect(),
                    values: inputs.values.clone(),
                    ..self.specialisation()
                })
            }
            Source::Graph(g) => {
                let mut bindings = g.bindings_for(&inputs.shapes)?;
                bindings.extend(self.options.dims.clone());
                passes::specialise(g, &bindings)
            }
        }
    }
}
