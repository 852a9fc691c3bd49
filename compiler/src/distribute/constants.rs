//! Constants beside the text of programs and parts.

use crate::error::{Error, Result};
use crate::ir::constant::{ConstData, Identity};
use crate::ir::print::PrintOptions;
use crate::ir::verify::verify;
use crate::ir::{Graph, Shape};
use gristmill_remote::{Constant, Digest, Document};
use gristmill_runtime::DType;
use gristmill_runtime::sync::lock;
use rayon::prelude::*;
use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::{Arc, LazyLock, Mutex};

/// Smaller constants are in the text.
const BESIDE_FROM_BYTES: usize = 1 << 10;

/// Digests of constants, known as long as these are kept, whichever session uses them.
#[derive(Default)]
pub(super) struct Digests(Mutex<Known>);

/// The digests known to the process.
pub(super) static DIGESTS: LazyLock<Digests> = LazyLock::new(Digests::default);

#[derive(Default)]
struct Known {
    digests: HashMap<Identity, Digest>,
    /// Number of them from which on dead ones are looked for.
    sweep_at: usize,
}

impl Digests {
    fn of(&self, value: &ConstData) -> Result<Digest> {
        if let Some(known) = self.known(value) {
            return Ok(known);
        }
        let digest = Digest::of(value.tensor()?.as_bytes());
        self.note(value.identity(), digest);
        Ok(digest)
    }

    fn known(&self, value: &ConstData) -> Option<Digest> {
        lock(&self.0).digests.get(&value.identity()).copied()
    }

    /// Computes the digests of a graph's constants on all cores.
    fn learn(&self, graph: &Graph) -> Result<()> {
        let mut large = Vec::new();
        add_large(graph, &mut large);
        let mut met = HashSet::new();
        large.retain(|value| self.known(value).is_none() && met.insert(value.identity()));
        large
            .par_iter()
            .try_for_each(|value| self.of(value).map(|_| ()))
    }

    fn note(&self, identity: Identity, digest: Digest) {
        let known = &mut *lock(&self.0);
        if known.digests.len() >= known.sweep_at {
            known.digests.retain(|identity, _| identity.is_alive());
            known.sweep_at = 2 * known.digests.len() + 64;
        }
        known.digests.insert(identity, digest);
    }

    /// A text as `write` makes it, with the constants that it leaves beside.
    pub(super) fn document(
        &self,
        write: impl FnOnce(&Writer<'_>) -> Result<String>,
    ) -> Result<Document> {
        let writer = Writer {
            digests: self,
            beside: RefCell::default(),
            failed: RefCell::default(),
        };
        let text = write(&writer)?;
        match writer.failed.into_inner() {
            None => Ok(Document::new(text, writer.beside.into_inner())),
            Some(e) => Err(e),
        }
    }

    /// The graph of a text with constants of a document beside it. Errors when the graph is malformed: it may be of anybody.
    pub(super) fn graph(&self, text: &str, document: &Document) -> Result<Graph> {
        let known: RefCell<HashMap<String, ConstData>> = RefCell::default();
        let graph = Graph::parse_beside(text, &|name| {
            if let Some(constant) = known.borrow().get(name) {
                return Ok(constant.clone());
            }
            let (digest, dtype, shape) = read_name(name)?;
            let bytes = document.constant(&digest).map_err(Error::from)?;
            let constant = ConstData::held(bytes.reinterpreted(dtype, &shape)?);
            self.note(constant.identity(), digest);
            let mut known = known.borrow_mut();
            known.insert(name.to_owned(), constant.clone());
            Ok(constant)
        })?;
        verify(&graph).map_err(|e| Error::invalid(e.message()))?;
        Ok(graph)
    }
}

/// Texts of graphs without their large constants.
pub(super) struct Writer<'d> {
    digests: &'d Digests,
    beside: RefCell<BTreeMap<Digest, Constant>>,
    failed: RefCell<Option<Error>>,
}

/// Adds the constants beside the text of a graph.
fn add_large<'g>(graph: &'g Graph, large: &mut Vec<&'g ConstData>) {
    for (_, node) in graph.nodes() {
        large.extend(
            node.op
                .elements()
                .filter(|value| value.size_bytes() >= BESIDE_FROM_BYTES),
        );
        for region in &node.regions {
            add_large(region, large);
        }
    }
}

impl Writer<'_> {
    pub(super) fn text(&self, graph: &Graph) -> String {
        if let Err(e) = self.digests.learn(graph) {
            self.failed.borrow_mut().get_or_insert(e);
        }
        graph.to_text_beside(PrintOptions::FULL, &|value| {
            let named = self.name(value);
            named.unwrap_or_else(|e| {
                self.failed.borrow_mut().get_or_insert(e);
                // The text is not used.
                Some(String::new())
            })
        })
    }

    /// The name of a constant beside the text; none if it belongs into it.
    fn name(&self, value: &ConstData) -> Result<Option<String>> {
        if value.size_bytes() < BESIDE_FROM_BYTES {
            return Ok(None);
        }
        let digest = self.digests.of(value)?;
        let (size_bytes, own) = (value.size_bytes(), value.clone());
        let source = move || {
            let tensor = own.tensor().map_err(gristmill_remote::Fault::from)?;
            Ok(tensor.reinterpreted(DType::U8, &[size_bytes])?)
        };
        let constant = Constant {
            digest,
            size_bytes,
            source: Arc::new(source),
        };
        self.beside.borrow_mut().entry(digest).or_insert(constant);
        let shape = Shape::of(value.shape());
        Ok(Some(format!("{}{shape} {digest}", value.dtype())))
    }
}

/// The digest and type that [`Writer::name`] has written.
fn read_name(name: &str) -> Result<(Digest, DType, Vec<usize>)> {
    let read = || {
        let (ty, digest) = name.rsplit_once(' ')?;
        let (dtype, shape) = ty.split_at(ty.find('[')?);
        let shape = shape.strip_prefix('[')?.strip_suffix(']')?;
        let dims = shape.split(',').map(str::trim).filter(|d| !d.is_empty());
        let dims = dims.map(|d| d.parse().ok()).collect::<Option<_>>()?;
        Some((digest.parse().ok()?, DType::parse(dtype)?, dims))
    };
    read().ok_or_else(|| Error::invalid(format!("{name:?} is not the name of a constant")))
}
