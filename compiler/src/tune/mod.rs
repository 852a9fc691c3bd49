//! Tuning: the fastest variant of each GPU kernel, found by timing all of them on the GPU.
//!
//! A kernel can have several variants ([`crate::codegen::kernel_forms`]); predicted times choose one. Here every variant of a
//! cluster, in bodies of control flow too, runs by itself on random operands. Its result must be that of the interpreter,
//! or of the predicted variant where interpreting would take too long. The fastest one is kept on disk, for a hash of the
//! sources of all variants, this GPU and this driver. Later compilations use it; others are only timed on request. The
//! time of a library is kept beside those of our variants of a product (the `library` module).

mod library;
mod sweep;

use crate::codegen::assemble::{Interface, Settings, assemble};
use crate::codegen::cuda::{self, Generated};
use crate::codegen::kernel_forms::{Forms, Preferred, Why};
use crate::cost::{Fnv, flops, signature, store};
use crate::error::{Error, Result};
use crate::interp;
use crate::interp::compare::allclose;
use crate::interp::random::random_tensor;
use crate::ir::{Bindings, Graph, NodeId, Op};
use crate::partition::Part;
use crate::pipeline::Config;
use crate::pipeline::Partitioned;
use crate::place;
use crate::report::{Pass, Report, Tuned};
use crate::rng::Rng;
use crate::session::{self, drivers};

use crate::{DType, DeviceName, Tensor};
use gristmill_runtime::device::DeviceKind;
use gristmill_runtime::driver::Driver;
use gristmill_runtime::exec::{ExecOptions, Executor, Pool};
use gristmill_runtime::files::MAX_TEXT_BYTES;
use gristmill_runtime::product::Product;
use library::{Library, Timed};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The format of the file of winners.
const FORMAT: &str = concat!("gristmill/tuned/2 of ", env!("CARGO_PKG_VERSION"));
/// Time for which launches of a variant are repeated.
const EACH: Duration = Duration::from_millis(20);
/// Operations up to which the interpreter computes the expected result.
const INTERPRETED_FLOPS: f64 = 1e9;

pub use sweep::{FormTime, each_form};

/// The file of winners in a cache folder.
pub fn path(folder: &Path) -> PathBuf {
    folder.join("tuned.json")
}

#[derive(Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    format: String,
    winners: Vec<Winner>,
}

/// The form that won.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Winner {
    /// Hexadecimal hash of the sources of all forms.
    forms: String,
    /// Product name of the GPU, and the driver.
    gpu: String,
    form: u8,
    /// Times of all variants; none of those that failed.
    ns: Vec<Option<u64>>,
    /// Time of a library for the same product, where one was timed.
    library: Option<Timed>,
}

/// Winners so far.
struct Kept {
    path: Option<PathBuf>,
    winners: BTreeMap<(String, String), Winner>,
    /// Winners that the file does not have yet.
    new: Vec<Winner>,
}

impl Kept {
    /// The winners of the cache folder. A file that cannot be read is named in a warning.
    fn load(folder: Option<&Path>, warnings: &mut Vec<String>) -> Kept {
        let path = folder.map(path);
        let read = match &path {
            Some(path) => store::load(path, MAX_TEXT_BYTES, parse),
            None => Ok(None),
        };
        let read = read.map_err(|warning| warnings.push(warning));
        let mut kept = Kept {
            path,
            winners: BTreeMap::new(),
            new: Vec::new(),
        };
        for winner in read.ok().flatten().unwrap_or_default() {
            kept.insert(winner);
        }
        kept
    }

    fn insert(&mut self, winner: Winner) {
        self.winners
            .insert((winner.forms.clone(), winner.gpu.clone()), winner);
    }

    fn add(&mut self, winner: Winner) {
        self.new.push(winner.clone());
        self.insert(winner);
    }

    /// Adds the new winners to those in the file, where other processes may have added theirs.
    fn save(self) -> Result<()> {
        let Some(path) = self.path.filter(|_| !self.new.is_empty()) else {
            return Ok(());
        };
        let _lock = store::lock(&path)?;
        let folder = path.parent();
        let mut all = Kept::load(folder, &mut Vec::new());
        self.new.into_iter().for_each(|winner| all.insert(winner));
        let file = File {
            format: FORMAT.to_owned(),
            winners: all.winners.into_values().collect(),
        };
        let text = serde_json::to_string(&file)
            .map_err(|e| Error::internal(format!("writing winners: {e}")))?;
        store::replace(&path, &text)
    }
}

fn parse(text: &str) -> Result<Vec<Winner>, String> {
    let file: File = serde_json::from_str(text).map_err(|e| e.to_string())?;
    match file.format == FORMAT {
        true => Ok(file.winners),
        false => Err(format!("format {:?}, expected {FORMAT:?}", file.format)),
    }
}

/// Chooses the forms of clusters on each GPU: those that are cached, or, if that is asked for, those that win now. All others are
/// as predicted.
///
/// Errors with `Unsupported` when a GPU is not there, and when the winners cannot be written.
pub(crate) fn tune(lowered: &mut Partitioned, config: Config) -> Result<()> {
    let started = Instant::now();
    let (settings, report) = (&mut lowered.settings, &mut lowered.report);
    settings.forms = choose(&lowered.partitions, config.settings, settings, report)?;
    report.add_time(Pass::Tune, started.elapsed());
    Ok(())
}

fn choose(
    parts: &[Part],
    machine: &session::Settings,
    settings: &Settings,
    report: &mut Report,
) -> Result<BTreeMap<DeviceName, Forms>> {
    let mut kept = Kept::load(machine.tuning.folder.as_deref(), &mut report.warnings);
    let mut chosen = BTreeMap::new();
    if kept.winners.is_empty() && !machine.tuning.measures {
        return Ok(chosen);
    }
    for part in parts.iter().filter(|p| p.device.kind == DeviceKind::Gpu) {
        let mut bench = Bench::new(&part.device, machine, settings)?;
        let mut singles = BTreeMap::new();
        collect(&part.graph, settings, &mut singles)?;
        let mut forms = Forms::new();
        for (signature, single) in singles {
            if let Some(preferred) = bench.preferred(&single, &mut kept, report)? {
                forms.insert(signature, preferred);
            }
        }
        chosen.insert(part.device.clone(), forms);
    }
    kept.save()?;
    Ok(chosen)
}

/// The clusters of a graph and of the regions of its nodes, each as a graph of its own, by its signature.
fn collect(g: &Graph, settings: &Settings, singles: &mut BTreeMap<u64, Graph>) -> Result<()> {
    for (id, node) in g.nodes() {
        if matches!(node.op, Op::Cluster { .. }) {
            if let Entry::Vacant(new) = singles.entry(signature(g, node)) {
                new.insert(single(g, id)?);
            }
        } else {
            node.regions
                .iter()
                .try_for_each(|r| collect(&settings.clustered(r)?, settings, singles))?;
        }
    }
    Ok(())
}

/// A cluster as a graph of its own.
fn single(g: &Graph, id: NodeId) -> Result<Graph> {
    let node = g.node(id);
    let mut single = Graph::new("tuned");
    let mut new = BTreeMap::new();
    for &v in &node.inputs {
        let name = format!("x{}", new.len());
        new.entry(v)
            .or_insert_with(|| single.add_input(&name, g.ty(v).clone()));
    }
    let operands: Vec<_> = node.inputs.iter().map(|v| new[v]).collect();
    let results = single.add_with_regions(
        node.op.clone(),
        &operands,
        node.regions.clone(),
        &node.origin,
    )?;
    results
        .iter()
        .enumerate()
        .for_each(|(i, &v)| single.add_output(&format!("y{i}"), v));
    Ok(single)
}

/// A GPU on which forms are timed.
struct Bench<'a> {
    device: &'a DeviceName,
    /// Product name, and the driver.
    gpu: String,
    machine: &'a session::Settings,
    settings: &'a Settings,
    library: Library,
    /// Opened when something is timed.
    driver: Option<Arc<dyn Driver>>,
}

impl<'a> Bench<'a> {
    fn new(
        device: &'a DeviceName,
        machine: &'a session::Settings,
        settings: &'a Settings,
    ) -> Result<Bench<'a>> {
        let (major, minor) = gristmill_runtime::cuda::driver_version().unwrap_or_default();
        let gpu = format!(
            "{}, driver {major}.{minor}",
            place::gpus::product(device, &machine.gpus)?
        );
        Ok(Bench {
            device,
            gpu,
            machine,
            settings,
            library: Library::of(&machine.tuning),
            driver: None,
        })
    }

    /// The form that a cluster is to have, if there is a choice and one has been timed, now or earlier.
    fn preferred(
        &mut self,
        g: &Graph,
        kept: &mut Kept,
        report: &mut Report,
    ) -> Result<Option<Preferred>> {
        let node = g.node(NodeId(0));
        let product = cuda::library_product(node, self.settings.gpu_options(self.device))?;
        let Some((n, hash)) = self.forms(g, product.as_ref())? else {
            return Ok(None);
        };
        let key = (format!("{hash:016x}"), self.gpu.clone());
        if self.must_measure(n, product.is_some(), kept.winners.get(&key)) {
            match self.winner(g, n, product.as_ref(), &key, report) {
                Ok(winner) => kept.add(winner),
                Err(e) => report
                    .warnings
                    .push(format!("not tuned: {}", e.at_origin(&node.origin))),
            }
        }
        let winner = kept.winners.get(&key).filter(|w| w.form < n);
        winner.map(|w| self.chosen(g, n, w, report)).transpose()
    }

    /// The winner among `n` variants as a choice: the library instead, if it was faster.
    fn chosen(&self, g: &Graph, n: u8, w: &Winner, report: &mut Report) -> Result<Preferred> {
        let origin = &g.node(NodeId(0)).origin;
        let [ours, predicted] =
            [w.form, 0].map(|form| w.ns.get(usize::from(form)).copied().flatten());
        let library = match self.library.instead(w.library.as_ref(), ours) {
            Some(Ok(library)) => Some(library),
            Some(Err(why)) => {
                report.notes.push(format!("{}: {why}", origin));
                None
            }
            None => None,
        };
        let (form, ns) = match &library {
            Some(library) => (library.name.clone(), Some(library.ns)),
            None => (self.words(g, w.form)?, ours),
        };
        report.tuned.push(Tuned {
            node: origin.to_string(),
            form,
            ns: [ns, predicted],
        });
        let form = if library.is_some() { n } else { w.form };
        let why = Why::Tuned(self.gpu.clone());
        Ok(Preferred { form, why, library })
    }

    fn generate(&self, g: &Graph, form: u8) -> Result<Generated> {
        cuda::generate_with(
            g,
            cuda::Options {
                form,
                ..self.settings.gpu_options(self.device)
            },
        )
    }

    /// A form in words.
    fn words(&self, g: &Graph, form: u8) -> Result<String> {
        let made = self.generate(g, form)?;
        let choices = made.forms.values().flat_map(|f| &f.choices);
        let words: Vec<String> = choices
            .map(|c| format!("{} of {}: {}", c.number + 1, c.n, c.form))
            .collect();
        Ok(words.join("; "))
    }

    /// Number of a cluster's variants, and a hash of all of them and of the library's product; `None` where there is no choice.
    fn forms(&self, g: &Graph, product: Option<&Product>) -> Result<Option<(u8, u64)>> {
        let first = self.generate(g, 0)?;
        let n = first.forms.values().map(|f| f.n).next().unwrap_or(1).max(1);
        if n == 1 && product.is_none() {
            return Ok(None);
        }
        let mut hash = Fnv::default();
        write!(hash, "{product:?}").expect("hashing does not fail");
        for form in 0..n {
            for unit in &self.generate(g, form)?.units {
                write!(hash, "{form} {} {}", unit.arch, unit.source)
                    .expect("hashing does not fail");
            }
        }
        Ok(Some((n, hash.value())))
    }

    /// True if a cluster with `n` variants has to be timed: its winner, or the time of the present library, is unknown.
    fn must_measure(&self, n: u8, is_product: bool, known: Option<&Winner>) -> bool {
        let of_library = known.and_then(|w| w.library.as_ref());
        let is_news = is_product && self.library.is_news(of_library);
        self.machine.tuning.measures && (is_news || n > 1 && known.is_none())
    }

    /// Times all variants, and the library if there is one for the product. Errors when none of ours gives the right result, with the
    /// errors of all.
    fn winner(
        &mut self,
        g: &Graph,
        n: u8,
        product: Option<&Product>,
        (forms, gpu): &(String, String),
        report: &mut Report,
    ) -> Result<Winner> {
        let inputs = random_inputs(g);
        let mut expected = interpreted(g, &inputs)?;
        let (mut ns, mut wrong) = (Vec::new(), Vec::new());
        for form in 0..n {
            let timed = self.timed(g, form, &inputs, &mut expected);
            let reported = timed.map_err(|e| wrong.push(format!("form {}: {e}", form + 1)));
            ns.push(reported.ok());
        }
        let (Some(form), Some(expected)) = (fastest(&ns), &expected) else {
            let message = format!("no form gives the right result: {}", wrong.join("; "));
            return Err(Error::internal(message));
        };
        let library = product.and_then(|product| {
            let name = self.library.name()?.to_owned();
            let (timed, result) = self.time_library(g, (&name, n), product, (&inputs, expected));
            if let Err(e) = result {
                report_library(report, e.at_origin(&g.node(NodeId(0)).origin));
            }
            Some(timed)
        });
        Ok(Winner {
            forms: forms.clone(),
            gpu: gpu.clone(),
            form,
            ns,
            library,
        })
    }

    /// Time of a form in ns. Its results must be those expected, or are from now on.
    fn timed(
        &mut self,
        g: &Graph,
        form: u8,
        inputs: &[Tensor],
        expected: &mut Option<Vec<Tensor>>,
    ) -> Result<u64> {
        let (results, ns) = self.run(g, Preferred::of(form), inputs)?;
        let expected = expected.get_or_insert_with(|| results.clone());
        agree(expected, &results, self.settings.gpu.tf32)?;
        Ok(ns)
    }

    /// The GPU's driver.
    fn driver(&mut self) -> Result<Arc<dyn Driver>> {
        if self.driver.is_none() {
            self.driver = drivers::open(self.device, self.machine)?;
        }
        self.driver
            .clone()
            .ok_or_else(|| Error::internal("a GPU has a driver"))
    }

    /// Results of a form, and its time in ns.
    fn run(
        &mut self,
        g: &Graph,
        preferred: Preferred,
        inputs: &[Tensor],
    ) -> Result<(Vec<Tensor>, u64)> {
        let driver = self.driver()?;
        let forms = [(signature(g, g.node(NodeId(0))), preferred)].into();
        let settings = Settings {
            forms: [(self.device.clone(), forms)].into(),
            ..self.settings.clone()
        };
        let made = assemble(
            Interface::of(g, &Bindings::new())?,
            &mut [Part::whole(self.device.clone(), g.clone())],
            &settings,
        )?;
        let options = ExecOptions {
            pool: Arc::new(Pool::new(1)),
            drivers: [(self.device.clone(), driver)].into(),
            ..ExecOptions::default()
        };
        let executor = Executor::new(Arc::new(made.program), &options)?;
        let results = executor.run(inputs)?;
        let ns = executor
            .time_launches(EACH)?
            .iter()
            .map(|l| l.time.as_nanos() as u64)
            .sum();
        Ok((results, ns))
    }
}

/// The same random operands for all variants of a cluster.
fn random_inputs(g: &Graph) -> Vec<Tensor> {
    let mut rng = Rng(1);
    let types = g.inputs.iter().map(|&v| g.ty(v));
    let inputs = types.map(|ty| {
        let shape = ty.static_shape().unwrap_or_default();
        random_tensor(&mut rng, ty.dtype, &shape, false)
    });
    inputs.collect()
}

/// The interpreter's results; `None` where they would take too long.
fn interpreted(g: &Graph, inputs: &[Tensor]) -> Result<Option<Vec<Tensor>>> {
    let body = &g.node(NodeId(0)).regions[0];
    match flops(body) <= INTERPRETED_FLOPS {
        true => Ok(Some(interp::run(g, inputs)?)),
        false => Ok(None),
    }
}

/// A product missing in a library is a note; a wrong result is a warning.
fn report_library(report: &mut Report, e: Error) {
    let reported = match library::is_lack(&e) {
        true => &mut report.notes,
        false => &mut report.warnings,
    };
    reported.push(format!("not tuned: {e}"));
}

/// The form that takes the least time, the first of equals.
fn fastest(ns: &[Option<u64>]) -> Option<u8> {
    let timed = ns
        .iter()
        .enumerate()
        .filter_map(|(form, ns)| Some((ns.as_ref()?, form as u8)));
    timed.min().map(|(_, form)| form)
}

/// Errors when results differ by more than the order of sums, and rounding, explain.
fn agree(expected: &[Tensor], found: &[Tensor], tf32: bool) -> Result<()> {
    for (e, f) in expected.iter().zip(found) {
        let most = match e.dtype() {
            DType::F16 | DType::BF16 => 1.0 / 64.0,
            DType::F32 if tf32 => 1.0 / 256.0,
            DType::F32 => 1e-4,
            DType::F64 => 1e-10,
            _ => 0.0,
        };
        let c = allclose(e, f, 0.0, 0.0);
        let agrees = c.ok || c.scaled_err() <= most;
        if !agrees {
            return Err(Error::internal(format!("its result is wrong: {c}")));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fastest_that_is_right_wins() {
        assert_eq!(fastest(&[Some(5), None, Some(3), Some(3)]), Some(2));
        assert_eq!(fastest(&[None, None]), None);
        let t = |v: &[f32]| Tensor::from_slice(v, &[v.len()]).unwrap();
        assert!(agree(&[t(&[1.0, 100.0])], &[t(&[1.001, 100.0])], false).is_ok());
        let wrong = agree(&[t(&[1.0, 100.0])], &[t(&[1.0, 99.0])], false).unwrap_err();
        assert!(wrong.to_string().contains("its result is wrong"), "{wrong}");
        assert!(
            agree(&[t(&[1.0])], &[t(&[f32::NAN])], true).is_err(),
            "what is no number is no result"
        );
    }

    #[test]
    fn winners_survive_in_a_file() {
        let dir = tempfile::tempdir().unwrap();
        let load = |warnings: &mut Vec<String>| Kept::load(Some(dir.path()), warnings);
        let mut warnings = Vec::new();
        let mut kept = load(&mut warnings);
        let w = Winner {
            forms: "0a".into(),
            gpu: "H".into(),
            form: 2,
            ns: vec![Some(4), None, Some(3)],
            library: None,
        };
        let library = Some(Timed {
            name: "L".into(),
            ns: Some(2),
            workspace_bytes: 5,
        });
        let w = Winner { library, ..w };
        kept.add(w.clone());
        kept.save().unwrap();
        assert_eq!(
            load(&mut warnings)
                .winners
                .into_values()
                .collect::<Vec<_>>(),
            [w]
        );
        assert!(warnings.is_empty());
        let text = std::fs::read_to_string(path(dir.path())).unwrap();
        for bad in [
            text.replace("tuned/2", "tuned/1"),
            text[..text.len() / 2].to_owned(),
        ] {
            std::fs::write(path(dir.path()), bad).unwrap();
            assert!(load(&mut warnings).winners.is_empty());
        }
        assert!(
            warnings.len() == 2 && warnings.iter().all(|w| w.contains("tuned.json")),
            "{warnings:?}"
        );
    }
}
