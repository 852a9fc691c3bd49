//! Instructions by target: code for a level of x86-64 uses the encodings of that level.

use super::harness::compile_listed;
use crate::TargetCpu;
use crate::codegen::cpu::Options;
use crate::codegen::testing::as_cluster;
use crate::ir::{Graph, GraphBuilder, ScalarOp};
use gristmill_runtime::DType;

/// `x * x + x` over 1,000 elements, which runs in vectors.
fn polynomial() -> Graph {
    let mut b = GraphBuilder::new("polynomial");
    let x = b.input("x", DType::F32, [1000usize]);
    let square = b.map(ScalarOp::Mul, &[x, x]).unwrap();
    let y = b.map(ScalarOp::Add, &[square, x]).unwrap();
    b.output("y", y);
    b.finish().unwrap()
}

/// The listing for a target, which this machine need not run.
fn listing(target: TargetCpu) -> String {
    let options = Options {
        target,
        listings: true,
        ..Options::default()
    };
    let compiled = compile_listed(&mut as_cluster(&polynomial()), &options);
    compiled.unwrap().1.asm
}

/// Mnemonics of a listing that compute on vectors of `f32`.
fn vector_mnemonics(asm: &str) -> Vec<&str> {
    let mnemonics = asm.lines().filter_map(|l| l.split_whitespace().next());
    let on_vectors = |m: &&str| m.ends_with("mulps") || m.ends_with("addps");
    mnemonics.filter(on_vectors).collect()
}

#[cfg(target_arch = "x86_64")]
#[test]
fn vector_code_from_v3_on_is_vex_encoded() {
    for name in ["x86-64-v3", "x86-64-v4"] {
        let asm = listing(TargetCpu::parse(name).unwrap());
        let mnemonics = vector_mnemonics(&asm);
        assert!(!mnemonics.is_empty(), "no vector code for {name}:\n{asm}");
        let has_vex = mnemonics.iter().all(|m| m.starts_with('v'));
        assert!(has_vex, "{mnemonics:?} for {name}:\n{asm}");
    }
}

#[cfg(target_arch = "x86_64")]
#[test]
fn vector_code_for_v2_is_not() {
    let asm = listing(TargetCpu::parse("x86-64-v2").unwrap());
    let mnemonics = vector_mnemonics(&asm);
    let has_legacy_encoding = mnemonics.iter().all(|m| !m.starts_with('v'));
    assert!(!mnemonics.is_empty() && has_legacy_encoding, "{asm}");
}
