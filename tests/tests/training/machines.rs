//! The place of variables for which TensorFlow's guide to its performance gave advice, on the machines of `benches/machines`: by
//! predicted time, of training with variables on the CPU, dealt over the GPUs, or on each of them.

use super::machine_models;
use gristmill::place::Target;
use gristmill::train::Comparison;
use std::path::Path;

fn compared(machine: &str, model: &str) -> Comparison {
    let file = format!("../benches/machines/{machine}.toml");
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(file);
    let target = Target::parse(&std::fs::read_to_string(path).unwrap()).unwrap();
    machine_models::compared(&target, model, 32).unwrap()
}

/// Steps in ns with the variables on the CPU, dealt over the GPUs, and on each of all GPUs.
fn steps(compared: &Comparison) -> [u64; 3] {
    let step = |name: &str| {
        let mut own = compared.fixed.iter().filter(|p| p.strategy.name() == name);
        own.next_back().unwrap().step_ns
    };
    ["central", "parameter-server", "mirrored"].map(step)
}

/// "Tesla K80: If the GPUs are on the same PCI Express and are able to communicate using NVIDIA GPUDirect Peer to Peer, we place the
/// variables equally across the GPUs. Otherwise, we place the variables on the CPU."
#[test]
fn variables_of_k80s_are_on_gpus_with_peer_access_and_else_on_the_cpu() {
    let compared = ["k80_peer", "k80"].map(|machine| compared(machine, "alexnet"));
    let [peers, others] = [&compared[0], &compared[1]].map(steps);
    let [central, dealt, _] = peers;
    assert!(dealt < central, "{}", compared[0]);
    let [central, dealt, mirrored] = others;
    assert!(central < dealt && central < mirrored, "{}", compared[1]);
}

/// "Titan X, P100: For models like ResNet and InceptionV3, placing variables on the CPU. But for models with a lot of variables like
/// AlexNet and VGG, using GPUs with NCCL is better." On each GPU is what NCCL serves.
#[test]
fn variables_of_p100s_are_on_each_gpu_where_there_are_many() {
    let many = compared("p100", "alexnet");
    let [central, dealt, mirrored] = steps(&many);
    assert!(mirrored < central && mirrored < dealt, "{many}");
    let few = compared("p100", "blocks");
    let [central, _, mirrored] = steps(&few);
    assert!(central < mirrored, "{few}");
}
