//! Families of kernels: checked small, timed large.

use super::ceilings::Ceilings;
use super::families::{ALL, Family, Work};
use super::{Arguments, setup};
use gristmill::interp;
use gristmill::interp::compare::allclose;
use gristmill::ir::Graph;
use gristmill::testing::{Rng, random_indices, random_tensor};
use gristmill::{DType, Error, Result, Tensor};
use std::time::Duration;

/// Every family; false when one gives wrong results.
pub fn run(arguments: &Arguments, ceilings: &Ceilings) -> Result<bool> {
    println!("family\tagainst interpreter\tagainst emulator\ttime\trate\tof the ceiling");
    let mut good = true;
    for family in ALL {
        let check = check(family, arguments.device)?;
        let rate = if arguments.quick {
            "left out\t\t".to_owned()
        } else {
            time(family, arguments.device, ceilings)?
        };
        println!(
            "{}\t{}\t{}\t{rate}",
            family.name, check.interpreter, check.emulator
        );
        good &= check.good;
    }
    Ok(good)
}

struct Check {
    interpreter: String,
    emulator: String,
    good: bool,
}

fn check(family: &Family, device: u32) -> Result<Check> {
    let (graph, _) = (family.make)(1)?;
    let inputs = inputs(&graph, &mut Rng(7))?;
    let expected = interp::run(&graph, &inputs)?;
    let on = |devices: &str| -> Result<Vec<Tensor>> {
        let compiled = setup(devices, device)?.compile(&graph)?;
        let executable = compiled.for_inputs(&inputs)?;
        // Asked for step by step, captured, and launched as a graph.
        let mut found = executable.run(&inputs)?;
        for _ in 0..2 {
            found = executable.run(&inputs)?;
        }
        Ok(found.into_tensors())
    };
    let (on_gpu, emulated) = (on("gpu:1")?, on("emu:1")?);
    let (interpreter, right) = compare(&expected, &on_gpu, family.tolerance);
    let (emulator, same) = compare(&emulated, &on_gpu, family.tolerance);
    Ok(Check {
        interpreter,
        emulator,
        good: right && same,
    })
}

/// The largest error relative to the tensors' scale, as text, and true when it is tolerated.
fn compare(expected: &[Tensor], found: &[Tensor], tolerance: f64) -> (String, bool) {
    let compare = |(e, f)| {
        let c = allclose(e, f, 0.0, 0.0);
        (
            c.ok || c.scaled_err() <= tolerance,
            if c.ok { 0.0 } else { c.scaled_err() },
        )
    };
    let all: Vec<(bool, f64)> = expected.iter().zip(found).map(compare).collect();
    let good = expected.len() == found.len() && all.iter().all(|(good, _)| *good);
    let worst = all.iter().fold(0.0, |worst: f64, (_, err)| worst.max(*err));
    (
        format!("{} ({worst:.1e})", if good { "good" } else { "WRONG" }),
        good,
    )
}

/// Random elements, the same ones again and again in a large tensor: a billion of them would take minutes to draw.
fn repeated(rng: &mut Rng, dtype: DType, shape: &[usize]) -> Result<Tensor> {
    const DRAWN: usize = 1 << 20;
    let n: usize = shape.iter().product();
    if n <= DRAWN {
        return Ok(random_tensor(rng, dtype, shape, false));
    }
    let drawn = random_tensor(rng, dtype, &[DRAWN], false);
    let mut whole = Tensor::zeros(dtype, shape)?;
    whole
        .as_bytes_mut()
        .chunks_mut(drawn.size_bytes())
        .for_each(|part| {
            part.copy_from_slice(&drawn.as_bytes()[..part.len()]);
        });
    Ok(whole)
}

/// Random inputs; 64-bit integers are indices of axis 0 of the first input.
pub fn inputs(graph: &Graph, rng: &mut Rng) -> Result<Vec<Tensor>> {
    let shape_of = |v| {
        let ty: &gristmill::ir::Type = graph.ty(v);
        ty.static_shape()
            .ok_or_else(|| Error::internal("families have static shapes"))
            .map(|s| (ty.dtype, s))
    };
    let (_, first) = shape_of(graph.inputs[0])?;
    let tensor = |&v| {
        let (dtype, shape) = shape_of(v)?;
        Ok(match dtype {
            DType::I64 => random_indices(rng, dtype, &shape, first[0]),
            _ => repeated(rng, dtype, &shape)?,
        })
    };
    graph.inputs.iter().map(tensor).collect()
}

/// Time of the large graph's kernels, and the rate that follows.
fn time(family: &Family, device: u32, ceilings: &Ceilings) -> Result<String> {
    let (graph, work) = (family.make)(family.large)?;
    let inputs = inputs(&graph, &mut Rng(8))?;
    let compiled = setup("gpu:1", device)?.compile(&graph)?;
    let executable = compiled.for_inputs(&inputs)?;
    executable.run(&inputs)?;
    let times = executable.time_kernels(Duration::from_millis(50))?;
    let ns = times.iter().map(|t| t.ns).sum::<u64>().max(1) as f64;
    Ok(rate(family, &work, ns, ceilings).join("\t"))
}

/// Time, rate and share of the ceiling of a family's graph.
pub fn rate(family: &Family, work: &Work, ns: f64, ceilings: &Ceilings) -> [String; 3] {
    let time = format!("{:.3} ms", ns / 1e6);
    match work {
        Work::Bytes(bytes) => {
            let share = 100.0 * bytes / ns / ceilings.copy_gb_s;
            let share = format!("{share:.0} % of the copy");
            [time, format!("{:.0} GB/s", bytes / ns), share]
        }
        Work::Flops(flops) => {
            let rate = flops / ns / 1e3;
            // By size, and of the one type for which there is a ceiling.
            let ceiling = ceilings
                .bf16_tflop_s
                .iter()
                .find(|(n, _)| family.name == format!("matmul_bf16_{n}"));
            let share = ceiling.map_or(String::new(), |(_, c)| {
                format!("{:.0} % of cuBLASLt", 100.0 * rate / c)
            });
            [time, format!("{rate:.1} TFLOP/s"), share]
        }
    }
}
