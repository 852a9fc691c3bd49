//! Attention of few queries.

use super::run::check_all;
use super::*;

/// Heads of queries, of which `n_shared` read the same keys and values.
struct Heads {
    dtype: DType,
    n: usize,
    n_shared: usize,
    n_queries: usize,
    n_keys: usize,
    depth: usize,
}

impl Heads {
    /// With a mask for each key, or without one.
    fn case(&self, rng: &mut Rng, is_masked: bool) -> Case {
        let Heads {
            dtype, n, depth, ..
        } = *self;
        let n_kept = n / self.n_shared;
        let mut b = GraphBuilder::new("heads");
        let q_shape = [2, n, self.n_queries, depth];
        let kv_shape = [2, n_kept, self.n_keys, depth];
        let mut inputs = vec![rng.tensor(dtype, &q_shape, -2.0, 2.0)];
        let mut operands = vec![b.input("q", dtype, q_shape)];
        for name in ["k", "v"] {
            inputs.push(rng.tensor(dtype, &kv_shape, -2.0, 2.0));
            let x = b.input(name, dtype, kv_shape);
            let x = b.reshape(x, [2, n_kept, 1, self.n_keys, depth]).unwrap();
            let x = b.broadcast(x, [2, n_kept, self.n_shared, self.n_keys, depth]);
            operands.push(b.reshape(x.unwrap(), [2, n, self.n_keys, depth]).unwrap());
        }
        if is_masked {
            let shape = [2, 1, 1, self.n_keys];
            inputs.push(rng.tensor(dtype, &shape, -1.0, 1.0));
            operands.push(b.input("mask", dtype, shape));
        }
        let op = Op::Attention {
            scale: Real(1.0 / (depth as f64).sqrt()),
            causal: false,
        };
        let y = b.add1(op, &operands).unwrap();
        let y = b.map(ScalarOp::Relu, &[y]).unwrap();
        b.output("y", y);
        let tolerance = match dtype {
            DType::F16 => 2f64.powi(-11),
            DType::BF16 => 2f64.powi(-8),
            _ => 1e-6,
        };
        Case {
            body: b.finish().unwrap(),
            inputs,
            tolerance,
        }
    }
}

/// One to four queries over keys that fill no step, one step, and parts; heads with keys of their own
/// and shared ones.
#[test]
fn keys_are_read_by_groups_of_threads() {
    let rng = &mut Rng(311);
    let mut all = Vec::new();
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        for (n, n_shared, n_queries, n_keys, depth) in [
            (2, 1, 1, 700, 64),
            (4, 2, 4, 70, 64),
            (3, 1, 2, 5, 128),
            (4, 4, 1, 600, 128),
            (1, 1, 3, 1, 32),
        ] {
            let heads = Heads {
                dtype,
                n,
                n_shared,
                n_queries,
                n_keys,
                depth,
            };
            all.extend([false, true].map(|is_masked| heads.case(rng, is_masked)));
        }
    }
    for case in &all {
        let listing = listing(&case.body);
        assert!(listing.contains("gm_weigh_few("), "{listing}");
    }
    check_all("attention of few queries", &all);
}

/// Keys and values are loaded 16 bytes at a time, eight of them ahead, and nothing is spilled.
#[test]
fn keys_are_loaded_ahead_in_vectors() {
    let Some(nvrtc) = nvrtc_or_left_out("machine code of attention of few queries") else {
        return;
    };
    let heads = Heads {
        dtype: DType::BF16,
        n: 32,
        n_shared: 1,
        n_queries: 1,
        n_keys: 32_768,
        depth: 128,
    };
    let shape = |n| vec![2, heads.n, n, heads.depth];
    let operand = |n| Tensor::zeros(DType::BF16, &shape(n)).unwrap();
    let op = Op::Attention {
        scale: Real(0.1),
        causal: false,
    };
    let [q, kv] = [heads.n_queries, heads.n_keys].map(operand);
    let g = as_cluster(&graph_of(&op, &[q, kv.clone(), kv]));
    for arch in ["sm_80", "sm_90a", "sm_120a"] {
        let made = generate(&g, Arch::parse(arch).unwrap()).unwrap();
        let compiled = nvrtc.compile(&made.units[0]).unwrap();
        let r = compiled.resources["gm_attention"];
        assert!(
            r.stack_bytes == 0 && r.spill_store_bytes == 0,
            "{arch}: {r:?}"
        );
        let Some(code) = machine_code(nvrtc, &compiled.cubin, "attention of few queries") else {
            return;
        };
        let loads = code.lines().filter(|l| l.contains(" LDG."));
        let loads: Vec<&str> = loads.collect();
        let wide = loads.iter().filter(|l| l.contains("LDG.E.128")).count();
        assert_eq!(wide, loads.len(), "{arch}: {}", loads.join("\n"));
        let code: Vec<&str> = code.lines().collect();
        let ahead = code.split(|l| l.contains(" BRA ") || l.contains(" BSSY "));
        let ahead = ahead.map(|part| part.iter().filter(|l| l.contains(" LDG.")).count());
        // Four keys and values.
        assert!(ahead.max() >= Some(8), "{arch}");
    }
}
