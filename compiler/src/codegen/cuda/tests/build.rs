//! Many kernels in few translation units: compiling each on its own would take most of a test's time for the prelude.

use crate::codegen::cuda::nvrtc::Unit;
use crate::codegen::cuda::{Generated, Options, PRELUDE, generate_with};
use crate::ir::Graph;
use std::collections::HashMap;

/// Kernels per unit.
const PER_UNIT: usize = 40;

/// Distinct kernels of many graphs.
pub struct Batch {
    options: Options,
    /// Text and entry of each kernel, and the unit and name under which it is compiled; those of 64-bit indices apart.
    known: HashMap<String, Place>,
    units: Vec<Open>,
}

/// Begin of the names of functions that a kernel of [`Batch`] is made of.
pub fn part_of(entry: &str) -> String {
    format!("part_of_{entry}_")
}

/// Where a kernel is.
#[derive(Clone, Debug)]
pub struct Place {
    pub unit: usize,
    pub entry: String,
}

struct Open {
    index_type: String,
    text: String,
    n_kernels: usize,
}

impl Batch {
    pub fn new(options: impl Into<Options>) -> Batch {
        Batch {
            options: options.into(),
            known: HashMap::new(),
            units: Vec::new(),
        }
    }

    /// Generates a graph's kernels in one of their forms; gives them, and the place of each of their sources.
    pub fn add(&mut self, graph: &Graph, form: u8) -> (Generated, Vec<Place>) {
        let options = Options {
            form,
            ..self.options
        };
        let made = generate_with(graph, options).unwrap_or_else(|e| panic!("{graph}\n{e}"));
        let entry_of = |code: usize| {
            made.kernels
                .iter()
                .find(|k| k.code == code)
                .expect("a source has a kernel")
        };
        let places = (made.units.iter().enumerate())
            .map(|(i, u)| {
                self.place(
                    u.source.strip_prefix(PRELUDE).expect("it begins so"),
                    &entry_of(i).entry,
                )
            })
            .collect();
        (made, places)
    }

    fn place(&mut self, kernel: &str, entry: &str) -> Place {
        if let Some(found) = self.known.get(kernel) {
            return found.clone();
        }
        let (index_type, rest) = kernel
            .trim_start()
            .split_once("\n\n")
            .expect("index types come first");
        let name = format!("{entry}_{}", self.known.len());
        let declared = format!("\n{entry}(");
        assert_eq!(rest.matches(&declared).count(), 1, "{kernel}");
        let text = rest.replace(&declared, &format!("\n{name}("));
        let text = match entry {
            "gm_bundle" => text.replace("part", &part_of(&name)),
            _ => text,
        };
        let fits = |u: &Open| u.n_kernels < PER_UNIT && u.index_type == index_type;
        let unit = self.units.iter().position(fits).unwrap_or_else(|| {
            self.units.push(Open {
                index_type: index_type.to_owned(),
                text: String::new(),
                n_kernels: 0,
            });
            self.units.len() - 1
        });
        self.units[unit].text.push_str(&text);
        self.units[unit].n_kernels += 1;
        let place = Place { unit, entry: name };
        self.known.insert(kernel.to_owned(), place.clone());
        place
    }

    /// The units so far.
    pub fn units(&self) -> Vec<Unit> {
        let unit = |(i, u): (usize, &Open)| Unit {
            source: format!("{PRELUDE}\n{}\n\n{}", u.index_type, u.text),
            name: format!("batch{i}.cu"),
            arch: self.options.arch,
        };
        self.units.iter().enumerate().map(unit).collect()
    }
}
