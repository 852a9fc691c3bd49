//! Case files, `tests/data/cases/*.ir`: graphs with inputs and expected results, run at every optimisation level, at every level of x86-64
//! that this CPU has and on an emulated GPU.
//!
//! The first lines of a case say why it is there; then one line `// NAME = VALUES` for each input and each output, whose elements
//! are separated by spaces. Results are compared exactly.

use crate::levels::cpu_levels;
use crate::multi_device::setup;
use gristmill::ir::{Graph, Type};
use gristmill::testing::nvrtc_or_left_out;
use gristmill::{TargetCpu, Tensor, interp};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// A graph and values by name.
struct Case {
    graph: Graph,
    values: BTreeMap<String, Vec<f64>>,
}

impl Case {
    fn read(path: &Path) -> Case {
        let text = std::fs::read_to_string(path).unwrap();
        let graph = Graph::parse(&text).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let values = text.lines().filter_map(values).collect();
        Case { graph, values }
    }

    fn tensor(&self, name: &str, ty: &Type) -> Tensor {
        let values = self.values.get(name);
        let values = values.unwrap_or_else(|| panic!("no line `// {name} = ..`"));
        let shape = ty.static_shape().expect("cases have static shapes");
        Tensor::from_f64s(ty.dtype, &shape, values).unwrap()
    }

    fn inputs(&self) -> Vec<Tensor> {
        let named = self.graph.inputs.iter().zip(&self.graph.input_names);
        named
            .map(|(&v, name)| self.tensor(name, self.graph.ty(v)))
            .collect()
    }

    fn outputs(&self) -> Vec<Tensor> {
        let outputs = self.graph.outputs.iter();
        outputs
            .map(|o| self.tensor(&o.name, self.graph.ty(o.value)))
            .collect()
    }

    fn check_on(&self, devices: &str, target_cpu: TargetCpu, name: &str) {
        for level in 0..=3 {
            let setup = setup(devices, level).with(|o| o.target_cpu = target_cpu);
            let compiled = setup.compile(&self.graph).unwrap();
            let executable = compiled.for_inputs(&self.inputs()).unwrap();
            let found = executable.run(&self.inputs()).unwrap().into_tensors();
            assert_eq!(
                self.outputs(),
                found,
                "{name} on {devices} ({target_cpu}) at level {level}"
            );
        }
    }
}

/// Name and elements of a line `// NAME = VALUES`.
fn values(line: &str) -> Option<(String, Vec<f64>)> {
    let (name, values) = line.strip_prefix("// ")?.split_once(" = ")?;
    let values = values.split(' ').map(|v| v.parse().expect("a number"));
    Some((name.to_owned(), values.collect()))
}

fn cases() -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("data/cases");
    let entries = std::fs::read_dir(folder).expect("the folder of cases is there");
    let mut paths: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    assert!(!paths.is_empty(), "there are cases");
    paths
}

#[test]
fn the_interpreter_gives_the_values_of_cases() {
    for path in cases() {
        let case = Case::read(&path);
        let found = interp::run(&case.graph, &case.inputs()).unwrap();
        assert_eq!(case.outputs(), found, "{}", path.display());
    }
}

#[test]
fn cases_on_a_cpu() {
    for path in cases() {
        for cpu in cpu_levels() {
            Case::read(&path).check_on("cpu:1", cpu, &path.display().to_string());
        }
    }
}

#[test]
fn cases_on_an_emulated_gpu() {
    if nvrtc_or_left_out("case files on an emulated GPU").is_none() {
        return;
    }
    for path in cases() {
        let name = path.display().to_string();
        Case::read(&path).check_on("emu:1", TargetCpu::Native, &name);
    }
}
