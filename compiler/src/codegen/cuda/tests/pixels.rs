//! Convolutions by warp groups, whose pixels the copy engine gathers.

use super::run::check_with;
use super::tensor::{listing_with, tolerance};
use super::*;

/// A channels-last convolution: images of `pixels`, channels in and out of each group, and the
/// filter's elements.
struct Conv<'a> {
    dtype: DType,
    images: usize,
    pixels: &'a [usize],
    channels: [usize; 2],
    groups: usize,
    taps: &'a [usize],
    window: Window,
}

/// The window of a filter whose elements are next to each other, without padding.
fn plain(n_spatial: usize) -> Window {
    Window {
        strides: vec![1; n_spatial],
        dilations: vec![1; n_spatial],
        pads_low: vec![0; n_spatial],
        pads_high: vec![0; n_spatial],
    }
}

impl Conv<'_> {
    /// The convolution of two operands; `turned` if output channels of the filter lie outside of
    /// the others in memory; `joined` if a bias and a relu follow.
    fn case(&self, rng: &mut Rng, turned: bool, joined: bool) -> Case {
        let Conv {
            dtype,
            images,
            pixels,
            channels: [c_in, c_out],
            groups,
            taps,
            ..
        } = *self;
        let all = c_out * groups;
        let shape = [&[images][..], pixels, &[c_in * groups]].concat();
        let stored = if turned { [all, c_in] } else { [c_in, all] };
        let filter = [taps, &stored].concat();
        let mut b = GraphBuilder::new("conv");
        let x = b.input("x", dtype, shape.clone());
        let mut w = b.input("w", dtype, filter.clone());
        if turned {
            let n = taps.len();
            let perm: Vec<usize> = (0..n).chain([n + 1, n]).collect();
            w = b.transpose(w, &perm).unwrap();
        }
        let op = Op::Conv {
            window: self.window.clone(),
            groups,
            layout: Layout::ChannelsLast,
        };
        let mut y = b.add1(op, &[x, w]).unwrap();
        let mut inputs = vec![
            rng.tensor(dtype, &shape, -1.0, 1.0),
            rng.tensor(dtype, &filter, -1.0, 1.0),
        ];
        if joined {
            let bias = b.input("bias", dtype, [all]);
            y = b.add_(y, bias).unwrap();
            y = b.map(ScalarOp::Relu, &[y]).unwrap();
            inputs.push(rng.tensor(dtype, &[all], -1.0, 1.0));
        }
        b.output("y", y);
        Case {
            body: b.finish().unwrap(),
            inputs,
            tolerance: tolerance(dtype),
        }
    }
}

/// The same of a part of larger images: there are other elements in the place of the padding, and
/// on either side of the channels.
fn sliced(rng: &mut Rng) -> Case {
    let mut b = GraphBuilder::new("sliced");
    let (shape, filter) = ([3, 61, 60, 128], [2, 2, 64, 64]);
    let x = b.input("x", DType::F16, shape);
    let w = b.input("w", DType::F16, filter);
    let rows = b.slice_axis(x, 1, 2, 58).unwrap();
    let part = b.slice_axis(rows, 3, 32, 64).unwrap();
    let op = Op::Conv {
        window: Window {
            pads_low: vec![1, 1],
            pads_high: vec![0, 1],
            ..plain(2)
        },
        groups: 1,
        layout: Layout::ChannelsLast,
    };
    let y = b.add1(op, &[part, w]).unwrap();
    b.output("y", y);
    Case {
        body: b.finish().unwrap(),
        inputs: vec![
            rng.tensor(DType::F16, &shape, -1.0, 1.0),
            rng.tensor(DType::F16, &filter, -1.0, 1.0),
        ],
        tolerance: tolerance(DType::F16),
    }
}

/// Images of every rank; strides, dilations and paddings that differ; groups; channels that end
/// within a tile; a last pair of tiles of which one is outside; filters stored either way.
fn cases(rng: &mut Rng) -> Vec<Case> {
    let line = Conv {
        dtype: DType::BF16,
        images: 3,
        pixels: &[2740],
        channels: [64, 40],
        groups: 1,
        taps: &[3],
        window: Window {
            pads_low: vec![2],
            ..plain(1)
        },
    };
    let grouped = Conv {
        dtype: DType::F16,
        images: 5,
        pixels: &[29, 17],
        channels: [64, 24],
        groups: 8,
        taps: &[2, 3],
        window: Window {
            strides: vec![2, 1],
            dilations: vec![3, 1],
            pads_low: vec![1, 0],
            pads_high: vec![2, 1],
        },
    };
    let ragged = Conv {
        dtype: DType::BF16,
        images: 2,
        pixels: &[50, 41],
        channels: [88, 136],
        groups: 1,
        taps: &[1, 2],
        window: Window {
            pads_low: vec![0, 1],
            ..plain(2)
        },
    };
    let space = Conv {
        dtype: DType::F16,
        images: 1,
        pixels: &[20, 22, 24],
        channels: [64, 64],
        groups: 1,
        taps: &[2, 1, 2],
        window: Window {
            pads_high: vec![1, 0, 0],
            ..plain(3)
        },
    };
    vec![
        line.case(rng, false, false),
        grouped.case(rng, false, true),
        ragged.case(rng, true, false),
        ragged.case(rng, false, true),
        space.case(rng, false, true),
        sliced(rng),
    ]
}

#[test]
fn convolutions_of_warp_groups() {
    let hopper = Arch::parse("sm_90a").unwrap().into();
    let cases = cases(&mut Rng(91));
    let mut forms = Vec::new();
    for case in &cases {
        let text = listing_with(hopper, case);
        assert!(text.contains("gm_load_pixels("), "{text}");
        let form = text.split("gm_group_product<").nth(1).unwrap_or_default();
        forms.push(form.split('>').next().unwrap_or_default().to_owned());
    }
    insta::assert_snapshot!(forms.join("\n"));
    insta::assert_snapshot!("conv_wgmma", listing_with(hopper, &cases[1]));
    check_with(hopper, "convolutions of warp groups", &cases);
}

/// An image for all batches lies nowhere as the copy engine wants it.
#[test]
fn broadcast_pixels_stay_with_other_kernels() {
    let mut b = GraphBuilder::new("broadcast");
    let x = b.input("x", DType::F16, [1, 8, 3200, 64]);
    let w = b.input("w", DType::F16, [1, 2, 64, 64]);
    let x = b.broadcast(x, [2, 8, 3200, 64]).unwrap();
    let op = Op::Conv {
        window: plain(2),
        groups: 1,
        layout: Layout::ChannelsLast,
    };
    let y = b.add1(op, &[x, w]).unwrap();
    b.output("y", y);
    let made = generate(
        &as_cluster(&b.finish().unwrap()),
        Arch::parse("sm_90a").unwrap(),
    );
    assert!(!made.unwrap().listing.contains("gm_load_pixels("));
}

/// Convolutions that stay with `mma.sync`: channels that fill too little of a tile, or end within
/// one of several groups; filters that span more than the copy engine reaches; its strides.
#[test]
fn convolutions_that_the_copy_engine_does_not_take() {
    let hopper = Arch::parse("sm_90a").unwrap().into();
    let usual = || Conv {
        dtype: DType::F16,
        images: 2,
        pixels: &[8, 3200],
        channels: [64, 64],
        groups: 1,
        taps: &[1, 2],
        window: plain(2),
    };
    let gathers = |change: fn(&mut Conv)| {
        let mut conv = usual();
        change(&mut conv);
        let text = listing_with(hopper, &conv.case(&mut Rng(92), false, false));
        assert!(
            text.contains("gm_load_pixels(") || text.contains("gm_block_product<"),
            "{text}"
        );
        text.contains("gm_load_pixels(")
    };
    assert!(gathers(|_| ()));
    assert!(gathers(|c| c.channels[0] = 96));
    assert!(gathers(|c| c.channels[0] = 48));
    assert!(!gathers(|c| c.channels[0] = 40));
    assert!(!gathers(|c| (c.channels[0], c.groups) = (96, 2)));
    assert!(gathers(|c| (c.channels[0], c.groups) = (128, 2)));
    assert!(gathers(|c| c.window.dilations[1] = 128));
    assert!(!gathers(|c| c.window.dilations[1] = 129));
    // With padding behind, the corner of the box is near enough.
    assert!(gathers(|c| (
        c.window.dilations[1],
        c.window.pads_high[1]
    ) = (255, 128)));
    assert!(!gathers(|c| (
        c.window.dilations[1],
        c.window.pads_high[1]
    ) = (256, 128)));
    assert!(gathers(|c| {
        c.window.strides[0] = 8;
        c.pixels = &[16, 3200];
    }));
    assert!(!gathers(|c| {
        c.window.strides[1] = 9;
        c.pixels = &[80, 3200];
    }));
    assert!(!gathers(|c| c.window.pads_low[1] = 129));
}
