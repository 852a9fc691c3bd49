//! The code of small bodies, pinned: vector plans and task calls, Cranelift IR and program, for `x86-64-v3` and one thread. A refactoring
//! changes none of them.

use crate::TargetCpu;
use crate::cost::DeviceProfile;
use crate::ir::Graph;
use crate::pipeline::{Stage, lower};
use crate::testing::Setup;
use gristmill_kernels::Isa;

/// Name and graph of each case.
fn cases() -> Vec<(String, Graph)> {
    let cases = include_str!("pinned.txt").split("## ").skip(1);
    cases.map(case).collect()
}

fn case(text: &str) -> (String, Graph) {
    let (name, body) = text.split_once('\n').expect("a name, then the graph");
    let parsed = Graph::parse(&format!("graph \"{name}\" {{\n{body}}}"));
    (
        name.to_owned(),
        parsed.unwrap_or_else(|e| panic!("{name}: {e}")),
    )
}

/// One core with AVX2, whatever this machine has.
fn setup() -> Setup {
    let mut setup = Setup::on("cpu:1", 1);
    setup.settings.devices.devices[0].profile = DeviceProfile::cpu(Isa::Avx2, 1);
    setup.with(|o| {
        o.target_cpu = TargetCpu::parse("x86-64-v3").unwrap();
        o.keep_stages = true;
    })
}

fn code(graph: Graph) -> String {
    let lowered = lower(graph, setup().config()).unwrap();
    let clif = lowered.text(Stage::Clif, false).unwrap();
    format!("{clif}\n{}", lowered.program)
}

#[cfg(target_arch = "x86_64")]
#[test]
fn code_of_small_bodies_is_as_pinned() {
    let mut settings = insta::Settings::clone_current();
    settings.set_prepend_module_to_snapshot(false);
    settings.set_snapshot_path("pinned");
    let _guard = settings.bind_to_scope();
    let cases = cases();
    assert!(cases.len() >= 20);
    for (name, graph) in cases {
        insta::assert_snapshot!(name, code(graph));
    }
}
