//! Operands of products of 8-bit integers: words of four elements, as `gristmill_kernels::gemm::integer` has them.

use super::rejected::Rejected;
use super::strided::Strided;
use super::task::{Context, Place, Ptr};
use crate::cluster::bytes::{self, CentredBytes, Zero};
use crate::ir::{Node, NodeId, OpClass};
use gristmill_kernels::gemm::integer::{Integers, Operands, WORD};
use gristmill_runtime::DType;

/// The operands of a product of bytes.
pub(super) struct BytesProduct {
    /// The left-hand side; strides and offset count words, but for the last axis, which has stride 1.
    /// Descriptors of depthwise convolutions count bytes.
    pub(super) left: Strided,
    /// Bytes of a stride of 1.
    unit: usize,
    /// Words along the last axis.
    pub(super) n_words: usize,
    /// The right-hand side, packed; in depthwise convolutions as `f32`.
    pub(super) right: Ptr,
    /// Type and zero point of the left-hand side.
    pub(super) integers: Integers,
    /// The left-hand zero point, when only memory has it.
    pub(super) zero: Option<Ptr>,
    /// Nodes that the product computes besides itself.
    pub(super) nodes: Vec<NodeId>,
}

impl BytesProduct {
    /// The operands of `node` if it multiplies bytes; `None` when it multiplies others.
    ///
    /// Errors when the left-hand side is no row of words in memory, or the constant does not fit.
    pub(super) fn find(cx: &Context, node: &Node) -> Result<Option<BytesProduct>, Rejected> {
        match bytes::left_side(&cx.body.graph, node) {
            Some(centred) => BytesProduct::of(cx, node, centred).map(Some),
            None => Ok(None),
        }
    }

    fn of(cx: &Context, node: &Node, centred: CentredBytes) -> Result<BytesProduct, Rejected> {
        let is_depthwise = bytes::is_depthwise(&cx.body.graph, node);
        let unit = if is_depthwise { 1 } else { WORD };
        let left = left_in(cx, node, &centred, unit).ok_or(Rejected::Strides(0))?;
        let n_words = left.shape[left.shape.len() - 1] / WORD;
        let (integers, zero) = operands(cx, &centred);
        let resolved = Strided::resolve(cx.body, node.inputs[1], cx.in_memory);
        let source = cx
            .source(&resolved, DType::I32)
            .ok_or(Rejected::Strides(1))?;
        let constant = match is_depthwise {
            true => cx.constant_floats(&source)?,
            false => cx.constant_bytes(&source)?,
        };
        let right = Ptr::Read(Place::Packed(constant), 0);
        Ok(BytesProduct {
            left,
            unit,
            n_words,
            right,
            integers,
            zero,
            nodes: centred.nodes,
        })
    }

    /// The address of the left-hand side.
    pub(super) fn read_left(&self) -> Ptr {
        Ptr::Read(
            Place::Value(self.left.base),
            self.left.offset * self.unit as i64,
        )
    }

    /// The descriptor's entry for integers, with the zero point behind the operands of the epilogue. `keeps_sums` when results stay
    /// `i32`.
    pub(super) fn describe(&self, operands: &mut Vec<Ptr>, keeps_sums: bool) -> Integers {
        let mut integers = Integers {
            keeps_sums: u32::from(keeps_sums),
            ..self.integers
        };
        if let Some(zero) = &self.zero {
            operands.push(zero.clone());
            integers.zero_operand = operands.len() as u32;
        }
        integers
    }
}

/// The left-hand side in units of so many bytes. `None` when rows are not contiguous, or do not start
/// at units.
fn left_in(cx: &Context, node: &Node, centred: &CentredBytes, unit: usize) -> Option<Strided> {
    let g = &cx.body.graph;
    let left = Strided::resolve(cx.body, node.inputs[0], cx.in_memory);
    // A view that strides cannot express would be stored in 32 bits.
    let defines_base = |&&n: &&NodeId| {
        g.node(n).op.class() != OpClass::View && g.node(n).outputs.contains(&left.base)
    };
    centred.nodes.iter().find(defines_base)?;
    let (&last, outer) = left.strides.split_last()?;
    if last != 1 {
        return None;
    }
    let mut strides: Vec<i64> = outer
        .iter()
        .map(|&s| units(s, unit))
        .collect::<Option<_>>()?;
    strides.push(1);
    Some(Strided {
        base: centred.bytes,
        offset: units(left.offset, unit)?,
        strides,
        ..left
    })
}

/// A number of bytes in units; `None` when it is negative or no whole number.
fn units(bytes: i64, unit: usize) -> Option<i64> {
    let unit = unit as i64;
    (bytes >= 0 && bytes % unit == 0).then_some(bytes / unit)
}

/// The left-hand operands' type and zero point; the address of the zero point where only memory has it.
fn operands(cx: &Context, centred: &CentredBytes) -> (Integers, Option<Ptr>) {
    let operands = match cx.body.dtype(centred.bytes) {
        DType::I8 => Operands::I8,
        _ => Operands::U8,
    };
    let mut integers = Integers {
        operands: operands as u32,
        ..Integers::default()
    };
    match centred.zero {
        Zero::Known(zero) => {
            integers.zero = zero;
            (integers, None)
        }
        Zero::Value(v) => (integers, Some(Ptr::Read(Place::Value(v), 0))),
    }
}

#[cfg(test)]
mod tests {
    use crate::codegen::cpu::tests::harness::{check, steps};
    use crate::codegen::cpu::why_loops;
    use crate::codegen::testing::Rng;
    use crate::ir::*;
    use gristmill_runtime::{DType, Tensor};

    /// Conversion of the sums.
    #[derive(Clone, Copy, Debug, PartialEq)]
    enum Rest {
        Sums,
        Scaled,
        Quantized(DType),
    }

    /// A graph under construction, with a tensor for each of its inputs.
    struct Builder {
        b: GraphBuilder,
        inputs: Vec<Tensor>,
    }

    impl Builder {
        fn input(&mut self, name: &str, t: Tensor) -> ValueId {
            let v = self.b.input(name, t.dtype(), t.shape().iter().copied());
            self.inputs.push(t);
            v
        }

        /// `i32(q) - zero`.
        fn centred(&mut self, q: ValueId, zero: Option<ValueId>) -> ValueId {
            let x = self.b.cast(q, DType::I32).unwrap();
            let Some(zero) = zero else { return x };
            let zero = self.b.cast(zero, DType::I32).unwrap();
            self.b.sub(x, zero).unwrap()
        }

        /// Scales by columns, adds a bias, ReLU, and maybe the way back to 8 bits.
        fn rest(&mut self, sum: ValueId, n: usize, rest: Rest, rng: &mut Rng) -> ValueId {
            if rest == Rest::Sums {
                return sum;
            }
            let x = self.b.cast(sum, DType::F32).unwrap();
            let scale = self.b.constant(rng.tensor(DType::F32, &[n], 0.001, 0.01));
            let bias = self.b.constant(rng.tensor(DType::F32, &[n], -1.0, 1.0));
            let x = self.b.mul(x, scale).unwrap();
            let x = self.b.add_(x, bias).unwrap();
            let x = self.b.map(ScalarOp::Relu, &[x]).unwrap();
            let Rest::Quantized(dtype) = rest else {
                return x;
            };
            let (step, zero) = (
                self.b.scalar(DType::F32, 0.013),
                self.b.scalar(DType::F32, 3.0),
            );
            let x = self.b.div(x, step).unwrap();
            let x = self.b.map(ScalarOp::Round, &[x]).unwrap();
            let x = self.b.add_(x, zero).unwrap();
            self.b.cast(x, dtype).unwrap()
        }

        fn finish(mut self, y: ValueId) -> (Graph, Vec<Tensor>) {
            self.b.output("y", y);
            (self.b.finish().unwrap(), self.inputs)
        }
    }

    fn bytes(rng: &mut Rng, dtype: DType, shape: &[usize]) -> Tensor {
        let (lo, hi) = if dtype == DType::U8 {
            (0.0, 256.0)
        } else {
            (-128.0, 128.0)
        };
        rng.tensor(dtype, shape, lo, hi)
    }

    fn weights(rng: &mut Rng, shape: &[usize]) -> Tensor {
        rng.tensor(DType::I32, shape, -128.0, 128.0)
    }

    fn zero(build: &mut Builder, dtype: DType, rng: &mut Rng) -> Option<ValueId> {
        let t = bytes(rng, dtype, &[]);
        match rng.below(3) {
            0 => None,
            1 => Some(build.b.constant(t)),
            _ => Some(build.input("zero", t)),
        }
    }

    fn is_one_call(g: &Graph, symbol: &str) {
        let steps = steps(g);
        assert!(
            matches!(&steps[..], [one] if one.ends_with(symbol)),
            "{steps:?} of\n{g}"
        );
        let product = g
            .nodes()
            .find(|(_, n)| matches!(n.op, Op::MatMul | Op::Conv { .. }))
            .unwrap()
            .1;
        assert_eq!(why_loops(g, product), None);
    }

    const RESTS: [Rest; 4] = [
        Rest::Sums,
        Rest::Scaled,
        Rest::Quantized(DType::U8),
        Rest::Quantized(DType::I8),
    ];

    #[test]
    fn products() {
        let rng = &mut Rng(51);
        for (dtype, rest) in [DType::U8, DType::I8]
            .into_iter()
            .flat_map(|d| RESTS.map(|r| (d, r)))
        {
            for (m, k, n) in [(1, 32, 40), (7, 16, 65), (33, 96, 31)] {
                let mut build = Builder {
                    b: GraphBuilder::new("bytes"),
                    inputs: vec![],
                };
                let q = build.input("q", bytes(rng, dtype, &[2, m, k]));
                let zero = zero(&mut build, dtype, rng);
                let x = build.centred(q, zero);
                let w = build.b.constant(weights(rng, &[k, n]));
                let sum = build.b.matmul(x, w).unwrap();
                let y = build.rest(sum, n, rest, rng);
                let (g, inputs) = build.finish(y);
                check(&g, &inputs, 0.0, rng);
                is_one_call(&g, "gm_gemm_f32");
            }
        }
    }

    #[test]
    fn convolutions() {
        let rng = &mut Rng(52);
        for (dtype, rest) in [DType::U8, DType::I8]
            .into_iter()
            .flat_map(|d| RESTS.map(|r| (d, r)))
        {
            for (channels, n, size) in [(4, 33, [3, 3]), (64, 16, [1, 1]), (68, 8, [3, 1])] {
                let mut build = Builder {
                    b: GraphBuilder::new("bytes"),
                    inputs: vec![],
                };
                let q = build.input("q", bytes(rng, dtype, &[2, 9, 8, channels]));
                let zero = zero(&mut build, dtype, rng);
                let x = build.centred(q, zero);
                let w = build
                    .b
                    .constant(weights(rng, &[size[0], size[1], channels, n]));
                let window = Window {
                    strides: vec![2, 1],
                    dilations: vec![1, 2],
                    pads_low: vec![1, 2],
                    pads_high: vec![1, 1],
                };
                let op = Op::Conv {
                    window,
                    groups: 1,
                    layout: Layout::ChannelsLast,
                };
                let sum = build.b.add1(op, &[x, w]).unwrap();
                let y = build.rest(sum, n, rest, rng);
                let (g, inputs) = build.finish(y);
                check(&g, &inputs, 0.0, rng);
                is_one_call(&g, "gm_conv_f32");
            }
        }
    }

    #[test]
    fn depthwise_convolutions() {
        let rng = &mut Rng(57);
        for (dtype, rest) in [DType::U8, DType::I8]
            .into_iter()
            .flat_map(|d| RESTS.map(|r| (d, r)))
        {
            for (channels, image, size) in [
                (6, &[9, 8][..], &[3, 3][..]),
                (33, &[40], &[5]),
                (16, &[4, 5, 6], &[2, 3, 1]),
            ] {
                let mut build = Builder {
                    b: GraphBuilder::new("bytes"),
                    inputs: vec![],
                };
                let shape = [&[2], image, &[channels]].concat();
                let q = build.input("q", bytes(rng, dtype, &shape));
                let zero = zero(&mut build, dtype, rng);
                let x = build.centred(q, zero);
                let filters = [size, &[1, channels]].concat();
                let w = build.b.constant(weights(rng, &filters));
                let n = size.len();
                let window = Window {
                    strides: [2, 1, 1][..n].into(),
                    dilations: [1, 2, 1][..n].into(),
                    pads_low: [1, 2, 0][..n].into(),
                    pads_high: [1, 1, 2][..n].into(),
                };
                let op = Op::Conv {
                    window,
                    groups: channels,
                    layout: Layout::ChannelsLast,
                };
                let sum = build.b.add1(op, &[x, w]).unwrap();
                let y = build.rest(sum, channels, rest, rng);
                let (g, inputs) = build.finish(y);
                check(&g, &inputs, 0.0, rng);
                is_one_call(&g, "gm_depthwise_f32");
            }
        }
    }

    #[test]
    fn products_of_floats_are_stored_in_8_bits() {
        let rng = &mut Rng(53);
        let mut build = Builder {
            b: GraphBuilder::new("quantised"),
            inputs: vec![],
        };
        let x = build.input("x", rng.tensor(DType::F32, &[9, 20], -1.0, 1.0));
        let w = build
            .b
            .constant(rng.tensor(DType::F32, &[20, 37], -1.0, 1.0));
        let y = build.b.matmul(x, w).unwrap();
        let y = build.b.map(ScalarOp::Round, &[y]).unwrap();
        let y = build.b.cast(y, DType::I8).unwrap();
        let (g, inputs) = build.finish(y);
        check(&g, &inputs, 0.0, rng);
        is_one_call(&g, "gm_gemm_f32");
    }

    #[test]
    fn views_of_bytes_become_strides() {
        let rng = &mut Rng(54);
        let mut build = Builder {
            b: GraphBuilder::new("views"),
            inputs: vec![],
        };
        let q = build.input("q", bytes(rng, DType::U8, &[6, 5, 24]));
        let part = build.b.slice_axis(q, 2, 8usize, 16usize).unwrap();
        let x = build.centred(part, None);
        let x = build.b.transpose(x, &[1, 0, 2]).unwrap();
        let w = build.b.constant(weights(rng, &[16, 12]));
        let y = build.b.matmul(x, w).unwrap();
        let (g, inputs) = build.finish(y);
        check(&g, &inputs, 0.0, rng);
    }

    /// Cases without a kernel are computed by loops, with the same results.
    #[test]
    fn other_products_of_integers() {
        let rng = &mut Rng(55);
        let product = |rng: &mut Rng, k: usize, weight: f64, zeros: &[i32]| {
            let mut build = Builder {
                b: GraphBuilder::new("other"),
                inputs: vec![],
            };
            let q = build.input("q", bytes(rng, DType::U8, &[3, k]));
            let mut x = build.b.cast(q, DType::I32).unwrap();
            for &zero in zeros {
                let zero = build.b.constant(Tensor::scalar(zero));
                x = build.b.sub(x, zero).unwrap();
            }
            let w = build
                .b
                .constant(rng.tensor(DType::I32, &[k, 5], weight, weight + 3.0));
            let y = build.b.matmul(x, w).unwrap();
            let (g, inputs) = build.finish(y);
            check(&g, &inputs, 0.0, rng);
            assert!(
                !steps(&g).iter().any(|s| s.ends_with("gm_gemm_f32")),
                "k {k}, weights from {weight}, zeros {zeros:?}"
            );
        };
        product(rng, 6, 1.0, &[3]);
        product(rng, 8, 126.0, &[3]);
        product(rng, 8, 1.0, &[-3]);
        product(rng, 8, 1.0, &[3, 4]);
    }

    /// In a cluster, large constants are operands: what the whole compiler makes of a product is one kernel as well.
    #[test]
    fn constants_outside_of_the_cluster() {
        let rng = &mut Rng(56);
        let mut build = Builder {
            b: GraphBuilder::new("whole"),
            inputs: vec![],
        };
        let q = build.input("q", bytes(rng, DType::U8, &[9, 64]));
        let zero = build.b.constant(Tensor::scalar(7u8));
        let x = build.centred(q, Some(zero));
        let w = build.b.constant(weights(rng, &[64, 40]));
        let sum = build.b.matmul(x, w).unwrap();
        let y = build.rest(sum, 40, Rest::Quantized(DType::U8), rng);
        let (g, inputs) = build.finish(y);
        let lowered =
            crate::pipeline::lower(g.clone(), crate::testing::Setup::default().config()).unwrap();
        let kernels: Vec<&str> = lowered.program.partitions[0]
            .kernels
            .iter()
            .map(|k| k.name())
            .collect();
        assert!(
            matches!(kernels[..], [one] if one.ends_with("gm_gemm_f32")),
            "{kernels:?}"
        );
        let found = crate::compile(&g, &crate::Options::default())
            .unwrap()
            .run([("q", inputs[0].clone())])
            .unwrap();
        assert_eq!(
            found["y"].as_bytes(),
            crate::interp::run(&g, &inputs).unwrap()[0].as_bytes()
        );
    }
}
