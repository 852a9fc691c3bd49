//! Products by tensor cores.
//!
//! Products of half types are exact in `f32`, and so are sums but for its rounding. Each of the followers rounds to the half type again, and a
//! sum on the edge may fall to the other side: that moves what follows by one unit in the last place of the greatest magnitude. Operands that
//! are rounded to tf32 are off by up to 2^-11 of theirs, so their products by 2^-10.

use super::run::check_with;
use super::*;
use crate::codegen::cuda::{Options, generate_with};
use crate::codegen::testing::Case;

/// What products of a dtype and their followers may be off by, relative to the greatest magnitude.
pub(super) fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::F16 | DType::F32 => 0.5f64.powi(10),
        DType::BF16 => 0.5f64.powi(7),
        _ => 0.0,
    }
}

/// How an operand of a product is stored.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Stored {
    /// As it is.
    Rows,
    /// Transposed.
    Columns,
    /// With an op in front that has to be pulled.
    Computed,
}

/// `lhs rhs` of `[lead.., m, k]` and `[lead.., k, n]`, in which leading axes broadcast.
struct Product<'a> {
    dtype: DType,
    lead: [&'a [usize]; 2],
    sizes: [usize; 3],
    stored: [Stored; 2],
}

impl Product<'_> {
    /// `relu(lhs rhs + bias) + residual`, with what the result's followers read in the product's dtype.
    fn case(&self, rng: &mut Rng) -> Case {
        let [m, k, n] = self.sizes;
        let mut b = GraphBuilder::new("product");
        let mut inputs = Vec::new();
        let mut operands = Vec::new();
        for (i, (rows, columns)) in [(m, k), (k, n)].into_iter().enumerate() {
            let stored = self.stored[i];
            let pair = if stored == Stored::Columns {
                [columns, rows]
            } else {
                [rows, columns]
            };
            let shape: Vec<usize> = self.lead[i].iter().copied().chain(pair).collect();
            inputs.push(rng.tensor(self.dtype, &shape, -2.0, 2.0));
            let v = b.input(&format!("x{i}"), self.dtype, shape.iter().copied());
            operands.push(match stored {
                Stored::Rows => v,
                Stored::Columns => {
                    let last = shape.len() - 1;
                    let perm: Vec<usize> = (0..last - 1).chain([last, last - 1]).collect();
                    b.transpose(v, &perm).unwrap()
                }
                Stored::Computed => b.map(ScalarOp::Neg, &[v]).unwrap(),
            });
        }
        let y = b.matmul(operands[0], operands[1]).unwrap();
        inputs.push(rng.tensor(self.dtype, &[n], -2.0, 2.0));
        let bias = b.input("bias", self.dtype, [n]);
        inputs.push(rng.tensor(self.dtype, &[m, n], -2.0, 2.0));
        let residual = b.input("residual", self.dtype, [m, n]);
        let y = b.add_(y, bias).unwrap();
        let y = b.map(ScalarOp::Relu, &[y]).unwrap();
        let y = b.add_(y, residual).unwrap();
        b.output("y", y);
        Case {
            body: b.finish().unwrap(),
            inputs,
            tolerance: tolerance(self.dtype),
        }
    }
}

/// Every way to store operands, in whole, ragged and unaligned sizes and in batches.
fn layouts(rng: &mut Rng, dtypes: &[DType]) -> Vec<Case> {
    use Stored::*;
    let mut all = Vec::new();
    for &dtype in dtypes {
        for (i, stored) in [
            [Rows, Rows],
            [Rows, Columns],
            [Columns, Rows],
            [Columns, Columns],
        ]
        .into_iter()
        .enumerate()
        {
            for sizes in [[64, 64, 64], [72, 40, 88], [33, 70, 65]] {
                all.push(
                    Product {
                        dtype,
                        lead: [&[], &[]],
                        sizes,
                        stored,
                    }
                    .case(rng),
                );
            }
            let lead: [&[usize]; 2] = [
                [&[2, 3][..], &[3]],
                [&[2, 1], &[3]],
                [&[3], &[]],
                [&[2, 1], &[2, 3]],
            ][i];
            all.push(
                Product {
                    dtype,
                    lead,
                    sizes: [40, 24, 16],
                    stored,
                }
                .case(rng),
            );
        }
        for stored in [[Computed, Rows], [Columns, Computed], [Computed, Computed]] {
            all.push(
                Product {
                    dtype,
                    lead: [&[], &[]],
                    sizes: [40, 72, 64],
                    stored,
                }
                .case(rng),
            );
        }
    }
    all
}

/// So many tiles that they are of the three larger sizes.
fn large_tiles(rng: &mut Rng) -> Vec<Case> {
    use Stored::*;
    let product = |batch, n, stored| Product {
        dtype: DType::F16,
        lead: [batch, &[]],
        sizes: [100, 72, n],
        stored,
    };
    vec![
        product(&[128], 200, [Rows, Rows]).case(rng),
        product(&[64, 2], 120, [Rows, Columns]).case(rng),
        product(&[128], 104, [Computed, Rows]).case(rng),
    ]
}

pub(super) fn listing_with(options: Options, case: &Case) -> String {
    generate_with(&as_cluster(&case.body), options)
        .unwrap()
        .listing
}

#[test]
fn operands_of_every_layout() {
    let rng = &mut Rng(61);
    let mut cases = layouts(rng, &[DType::F16, DType::BF16]);
    cases.extend(large_tiles(rng));
    for case in &cases {
        assert!(
            listing_with(Arch::COMMON.into(), case).contains("gm_block_product<"),
            "{}",
            case.body
        );
    }
    check_with(Arch::COMMON.into(), "products by tensor cores", &cases);
}

/// GPUs before `sm_80` have another instruction for f16 and no asynchronous copies.
#[test]
fn operands_of_every_layout_on_turing() {
    let turing = Arch::parse("sm_75").unwrap().into();
    let mut cases = layouts(&mut Rng(62), &[DType::F16]);
    for case in &cases {
        assert!(
            listing_with(turing, case).contains("gm_mma_f16"),
            "{}",
            case.body
        );
    }
    let bf16 = Product {
        dtype: DType::BF16,
        lead: [&[], &[]],
        sizes: [32, 32, 32],
        stored: [Stored::Rows; 2],
    };
    let bf16 = bf16.case(&mut Rng(63));
    assert!(!listing_with(turing, &bf16).contains("gm_block_product<"));
    cases.truncate(11);
    check_with(turing, "products by the tensor cores of sm_75", &cases);
}

/// `f32` is rounded only when that is asked for; bytes need no permission.
#[test]
fn tf32_and_bytes() {
    let rng = &mut Rng(64);
    let tf32 = Options {
        tf32: true,
        ..Arch::COMMON.into()
    };
    let floats = layouts(rng, &[DType::F32]);
    for case in &floats {
        assert!(
            listing_with(tf32, case).contains("gm_mma_tf32"),
            "{}",
            case.body
        );
        assert!(
            !listing_with(Arch::COMMON.into(), case).contains("gm_block_product<"),
            "{}",
            case.body
        );
    }
    check_with(tf32, "products in tf32", &floats);
    let mut bytes = layouts(rng, &[DType::I8]);
    let (i8, u8) = (DType::I8, DType::U8);
    for (dtypes, sizes) in [
        ([i8, i8], [40, 96, 24]),
        ([u8, i8], [40, 96, 24]),
        ([i8, u8], [33, 70, 20]),
        ([u8, u8], [64, 64, 64]),
    ] {
        bytes.push(of_casts(rng, dtypes, DType::I32, sizes));
    }
    for case in &bytes {
        let text = listing_with(Arch::COMMON.into(), case);
        assert!(
            text.contains("gm_mma_i8") || text.contains("gm_mma_u8"),
            "{}",
            case.body
        );
    }
    check_with(Arch::COMMON.into(), "products of bytes", &bytes);
}

/// `cast(x) cast(w)^T`, in a dtype that holds all products of such numbers and their sums.
fn of_casts(rng: &mut Rng, [x, w]: [DType; 2], to: DType, [m, k, n]: [usize; 3]) -> Case {
    let mut b = GraphBuilder::new("quantised");
    let inputs = vec![
        rng.tensor(x, &[m, k], -128.0, 255.0),
        rng.tensor(w, &[n, k], -128.0, 255.0),
    ];
    let (x, w) = (b.input("x", x, [m, k]), b.input("w", w, [n, k]));
    let (x, w) = (b.cast(x, to).unwrap(), b.cast(w, to).unwrap());
    let w = b.transpose(w, &[1, 0]).unwrap();
    let y = b.matmul(x, w).unwrap();
    b.output("y", y);
    // Products and sums of f32 round.
    let tolerance = if to == DType::I32 {
        0.0
    } else {
        2f64.powi(-18)
    };
    Case {
        body: b.finish().unwrap(),
        inputs,
        tolerance,
    }
}

/// Floats of 8 bits that were cast to be multiplied go through the half type that holds them, without rounding.
#[test]
fn floats_of_8_bits() {
    let rng = &mut Rng(69);
    let (e4m3, e5m2) = (DType::F8E4M3FN, DType::F8E5M2);
    let pairs = [
        ([e4m3, e4m3], "f16"),
        ([e5m2, e4m3], "f16"),
        ([DType::BF16, e4m3], "bf16"),
        ([e5m2, DType::F16], "f16"),
    ];
    let cases: Vec<Case> = pairs
        .iter()
        .map(|(d, _)| of_casts(rng, *d, DType::F32, [40, 72, 24]))
        .collect();
    for arch in ["sm_80", "sm_89"] {
        let arch = Arch::parse(arch).unwrap();
        for (case, (_, name)) in cases.iter().zip(&pairs) {
            assert!(
                listing_with(arch.into(), case).contains(&format!("gm_mma_{name}")),
                "{}",
                case.body
            );
        }
        check_with(arch.into(), "products of floats of 8 bits", &cases);
    }
}

/// Convolutions whose channels lie side by side are copied 16 bytes at a time, padding and all; others are pulled.
#[test]
fn convolutions_by_tensor_cores() {
    let rng = &mut Rng(65);
    let mut cases = Vec::new();
    for (groups, c_in, c_out) in [(1, 16, 24), (2, 16, 32), (1, 3, 40)] {
        for layout in [Layout::ChannelsFirst, Layout::ChannelsLast] {
            let (x, w) = match layout {
                Layout::ChannelsFirst => (vec![2, c_in, 9, 8], vec![c_out, c_in / groups, 3, 2]),
                Layout::ChannelsLast => (vec![2, 9, 8, c_in], vec![3, 2, c_in / groups, c_out]),
            };
            let (strides, dilations) = (vec![2, 1], vec![1, 2]);
            let window = Window {
                strides,
                dilations,
                pads_low: vec![1, 0],
                pads_high: vec![2, 1],
            };
            let operands = vec![
                rng.tensor(DType::F16, &x, -2.0, 2.0),
                rng.tensor(DType::F16, &w, -2.0, 2.0),
            ];
            let case = Case::of_op(
                &Op::Conv {
                    window,
                    groups,
                    layout,
                },
                operands,
                tolerance(DType::F16),
            );
            let text = listing_with(Arch::COMMON.into(), &case);
            let copies = layout == Layout::ChannelsLast && c_in > 3;
            assert!(
                text.contains("gm_block_product<")
                    && text.contains("product::copied_lhs") == copies,
                "{text}"
            );
            cases.push(case);
        }
    }
    check_with(Arch::COMMON.into(), "convolutions by tensor cores", &cases);
}

/// Large products of every layout on `sm_90a`: single blocks and pairs, narrow and wide tiles, ragged sizes, followers and batches.
fn group_products(rng: &mut Rng) -> Vec<Case> {
    use Stored::*;
    let product = |dtype, lead, sizes, stored| Product {
        dtype,
        lead,
        sizes,
        stored,
    };
    let weights: [&[usize]; 2] = [&[66], &[]];
    vec![
        product(DType::BF16, weights, [200, 72, 200], [Rows, Rows]).case(rng),
        product(DType::BF16, weights, [200, 72, 200], [Columns, Rows]).case(rng),
        product(
            DType::F16,
            [&[17, 2, 2], &[2, 1]],
            [104, 72, 120],
            [Columns, Columns],
        )
        .case(rng),
        product(DType::BF16, [&[32], &[32]], [250, 328, 128], [Rows, Rows]).case(rng),
        product(DType::F16, [&[24], &[24]], [270, 72, 128], [Rows, Columns]).case(rng),
        product(DType::BF16, weights, [130, 72, 64], [Rows, Rows]).case(rng),
        product(DType::F16, weights, [136, 72, 56], [Columns, Columns]).case(rng),
    ]
}

#[test]
fn products_of_warp_groups() {
    let hopper = Arch::parse("sm_90a").unwrap().into();
    let cases = group_products(&mut Rng(66));
    let mut forms = Vec::new();
    for case in &cases {
        let text = listing_with(hopper, case);
        let form = text
            .split("gm_group_product<")
            .nth(1)
            .unwrap_or_else(|| panic!("{text}"));
        forms.push(form.split('>').next().unwrap_or_default().to_owned());
    }
    insta::assert_snapshot!(forms.join("\n"), @r"
    gm_wgmma_bf16, 256, 4, true, false, 2
    gm_wgmma_bf16, 256, 4, false, false, 2
    gm_wgmma_f16, 128, 4, false, true, 1
    gm_wgmma_bf16, 128, 4, true, false, 2
    gm_wgmma_f16, 128, 4, true, true, 1
    gm_wgmma_bf16, 64, 6, true, false, 1
    gm_wgmma_f16, 64, 6, false, true, 1
    ");
    check_with(hopper, "products of warp groups", &cases);
}

/// One kernel per main loop.
#[test]
fn canonical_tensor_products() {
    let rng = &mut Rng(67);
    let stored = [Stored::Rows, Stored::Columns];
    let small = Product {
        dtype: DType::BF16,
        lead: [&[], &[]],
        sizes: [70, 72, 64],
        stored,
    };
    insta::assert_snapshot!(
        "tensor_mma",
        listing_with(Arch::COMMON.into(), &small.case(rng))
    );
    let large = Product {
        dtype: DType::BF16,
        lead: [&[], &[]],
        sizes: [4096, 72, 2048],
        stored,
    };
    insta::assert_snapshot!(
        "tensor_wgmma",
        listing_with(Arch::parse("sm_90a").unwrap().into(), &large.case(rng))
    );
}

/// Tensor kernels keep all in registers on every architecture, and those of warp groups use their instruction.
#[test]
fn tensor_kernels_stay_in_registers() {
    use Stored::*;
    let Some(nvrtc) = nvrtc_or_left_out("resources of tensor kernels") else {
        return;
    };
    let rng = &mut Rng(68);
    let of = |dtype, sizes, stored| Product {
        dtype,
        lead: [&[], &[]],
        sizes,
        stored,
    };
    let cases = [
        of(DType::F16, [4096, 512, 4096], [Rows, Rows]),
        of(DType::F16, [2048, 512, 1024], [Rows, Columns]),
        of(DType::F16, [2048, 512, 1024], [Computed, Rows]),
        of(DType::BF16, [1000, 512, 1032], [Columns, Rows]),
        of(DType::F32, [1000, 512, 1000], [Rows, Rows]),
        of(DType::I8, [1000, 512, 1024], [Rows, Columns]),
    ]
    .map(|p| as_cluster(&p.case(rng).body));
    for arch in ARCHS.map(|a| Arch::parse(a).unwrap()) {
        let mut batch = Batch::new(Options {
            tf32: true,
            ..arch.into()
        });
        cases.iter().for_each(|g| drop(batch.add(g, 0)));
        let units = batch.units();
        for made in nvrtc::build(nvrtc, None, &units) {
            let made = made.unwrap_or_else(|e| panic!("{e}"));
            for (name, r) in &made.resources {
                assert!(
                    r.stack_bytes == 0 && r.spill_store_bytes == 0,
                    "{arch} {name}: {r:?}"
                );
            }
            if arch.has_wgmma() {
                check_shares(&units, &made);
                check_machine_code(nvrtc, &made.cubin);
            }
        }
    }
}

/// `setmaxnreg` would wait for ever if a block had not been given all registers, 3 * 168: one group keeps 40, two have 232. And ptxas says so when it
/// waits for each product by itself.
fn check_shares(units: &[nvrtc::Unit], made: &nvrtc::Compiled) {
    assert!(!made.log.contains("(C75"), "{}", made.log);
    let mut n = 0;
    for (name, r) in &made.resources {
        let text = units
            .iter()
            .find_map(|u| u.source.split(&format!("\n{name}(")).nth(1))
            .expect("a kernel's text");
        if text
            .split("\n}\n")
            .next()
            .is_some_and(|body| body.contains("gm_more_registers"))
        {
            assert_eq!(r.registers, 168, "{name}");
            n += 1;
        }
    }
    assert!(n > 0, "no products of warp groups");
}

fn check_machine_code(nvrtc: &nvrtc::Nvrtc, cubin: &[u8]) {
    if let Some(text) = machine_code(nvrtc, cubin, "tensor kernels") {
        let n = text.matches("HGMMA").count();
        assert!(
            n >= 8 && !text.contains("LDL") && !text.contains("STL"),
            "{n} products of warp groups"
        );
        text.split(".text.").for_each(check_waits);
    }
}

/// From the first product or copy of a kernel to the last, no one waits for the GPU's memory or
/// empties the first-level cache, as barriers with the scope of a cluster do.
fn check_waits(kernel: &str) {
    let marks = ["HGMMA", "UTMALDG"];
    let first = marks.iter().filter_map(|m| kernel.find(m)).min();
    let last = marks.iter().filter_map(|m| kernel.rfind(m)).max();
    let (Some(first), Some(last)) = (first, last) else {
        return;
    };
    for wait in ["MEMBAR", "CCTL"] {
        assert!(!kernel[first..last].contains(wait), "{wait}: {kernel}");
    }
}
