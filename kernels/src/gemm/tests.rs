//! Matrix products over random shapes, strides and epilogues, on every instruction set of this
//! machine.

use super::*;
use crate::epilogue::EpilogueKind;
use crate::pack::{PackBDesc, PackBatchDim, gm_pack_b_f32, pack_b, packed_len};
use crate::testing::{Rng, assert_close};

/// Value that no kernel may overwrite, put where no output belongs.
const UNTOUCHED: f32 = 12345.5;

struct Case {
    desc: GemmDesc,
    a: Vec<f32>,
    b: Vec<f32>,
    operands: Vec<Vec<f32>>,
    c: Vec<f32>,
}

/// A product with random strides and epilogue.
fn case(rng: &mut Rng, isa: Isa, m: usize, n: usize, k: usize) -> Case {
    let mut desc = GemmDesc::new(Isa::current(), m, n, k);
    desc.isa = isa as u32;
    desc.lda = k + rng.pick(&[0, 0, 3, 512]);
    desc.ldc = n + rng.pick(&[0, 0, 5]);
    let (outer, inner) = (rng.pick(&[1, 1, 2]), rng.pick(&[1, 1, 3]));
    let sizes = [m * desc.lda, packed_len(isa, k, n), m * desc.ldc];
    desc.batch[2] = dim(
        outer,
        [inner * sizes[0], inner * sizes[1], inner * sizes[2]],
    );
    desc.batch[3] = dim(inner, sizes);
    let n_batch = outer * inner;
    let mut operands = Vec::new();
    for _ in 0..rng.below(4) {
        let operand = operands.len() as u32;
        let kind = rng.pick(&[
            EpilogueKind::Add,
            EpilogueKind::Mul,
            EpilogueKind::Max,
            EpilogueKind::RSub,
        ]);
        let mut op = match rng.below(6) {
            0 => EpilogueOp::row_vec(kind, operand),
            1 => EpilogueOp::col_vec(kind, operand),
            2 => EpilogueOp::tensor(kind, operand, n as isize + 2),
            3 => EpilogueOp::unary(EpilogueKind::Relu, 0.0, 0.0),
            4 => EpilogueOp::unary(EpilogueKind::Clamp, -0.5, 0.5),
            _ => EpilogueOp::unary(EpilogueKind::HardSwish, 1.0 / 6.0, 0.5),
        };
        let size = m as isize * op.row_stride + n as isize * op.col_stride;
        op.batch_stride = [0, 0, inner as isize * size, size];
        operands.push(rng.vec(size as usize * n_batch));
        assert!(op.append_to(&mut desc.epilogue, &mut desc.n_epilogue));
    }
    if rng.below(2) == 0 {
        desc.plan(rng.pick(&[1, 2, 5]));
    } else {
        (desc.row_block, desc.panel_block) = (1 + rng.below(20), 1 + rng.below(4));
    }
    let a = rng.vec(sizes[0] * n_batch);
    let b = rng.vec(k * n * n_batch);
    Case {
        desc,
        a,
        b,
        operands,
        c: vec![UNTOUCHED; sizes[2] * n_batch],
    }
}

fn dim(extent: usize, sizes: [usize; 3]) -> BatchDim {
    BatchDim {
        extent,
        a_stride: sizes[0] as isize,
        b_stride: sizes[1] as isize,
        c_stride: sizes[2] as isize,
    }
}

/// Expected contents of `c`.
fn reference(case: &Case) -> Vec<f64> {
    let d = &case.desc;
    let mut out = vec![f64::from(UNTOUCHED); case.c.len()];
    for batch in 0..d.n_batch() {
        for i in 0..d.m {
            for j in 0..d.n {
                let a = &case.a[batch * d.m * d.lda + i * d.lda..];
                let b = &case.b[batch * d.k * d.n..];
                let mut x: f64 = (0..d.k)
                    .map(|kk| f64::from(a[kk]) * f64::from(b[kk * d.n + j]))
                    .sum();
                for op in &d.epilogue[..d.n_epilogue as usize] {
                    x = reference_op(op, x, batch, i, j, d, &case.operands);
                }
                out[batch * d.m * d.ldc + i * d.ldc + j] = x;
            }
        }
    }
    out
}

fn reference_op(
    op: &EpilogueOp,
    x: f64,
    batch: usize,
    i: usize,
    j: usize,
    d: &GemmDesc,
    operands: &[Vec<f32>],
) -> f64 {
    let idx = batch_index(batch, d.batch.map(|dim| dim.extent));
    let t = || {
        let offset: isize = idx
            .iter()
            .zip(op.batch_stride)
            .map(|(&i, stride)| i as isize * stride)
            .sum();
        f64::from(
            operands[op.operand as usize]
                [(offset + i as isize * op.row_stride + j as isize * op.col_stride) as usize],
        )
    };
    match EpilogueKind::from_u32(op.kind).expect("known kind") {
        EpilogueKind::Add => x + t(),
        EpilogueKind::Mul => x * t(),
        EpilogueKind::Max => x.max(t()),
        EpilogueKind::RSub => t() - x,
        EpilogueKind::Relu => x.max(0.0),
        EpilogueKind::Clamp => x.clamp(f64::from(op.p0), f64::from(op.p1)),
        EpilogueKind::HardSwish => x * (x / 6.0 + 0.5).clamp(0.0, 1.0),
        other => panic!("{other:?} has no reference here"),
    }
}

fn run(case: &mut Case, isa: Isa, splits: usize) {
    let (n, k) = (case.desc.n, case.desc.k);
    let n_batch = case.desc.n_batch();
    let mut packed = vec![f32::NAN; packed_len(isa, k, n) * n_batch];
    let mut pack = PackBDesc::new(Isa::current(), k, n, n as isize, 1);
    pack.isa = isa as u32;
    pack.batch[1] = PackBatchDim {
        extent: n_batch,
        b_stride: (k * n) as isize,
        packed_stride: packed_len(isa, k, n) as isize,
    };
    let ptrs = [
        case.b.as_ptr() as *mut u8,
        std::ptr::null_mut(),
        packed.as_mut_ptr().cast(),
    ];
    // SAFETY: the buffers have the sizes that the descriptor describes.
    let status = unsafe { gm_pack_b_f32(&pack, ptrs.as_ptr(), 0, pack.n_items()) };
    assert_eq!(status, OK);
    let mut ptrs = vec![
        case.a.as_ptr() as *mut u8,
        packed.as_ptr() as *mut u8,
        case.c.as_mut_ptr().cast(),
        std::ptr::null_mut(),
    ];
    ptrs.extend(
        case.operands
            .iter()
            .map(|operand| operand.as_ptr() as *mut u8),
    );
    let n_items = case.desc.n_items();
    for i in 0..splits {
        // SAFETY: as above; ranges are disjoint.
        let status = unsafe {
            gm_gemm_f32(
                &case.desc,
                ptrs.as_ptr(),
                i * n_items / splits,
                (i + 1) * n_items / splits,
            )
        };
        assert_eq!(status, OK);
    }
}

#[test]
fn products_agree_with_the_reference() {
    let mut rng = Rng(1);
    for isa in Isa::available() {
        for round in 0..300 {
            let m = rng.pick(&[0, 1, 2, 3, 4, 5, 7, 8, 13, 14, 15, 28, 33, 61]);
            let n = rng.pick(&[0, 1, 3, 8, 16, 17, 31, 32, 33, 64, 96, 127, 128, 161]);
            let k = rng.pick(&[0, 1, 2, 5, 16, 33]);
            let mut case = case(&mut rng, isa, m, n, k);
            let splits = rng.pick(&[1, 2, 3]);
            run(&mut case, isa, splits);
            assert_close(
                &case.c,
                &reference(&case),
                1e-5,
                &format!("{isa} round {round} {:?}", case.desc),
            );
        }
    }
}

/// Function of a kind: of `x`, the operand `t` and the parameters.
fn reference_kind(kind: EpilogueKind, x: f64, t: f64, p0: f64, p1: f64) -> f64 {
    use EpilogueKind as K;
    let function = |symbol: &str| {
        let function = crate::vmath::FUNCTIONS
            .iter()
            .find(|function| function.symbol == symbol)
            .expect("exported");
        (function.reference)(x)
    };
    match kind {
        K::Add => x + t,
        K::Sub => x - t,
        K::RSub => t - x,
        K::Mul => x * t,
        K::Div => x / t,
        K::RDiv => t / x,
        K::Max => x.max(t),
        K::Min => x.min(t),
        K::Range => x,
        K::AddScalar => x + p0,
        K::MulScalar => x * p0,
        K::Relu => x.max(0.0),
        K::Clamp => x.max(p0).min(p1),
        K::LeakyRelu => x.max(0.0) + p0 * x.min(0.0),
        K::HardSigmoid => (p0 * x + p1).clamp(0.0, 1.0),
        K::HardSwish => x * (p0 * x + p1).clamp(0.0, 1.0),
        K::Neg => -x,
        K::Abs => x.abs(),
        K::Square => x * x,
        K::Sqrt => x.sqrt(),
        K::Reciprocal => 1.0 / x,
        K::Rsqrt => 1.0 / x.sqrt(),
        K::Elu => {
            if x < 0.0 {
                p0 * x.exp_m1()
            } else {
                x
            }
        }
        K::Exp => x.exp(),
        K::Log => x.ln(),
        K::Tanh => x.tanh(),
        K::Erf => function("gm_verf_f32"),
        K::Sigmoid => function("gm_vsigmoid_f32"),
        K::Silu => function("gm_vsilu_f32"),
        K::Gelu => function("gm_vgelu_f32"),
        K::GeluTanh => function("gm_vgelu_tanh_f32"),
        K::Softplus => function("gm_vsoftplus_f32"),
        K::Mish => function("gm_vmish_f32"),
    }
}

#[test]
fn every_epilogue_kind_computes_what_it_says() {
    let mut rng = Rng(4);
    let (m, n) = (5, 37);
    for isa in Isa::available() {
        for &kind in EpilogueKind::ALL {
            // Alone, and as the second op on a tile that already left the registers.
            for first in [
                None,
                Some(EpilogueOp::unary(EpilogueKind::MulScalar, 1.0, 0.0)),
            ] {
                let mut desc = GemmDesc::new(isa, m, n, 1);
                assert!(
                    first.is_none_or(|op| op.append_to(&mut desc.epilogue, &mut desc.n_epilogue))
                );
                let op = EpilogueOp {
                    p0: 0.25,
                    p1: 0.5,
                    ..EpilogueOp::tensor(kind, 0, n as isize)
                };
                assert!(op.append_to(&mut desc.epilogue, &mut desc.n_epilogue));
                let a: Vec<f32> = rng.vec(m).iter().map(|a| a * 4.0).collect();
                let (b, t, next) = (rng.vec(n), rng.vec(m * n), rng.vec(1));
                let mut case = Case {
                    desc,
                    a,
                    b,
                    operands: vec![t, next],
                    c: vec![UNTOUCHED; m * n],
                };
                run(&mut case, isa, 1);
                let want: Vec<f64> = (0..m * n)
                    .map(|i| {
                        let x = case.a[i / n] * case.b[i % n];
                        reference_kind(
                            kind,
                            f64::from(x),
                            f64::from(case.operands[0][i]),
                            0.25,
                            0.5,
                        )
                    })
                    .collect();
                assert_close(&case.c, &want, 2e-6, &format!("{isa} {kind:?}"));
            }
        }
    }
}

#[test]
fn the_range_of_all_tiles_is_noted() {
    let mut rng = Rng(41);
    for isa in Isa::available() {
        for (m, n, k) in [
            (1, 1, 1),
            (5, 3, 9),
            (13, 70, 31),
            (97, 130, 8),
            (9, 40, 9000),
        ] {
            let mut case = case(&mut rng, isa, m, n, k);
            let (epilogue, n_ops) = (&mut case.desc.epilogue, &mut case.desc.n_epilogue);
            *n_ops = 0;
            let add = EpilogueOp::unary(EpilogueKind::AddScalar, 0.5, 0.0);
            let ops = [add, EpilogueOp::range(0)];
            assert!(ops.into_iter().all(|op| op.append_to(epilogue, n_ops)));
            case.operands = vec![vec![f32::INFINITY], vec![f32::NEG_INFINITY]];
            run(&mut case, isa, 2);
            let all = case.c.iter().copied().filter(|&c| c != UNTOUCHED);
            let least = all.clone().fold(f32::INFINITY, f32::min);
            let most = all.fold(f32::NEG_INFINITY, f32::max);
            assert_eq!(case.operands, [[least], [most]], "{isa} {m} x {n} x {k}");
        }
    }
}

#[test]
fn long_sums_are_split_and_accumulated() {
    let mut rng = Rng(2);
    for isa in Isa::available() {
        for (m, n) in [(1, 40), (9, 33)] {
            let k = 128 * 1024 / isa.nr() * 2 + 5;
            let mut case = case(&mut rng, isa, m, n, k);
            run(&mut case, isa, 2);
            assert_close(
                &case.c,
                &reference(&case),
                2e-4,
                &format!("{isa} {m} x {n} x {k}"),
            );
        }
    }
}

/// Also for instruction sets that this CPU lacks: weights are packed for other machines, too.
#[test]
fn packing_agrees_with_pack_b_for_any_strides() {
    let mut rng = Rng(3);
    for isa in Isa::ALL {
        for (k, n) in [
            (0, 3),
            (1, 1),
            (5, 17),
            (16, 32),
            (33, 70),
            (64, 64),
            (31, 100),
        ] {
            for transposed in [false, true] {
                let (rs, cs) = if transposed { (1, k + 3) } else { (n + 2, 1) };
                let b = rng.vec(k * rs + n * cs + 1);
                let want = pack_b(isa, k, n, &b, rs, cs);
                let mut got = vec![f32::NAN; packed_len(isa, k, n)];
                let desc = PackBDesc::new(isa, k, n, rs as isize, cs as isize);
                let ptrs = [
                    b.as_ptr() as *mut u8,
                    std::ptr::null_mut(),
                    got.as_mut_ptr().cast(),
                ];
                // SAFETY: the buffers have the sizes that the descriptor describes.
                let status = unsafe { gm_pack_b_f32(&desc, ptrs.as_ptr(), 0, desc.n_items()) };
                assert_eq!(status, OK);
                assert_eq!(got, want, "{isa} {k} x {n} transposed {transposed}");
            }
        }
    }
}

#[test]
fn every_item_is_covered_once_by_a_plan() {
    for (m, n, k, batch, threads) in [
        (512, 512, 512, 1, 1),
        (1, 3072, 768, 1, 2),
        (3136, 64, 64, 1, 2),
        (128, 64, 128, 24, 8),
        (7, 1, 1, 1, 16),
        (4096, 4096, 4096, 1, 4),
    ] {
        let (rows, panels) = plan_blocks(m, n, k, batch, 32, threads);
        assert!(rows >= 1 && panels >= 1);
        assert!(
            rows <= m && panels <= n.div_ceil(32),
            "{m} {n} {k}: {rows} rows, {panels} panels"
        );
    }
}

#[test]
fn a_row_is_shared_where_its_weights_are_large() {
    let items = |n: usize, k| {
        let (_, panels) = plan_blocks(1, n, k, 1, 32, 2);
        n.div_ceil(32).div_ceil(panels)
    };
    assert_eq!(items(128, 128), 1, "64 KiB");
    assert_eq!(items(768, 256), 2, "768 KiB");
    assert_eq!(items(768, 768), 8, "2.3 MB");
    assert_eq!(items(3072, 768), 8);
}

#[test]
fn nonsense_is_refused() {
    let mut desc = GemmDesc::new(Isa::current(), 1, 1, 1);
    let ptrs = [std::ptr::null_mut::<u8>(); 4];
    desc.row_block = 0;
    // SAFETY: a refused descriptor reads nothing else.
    assert_eq!(unsafe { gm_gemm_f32(&desc, ptrs.as_ptr(), 0, 1) }, INVALID);
    desc = GemmDesc {
        isa: 99,
        ..GemmDesc::new(Isa::current(), 1, 1, 1)
    };
    // SAFETY: as above.
    let status = unsafe { gm_gemm_f32(&desc, ptrs.as_ptr(), 0, 1) };
    assert_eq!(status, UNSUPPORTED_ISA);
}
