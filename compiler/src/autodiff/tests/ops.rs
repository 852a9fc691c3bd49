//! Every row of the op table that has a rule.

use super::*;
use crate::ir::gradient::Gradient;
use crate::ir::{Layout, PadMode, Real, ScatterKind, Window};

struct Case {
    operands: Vec<Operand>,
    op: Op,
}

fn case(op: Op, operands: &[Operand]) -> Case {
    let operands = operands.to_vec();
    Case { operands, op }
}

pub(super) fn dims(extents: &[usize]) -> Vec<Dim> {
    extents.iter().map(|&n| n.into()).collect()
}

pub(super) fn slice(starts: &[i64], sizes: &[usize], steps: &[i64]) -> Op {
    Op::Slice {
        starts: starts.iter().map(|&n| n.into()).collect(),
        sizes: dims(sizes),
        steps: steps.to_vec(),
    }
}

fn views() -> Vec<Case> {
    let shape = vec!["batch".into(), 3.into()];
    vec![
        case(
            Op::Broadcast {
                shape: dims(&[2, 4, 3]),
            },
            &[reals(&[4, 1])],
        ),
        case(
            Op::Broadcast {
                shape: dims(&[2, 0]),
            },
            &[reals(&[2, 1])],
        ),
        case(Op::Broadcast { shape }, &[reals(&[3])]),
        case(
            Op::Reshape {
                shape: dims(&[3, 4]),
            },
            &[reals(&[2, 6])],
        ),
        case(
            Op::Transpose {
                perm: vec![2, 0, 1],
            },
            &[reals(&[2, 3, 4])],
        ),
        case(
            Op::Concat { axis: 1 },
            &[reals(&[2, 3]), reals(&[2, 1]), reals(&[2, 0])],
        ),
        case(
            Op::Concat { axis: 0 },
            &[reals(&[2, 3]).batched(), reals(&[4, 3])],
        ),
    ]
}

fn slices() -> Vec<Case> {
    let batch = Dim::symbol("batch");
    let symbolic = |start: Dim, size: Dim, step: i64| Op::Slice {
        starts: vec![start, 1.into()],
        sizes: vec![size, 2.into()],
        steps: vec![step, 1],
    };
    let x = || reals(&[5, 3]).batched();
    let last = batch.clone() - 1.into();
    vec![
        case(slice(&[1, 0], &[3, 2], &[1, 1]), &[reals(&[5, 3])]),
        case(slice(&[1, 2], &[2, 3], &[2, -1]), &[reals(&[5, 3])]),
        case(slice(&[6], &[3], &[-3]), &[reals(&[8])]),
        case(slice(&[0], &[0], &[1]), &[reals(&[4])]),
        case(symbolic(0.into(), batch.clone(), 1), &[x()]),
        case(symbolic(last.clone(), batch.clone(), -1), &[x()]),
        case(symbolic(2.into(), batch.clone() - 2.into(), 1), &[x()]),
        case(symbolic(last, 1.into(), 1), &[x()]),
        case(symbolic(0.into(), batch.ceil_div(2), 2), &[x()]),
        case(symbolic(1.into(), batch.floor_div(2), 2), &[x()]),
    ]
}

fn pads() -> Vec<Case> {
    let pad = |low: &[usize], high: &[usize], mode| Op::Pad {
        low: low.to_vec(),
        high: high.to_vec(),
        mode,
    };
    let mut all = vec![
        case(
            pad(&[1, 0], &[2, 3], PadMode::Constant),
            &[reals(&[2, 3]), reals(&[])],
        ),
        case(
            pad(&[1, 0], &[2, 3], PadMode::Constant),
            &[reals(&[2, 3]).batched(), reals(&[])],
        ),
    ];
    for mode in [PadMode::Reflect, PadMode::Edge, PadMode::Wrap] {
        all.push(case(pad(&[1, 2], &[0, 1], mode), &[reals(&[2, 3])]));
        all.push(case(
            pad(&[0, 2], &[0, 1], mode),
            &[reals(&[2, 3]).batched()],
        ));
    }
    all
}

fn gathers() -> Vec<Case> {
    let at = || indices(&[2, 2], &[0, 2, -1, 0]);
    vec![
        case(Op::Gather { axis: 0 }, &[reals(&[3, 2]), at()]),
        case(Op::Gather { axis: 1 }, &[reals(&[2, 3, 2]), at()]),
        case(
            Op::Gather { axis: 1 },
            &[reals(&[2, 3]).batched(), indices(&[], &[1])],
        ),
        case(
            Op::Gather { axis: 1 },
            &[reals(&[2, 3]), indices(&[0], &[])],
        ),
        case(Op::GatherElements { axis: 1 }, &[reals(&[3, 3]), at()]),
        case(Op::GatherNd { batch_dims: 0 }, &[reals(&[3, 3, 2]), at()]),
        case(
            Op::GatherNd { batch_dims: 1 },
            &[reals(&[2, 3, 2]), indices(&[2, 2, 1], &[0, 2, -1, -1])],
        ),
        case(
            Op::TopK {
                k: 2.into(),
                axis: 1,
                largest: true,
            },
            &[reals(&[3, 4])],
        ),
        case(
            Op::TopK {
                k: 2.into(),
                axis: 0,
                largest: false,
            },
            &[reals(&[3, 4])],
        ),
    ]
}

fn scatters() -> Vec<Case> {
    let mut all = Vec::new();
    use ScatterKind::*;
    for kind in [Set, Add, Mul, Max, Min] {
        let at = indices(&[2, 2], &[0, 2, -1, 2]);
        let nd = Op::ScatterNd { kind };
        all.extend([
            case(
                Op::ScatterElements { axis: 1, kind },
                &[reals(&[3, 3]), at.clone(), reals(&[2, 2])],
            ),
            case(nd.clone(), &[reals(&[3, 3, 2]), at, reals(&[2, 2])]),
            case(
                nd,
                &[
                    reals(&[3, 2]).batched(),
                    indices(&[2, 1], &[1, 1]),
                    reals(&[2, 2]),
                ],
            ),
        ]);
    }
    all
}

fn reductions() -> Vec<Case> {
    let mut all = Vec::new();
    let kinds = [
        ReduceKind::Sum,
        ReduceKind::Mean,
        ReduceKind::Max,
        ReduceKind::Min,
        ReduceKind::Prod,
    ];
    for kind in kinds {
        let reduce = |axes: &[usize], keepdims| Op::Reduce {
            kind,
            axes: axes.to_vec(),
            keepdims,
        };
        all.extend([
            case(reduce(&[0, 2], false), &[reals(&[2, 3, 2])]),
            case(reduce(&[1], true), &[reals(&[2, 3])]),
            case(reduce(&[], false), &[reals(&[2, 3])]),
            case(reduce(&[0], false), &[reals(&[4, 3]).batched()]),
            case(reduce(&[1], false), &[reals(&[0, 3])]),
        ]);
    }
    let empty = Op::Reduce {
        kind: ReduceKind::Sum,
        axes: vec![1],
        keepdims: false,
    };
    all.push(case(empty, &[reals(&[3, 0])]));
    for (exclusive, reverse) in [(false, false), (true, false), (false, true), (true, true)] {
        let op = Op::CumSum {
            axis: 1,
            exclusive,
            reverse,
        };
        all.push(case(op, &[reals(&[2, 4])]));
    }
    all
}

fn norms() -> Vec<Case> {
    let epsilon = Real(1e-3);
    let mut all = Vec::new();
    for log in [false, true] {
        all.push(case(Op::Softmax { axis: 1, log }, &[reals(&[3, 4])]));
        all.push(case(
            Op::Softmax { axis: 0, log },
            &[reals(&[3, 2, 2]).batched()],
        ));
    }
    all.extend([
        case(
            Op::LayerNorm { axis: 1, epsilon },
            &[reals(&[3, 4]), reals(&[4]), reals(&[4])],
        ),
        case(
            Op::LayerNorm { axis: 1, epsilon },
            &[reals(&[3, 2, 2]).batched(), reals(&[2, 2]), reals(&[2, 2])],
        ),
        case(
            Op::RmsNorm { axis: 1, epsilon },
            &[reals(&[3, 4]), reals(&[4])],
        ),
        case(
            Op::RmsNorm { axis: 0, epsilon },
            &[reals(&[3]), reals(&[3])],
        ),
    ]);
    for axes in [vec![1], vec![0, 2], vec![0, 1, 2]] {
        let op = Op::Standardize { axes, epsilon };
        all.push(case(op, &[reals(&[3, 2, 2])]));
    }
    all
}

fn products() -> Vec<Case> {
    let matmul = |a: Operand, b: Operand| case(Op::MatMul, &[a, b]);
    vec![
        matmul(reals(&[2, 3]), reals(&[3, 4])),
        matmul(reals(&[2, 2, 3]), reals(&[3, 4])),
        matmul(reals(&[2, 3]), reals(&[2, 3, 2])),
        matmul(reals(&[3, 1, 2, 3]), reals(&[2, 3, 2])),
        matmul(reals(&[2, 2, 3]).batched(), reals(&[3, 4])),
        matmul(reals(&[5, 3]).batched(), reals(&[3, 2])),
        matmul(reals(&[2, 0]), reals(&[0, 2])),
    ]
}

fn attentions() -> Vec<Case> {
    let qkv = || [reals(&[2, 3, 2]), reals(&[2, 4, 2]), reals(&[2, 4, 3])];
    let attention = |causal| Op::Attention {
        scale: Real(0.7),
        causal,
    };
    let [q, k, v] = qkv();
    let masked = [q, k, v, reals(&[3, 4])];
    vec![
        case(attention(false), &qkv()),
        case(attention(true), &qkv()),
        case(attention(false), &masked),
        case(attention(true), &qkv().map(Operand::batched)),
    ]
}

fn states() -> Vec<Case> {
    let all_reduce = |kind| Op::AllReduce { kind };
    let assign = Op::AssignVariable {
        container: String::new(),
        name: "w".to_owned(),
    };
    let operands = [reals(&[2, 3]), reals(&[2, 3]).positive(), reals(&[2, 3])];
    vec![
        case(assign, &[reals(&[3])]),
        case(Op::CheckFinite, &[reals(&[3])]),
        case(all_reduce(ReduceKind::Sum), &operands),
        case(all_reduce(ReduceKind::Mean), &operands),
    ]
}

fn cases() -> Vec<Case> {
    let groups = [
        views(),
        slices(),
        pads(),
        gathers(),
        scatters(),
        reductions(),
        norms(),
        products(),
        attentions(),
        windows(),
        states(),
    ];
    groups.into_iter().flatten().collect()
}

#[test]
fn every_rule_is_the_derivative() {
    let cases = cases();
    for (name, gradient) in Op::gradients() {
        let has_rule = matches!(gradient, Gradient::Rule(_));
        let of_op = cases.iter().filter(|c| c.op.name() == name).count();
        assert_eq!(has_rule, of_op > 0, "cases of {name}");
    }
    for case in cases {
        let op = case.bound_op();
        let build = |b: &mut GraphBuilder, x: &[ValueId]| b.add(op.clone(), x);
        check(&format!("{op:?}"), &case.operands, &build);
    }
}

#[test]
fn compiled_gradients_are_those_of_the_interpreter() {
    let mut wrong = Vec::new();
    for case in cases() {
        let op = case.bound_op();
        let build = |b: &mut GraphBuilder, x: &[ValueId]| b.add(op.clone(), x);
        let (graph, loss, wrt) = graph_of(&case.operands, &build).unwrap();
        let d = grad(&graph, loss, &wrt, &GradOptions::default()).unwrap();
        let inputs: Vec<Tensor> = case.operands.iter().map(|o| o.value.clone()).collect();
        if let Err(why) = compare_compiled(&d, &inputs) {
            wrong.push(format!("{op:?}: {why}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

impl Case {
    /// The op, its symbol bound where no input declares it.
    fn bound_op(&self) -> Op {
        let mut dims = self.operands.iter().flat_map(|o| &o.dims);
        if dims.any(|d| d.as_const().is_none()) {
            return self.op.clone();
        }
        let batch = [("batch".to_owned(), 2)].into();
        self.op.map_dims(&|d| d.bind(&batch))
    }
}

pub(super) fn window(
    strides: &[usize],
    dilations: &[usize],
    low: &[usize],
    high: &[usize],
) -> Window {
    Window {
        strides: strides.to_vec(),
        dilations: dilations.to_vec(),
        pads_low: low.to_vec(),
        pads_high: high.to_vec(),
    }
}

fn windows() -> Vec<Case> {
    [
        convs(),
        conv_transposes(),
        pools(),
        max_pool_grads(),
        samples(),
    ]
    .into_iter()
    .flatten()
    .collect()
}

fn convs() -> Vec<Case> {
    let conv = |window, groups, layout| Op::Conv {
        window,
        groups,
        layout,
    };
    let (first, last) = (Layout::ChannelsFirst, Layout::ChannelsLast);
    let mut all = vec![
        case(
            conv(window(&[1], &[1], &[1], &[0]), 1, first),
            &[reals(&[2, 2, 5]).batched(), reals(&[3, 2, 3])],
        ),
        case(
            conv(window(&[1, 2], &[2, 1], &[1, 0], &[0, 1]), 1, last),
            &[reals(&[2, 5, 4, 2]), reals(&[2, 3, 2, 2])],
        ),
        case(
            conv(window(&[2, 2], &[1, 1], &[1, 1], &[1, 1]), 1, first),
            &[reals(&[2, 2, 4, 5]).batched(), reals(&[1, 2, 3, 3])],
        ),
    ];
    for stride in 1..4 {
        for dilation in 1..3 {
            for low in 0..2 {
                let window = window(&[stride], &[dilation], &[low], &[1]);
                all.push(case(
                    conv(window, 2, first),
                    &[reals(&[2, 4, 7]), reals(&[2, 2, 2])],
                ));
            }
        }
    }
    for (groups, layout) in [(1, first), (1, last), (2, first), (4, last)] {
        let (shape, weights) = match layout {
            Layout::ChannelsFirst => ([1, 4, 3, 4, 3], [4, 4 / groups, 2, 3, 2]),
            Layout::ChannelsLast => ([1, 3, 4, 3, 4], [2, 3, 2, 4 / groups, 4]),
        };
        let window = window(&[1, 2, 1], &[1, 1, 2], &[1, 0, 1], &[0, 2, 1]);
        all.push(case(
            conv(window, groups, layout),
            &[reals(&shape).batched(), reals(&weights)],
        ));
    }
    let symbolic = Operand {
        dims: vec![1.into(), 1.into(), "length".into()],
        ..reals(&[1, 1, 6])
    };
    all.push(case(
        conv(window(&[1], &[1], &[1], &[1]), 1, first),
        &[symbolic, reals(&[2, 1, 3])],
    ));
    all
}

fn conv_transposes() -> Vec<Case> {
    let mut all = Vec::new();
    for (stride, extra) in [(1, 0), (2, 0), (2, 1), (3, 2)] {
        for groups in 1..3 {
            let op = Op::ConvTranspose {
                window: window(&[stride, 1], &[1, 2], &[1, 0], &[0, 1]),
                output_pads: vec![extra, 0],
                groups,
            };
            let weights = reals(&[2, 1, 3, 2]);
            all.push(case(op, &[reals(&[2, 2, 3, 3]).batched(), weights]));
        }
    }
    let op = Op::ConvTranspose {
        window: window(&[2, 1, 3], &[1, 2, 1], &[1, 0, 2], &[0, 1, 1]),
        output_pads: vec![1, 0, 2],
        groups: 2,
    };
    let weights = reals(&[2, 1, 3, 2, 2]);
    all.push(case(op, &[reals(&[1, 2, 2, 3, 2]).batched(), weights]));
    all
}

fn max_pool_grads() -> Vec<Case> {
    let mut all = Vec::new();
    for (ceil, layout) in [(false, Layout::ChannelsFirst), (true, Layout::ChannelsLast)] {
        let shape = |height, width| match layout {
            Layout::ChannelsFirst => [2, 2, height, width],
            Layout::ChannelsLast => [2, height, width, 2],
        };
        let op = |window| Op::MaxPoolGrad {
            size: vec![3, 2],
            window,
            ceil,
            layout,
        };
        all.push(case(
            op(window(&[2, 3], &[1, 1], &[1, 0], &[0, 1])),
            &[reals(&shape(6, 5)).batched(), reals(&shape(3, 2)).batched()],
        ));
        all.push(case(
            op(window(&[1, 2], &[2, 1], &[1, 1], &[1, 1])),
            &[reals(&shape(6, 5)), reals(&shape(4, 3))],
        ));
    }
    let op = Op::MaxPoolGrad {
        size: vec![2, 3, 2],
        window: window(&[1, 2, 2], &[1; 3], &[1, 1, 0], &[0, 1, 1]),
        ceil: false,
        layout: Layout::ChannelsFirst,
    };
    let operands = [reals(&[1, 2, 3, 4, 4]), reals(&[1, 2, 3, 2, 2])];
    all.push(case(op, &operands.map(Operand::batched)));
    all
}

fn samples() -> Vec<Case> {
    let of = |groups: usize| {
        let positions = reals(&[2, groups, 2, 2, 5]).batched();
        [reals(&[2, 4, 2, 3]).batched(), positions]
    };
    let mask = reals(&[2, 2, 2, 5]).batched();
    let [x, positions] = of(2);
    vec![
        case(Op::Sample { groups: 1 }, &of(1)),
        case(Op::Sample { groups: 2 }, &[x, positions, mask]),
    ]
}

fn pools() -> Vec<Case> {
    use crate::ir::PoolKind::{Avg, AvgIncludePad, Max};
    let mut all = Vec::new();
    for kind in [Max, Avg, AvgIncludePad] {
        for (ceil, layout) in [(false, Layout::ChannelsFirst), (true, Layout::ChannelsLast)] {
            let shape: &[usize] = match layout {
                Layout::ChannelsFirst => &[2, 2, 6, 5],
                Layout::ChannelsLast => &[2, 6, 5, 2],
            };
            let op = |window| Op::Pool {
                kind,
                size: vec![3, 2],
                window,
                ceil,
                layout,
            };
            all.push(case(
                op(window(&[2, 3], &[1, 1], &[1, 0], &[0, 1])),
                &[reals(shape).batched()],
            ));
            all.push(case(
                op(window(&[1, 2], &[2, 1], &[1, 1], &[1, 1])),
                &[reals(shape)],
            ));
            let volume: &[usize] = match layout {
                Layout::ChannelsFirst => &[1, 2, 3, 4, 4],
                Layout::ChannelsLast => &[1, 3, 4, 4, 2],
            };
            let over_three = Op::Pool {
                kind,
                size: vec![2, 3, 2],
                window: window(&[1, 2, 2], &[1; 3], &[1, 1, 0], &[0, 1, 1]),
                ceil,
                layout,
            };
            all.push(case(over_three, &[reals(volume).batched()]));
            for (low, high) in [([0, 0], [0, 0]), ([1, 1], [2, 0])] {
                all.push(case(
                    op(window(&[3, 2], &[1, 1], &low, &high)),
                    &[reals(shape).batched()],
                ));
            }
        }
    }
    let op = Op::MaxPoolIndices {
        size: vec![2],
        window: window(&[1], &[1], &[1], &[0]),
        ceil: false,
    };
    all.push(case(op, &[reals(&[2, 2, 4]).batched()]));
    all
}
