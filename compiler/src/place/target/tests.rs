//! Profiles are read strictly; plans for absent machines can be made, not run.

use super::*;
use crate::ir::{Graph, GraphBuilder};
use crate::testing::Setup;
use crate::{ErrorKind, Tensor, pipeline};

const GPUS: &str = r#"
format = "gristmill/profile/1"
name = "one host, two GPUs"
[[device]]
kind = "cpu"
threads = 8
memory_bytes_per_second = 5e10
cache_bytes = 8_000_000
cache_bytes_per_second = 8e11
launch_ns = 400
flops_per_second = { f32 = 1e12 }
[[device]]
kind = "gpu"
count = 2
memory_bytes = 80_000_000_000
memory_bytes_per_second = 3e12
cache_bytes = 50_000_000
cache_bytes_per_second = 5e12
launch_ns = 3_000
flops_per_second = { f32 = 6e13, f16 = 9e14 }
efficiency = { matmul = 0.7, matmul_f16 = 0.5 }
[[link]]
from = "any"
to = "any"
latency_ns = 8_000
bytes_per_second = 5e10
[[link]]
from = "gpu"
to = "/device:GPU:1"
latency_ns = 2_000
bytes_per_second = 4e11
"#;

#[test]
fn a_profile_becomes_devices_and_links() {
    let target = Target::parse(GPUS).unwrap();
    let set = &target.devices;
    let names: Vec<String> = set.devices.iter().map(|d| d.name.to_string()).collect();
    assert_eq!(names, ["/device:CPU:0", "/device:GPU:0", "/device:GPU:1"]);
    let gpu = &set.devices[1];
    assert_eq!(
        (gpu.memory_limit, gpu.profile.launch),
        (Some(Bytes(80_000_000_000)), Nanos(3_000))
    );
    assert_eq!(
        (
            gpu.profile.peak_flops(DType::F32),
            gpu.profile.peak_flops(DType::F16)
        ),
        (6e13, 9e14)
    );
    assert_eq!(gpu.profile.efficiency(WorkClass::MatMul, DType::F32), 0.7);
    assert_eq!(gpu.profile.efficiency(WorkClass::MatMul, DType::F16), 0.5);
    assert_eq!(gpu.profile.efficiency(WorkClass::Map, DType::F16), 0.3);
    assert_eq!(set.links.len(), 6);
    assert_eq!(
        set.links[&(1, 2)],
        LinkProfile {
            latency: Nanos(2_000),
            bytes_per_second: 400_000_000_000
        }
    );
    assert_eq!(
        set.links[&(2, 1)],
        LinkProfile {
            latency: Nanos(8_000),
            bytes_per_second: 50_000_000_000
        }
    );
}

#[test]
fn wrong_profiles_say_where() {
    let errors: Vec<String> = [
        ("name = \"one", "nam = \"one"),
        ("profile/1", "profile/2"),
        ("kind = \"gpu\"", "kind = \"tpu\""),
        ("launch_ns = 400\n", ""),
        ("launch_ns = 400", "launch_us = 1"),
        ("f32 = 1e12", "f23 = 1e12"),
        ("f32 = 1e12", "f64 = 1e12"),
        ("matmul = 0.7", "mathmul = 0.7"),
        ("matmul = 0.7", "matmul = 1.7"),
        (
            "memory_bytes_per_second = 5e10",
            "memory_bytes_per_second = nan",
        ),
        ("count = 2", "count = 0"),
        ("to = \"any\"", "to = \"cpu\""),
        ("GPU:1\"", "GPU:2\""),
        ("[[link]]", "[[link]"),
    ]
    .map(|(from, to)| {
        Target::parse(&GPUS.replacen(from, to, 1))
            .unwrap_err()
            .to_string()
    })
    .into();
    insta::assert_snapshot!(errors.join("\n"), @r#"
    line 3: unknown field `nam`, expected one of `format`, `name`, `device`, `link`
    line 2: format "gristmill/profile/2", expected "gristmill/profile/1"
    line 13: unknown kind of device "tpu"; known: cpu, gpu, emu
    line 4: missing field `launch_ns`
    line 10: unknown field `launch_us`, expected one of `kind`, `count`, `threads`, `lanes`, `memory_bytes`, `memory_bytes_per_second`, `cache_bytes`, `cache_bytes_per_second`, `launch_ns`, `flops_per_second`, `efficiency`
    line 11: unknown dtype "f23"; known: f32, f64, f16, bf16, f8e4m3fn, f8e4m3fnuz, f8e5m2, f8e5m2fnuz, i8, i16, i32, i64, u8, u16, u32, u64, bool (try: f32)
    line 4: flops_per_second needs f32
    line 21: unknown class "mathmul"; known: map, reduce, matmul, conv, window, attention, gather, scatter, sort, scan (try: matmul)
    line 21: matmul = 1.7, expected more than 0 and at most 1
    line 7: memory_bytes_per_second = NaN, expected 1 to 1e18
    line 14: count = 0, expected 1 to 1024
    no link from /device:CPU:0 to /device:GPU:0 (try: [[link]] with from = "any" and to = "any")
    line 29: "/device:GPU:2" names no device of this profile
    line 22: unclosed array table, expected `]`
    "#);
}

fn on(profile: &str) -> Setup {
    let mut setup = Setup::default();
    setup.settings.devices = Target::parse(profile).unwrap().devices;
    setup
}

fn planned(graph: Graph, setup: &Setup) -> crate::Result<pipeline::Planned> {
    pipeline::plan(pipeline::fused(graph, setup.config())?, setup.config())
}

/// A chain of products, heavy enough for an accelerator.
fn chain() -> Graph {
    let mut b = GraphBuilder::new("chain");
    let mut x = b.input("x", DType::F32, [256usize, 512]);
    for _ in 0..3 {
        let w = b.constant(Tensor::zeros(DType::F32, &[512, 512]).unwrap());
        x = b.matmul(x, w).unwrap();
        x = b.map(crate::ir::ScalarOp::Exp, &[x]).unwrap();
    }
    b.output("y", x);
    b.finish().unwrap()
}

#[test]
fn absent_devices_are_planned_for_but_do_not_run() {
    let mut setup = on(GPUS);
    let planned = planned(chain(), &setup).unwrap();
    let on_gpu = planned
        .placement
        .nodes
        .iter()
        .flatten()
        .filter(|p| p.device > 0)
        .count();
    assert!(
        on_gpu > 0,
        "{}",
        planned.placement.to_text(&planned.clusters)
    );
    setup.settings.gpus = vec![1000, 1001];
    let error = pipeline::lower(chain(), setup.config())
        .err()
        .expect("no machine has so many GPUs");
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    let text = error.to_string();
    assert!(
        text.starts_with("the plan has 3 nodes on a GPU: /device:GPU:0 is not there: "),
        "{text}"
    );
}

#[test]
fn links_of_the_profile_count() {
    let slow = GPUS.replace("latency_ns = 8_000", "latency_ns = 800_000_000");
    let planned = planned(chain(), &on(&slow)).unwrap();
    let devices: std::collections::BTreeSet<usize> = planned
        .placement
        .nodes
        .iter()
        .flatten()
        .map(|p| p.device)
        .collect();
    assert_eq!(devices.len(), 1, "no transfer of 0.8 s pays");
}

#[test]
fn a_time_beyond_the_placers_largest_is_the_profiles_fault() {
    let slow = GPUS.replace("launch_ns = 3_000", "launch_ns = 100_000_000_000_000_000");
    let error = planned(chain(), &on(&slow))
        .err()
        .expect("no sum of such times fits");
    assert_eq!(error.kind(), ErrorKind::InvalidInput);
    let text = error.to_string();
    assert!(
        text.contains("its predicted time on /device:GPU:0 is more than 17592186044416 ns"),
        "{text}"
    );
}
