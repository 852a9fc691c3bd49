//! Bulk copies in im2col mode against plain Rust: the pixels that a convolution's filter meets.

use gristmill_emulator::{
    Args, Fault, FaultKind, Module, Pixels, Swizzle, TensorElement, TensorMap, encode_tensor_map,
};

use super::support::{device, download, line, ptx, try_run, upload};

/// Channels and pixels of a tile.
const CHANNELS: usize = 16;
const PIXELS: usize = 64;

/// Images of some channels, lists innermost first: a filter of `size` elements `dilation` apart,
/// strides, and padding before and behind.
struct Images {
    channels: usize,
    sizes: Vec<usize>,
    n: usize,
    filter: Vec<[usize; 2]>,
    steps: Vec<usize>,
    pads: Vec<[usize; 2]>,
}

impl Images {
    /// Pixels of the result along each spatial axis.
    fn results(&self) -> Vec<usize> {
        let axes = 0..self.sizes.len();
        let of = |d: usize| {
            let span = (self.filter[d][0] - 1) * self.filter[d][1] + 1;
            (self.sizes[d] + self.pads[d][0] + self.pads[d][1] - span) / self.steps[d] + 1
        };
        axes.map(of).collect()
    }

    /// Places along the spatial axes, then the image, of the result's pixel number `p` for an
    /// element of the filter.
    fn place(&self, p: usize, element: &[usize]) -> Vec<i64> {
        let mut rest = p;
        let mut at: Vec<i64> = Vec::new();
        for (d, extent) in self.results().into_iter().enumerate() {
            let first = (rest % extent * self.steps[d]) as i64 - self.pads[d][0] as i64;
            at.push(first + (element[d] * self.filter[d][1]) as i64);
            rest /= extent;
        }
        at.push(rest as i64);
        at
    }

    /// Element `c` of a place; zero outside.
    fn value(&self, x: &[f32], at: &[i64], c: usize) -> f32 {
        let extents = [&self.sizes[..], &[self.n]].concat();
        let mut index = 0;
        for (&i, extent) in at.iter().zip(extents).rev() {
            if i < 0 || i >= extent as i64 {
                return 0.0;
            }
            index = index * extent + i as usize;
        }
        if c < self.channels {
            x[index * self.channels + c]
        } else {
            0.0
        }
    }

    fn map(&self, address: u64) -> TensorMap {
        let axes = [self.channels].into_iter().chain(self.sizes.clone());
        let mut sizes: Vec<u64> = axes.map(|n| n as u64).collect();
        let strides = sizes.iter().scan(4, |bytes, n| {
            *bytes *= n;
            Some(*bytes)
        });
        let strides_bytes = strides.collect();
        sizes.push(self.n as u64);
        let axes = || 0..self.sizes.len();
        let upper = |d: usize| {
            let span = (self.filter[d][0] - 1) * self.filter[d][1];
            self.pads[d][1] as i32 - span as i32
        };
        TensorMap {
            element: TensorElement::F32,
            address,
            sizes,
            strides_bytes,
            tile: vec![CHANNELS as u32, PIXELS as u32],
            swizzle: Swizzle::None,
            fills_with_nan: false,
            pixels: Some(Pixels {
                lower: axes().map(|d| -(self.pads[d][0] as i32)).collect(),
                upper: axes().map(upper).collect(),
                steps: self.steps.iter().map(|&s| s as u32).collect(),
            }),
        }
    }

    /// Elements of the images: each of its own.
    fn elements(&self) -> Vec<f32> {
        let n = self.channels * self.n * self.sizes.iter().product::<usize>();
        (0..n).map(|i| i as f32 + 1.0).collect()
    }

    /// Copies all pixels of the result for one element of the filter, with channels from `first`
    /// on, and compares.
    fn check(&self, kernel: &str, element: &[usize], first: usize) {
        let x = self.elements();
        // One tile more than there are pixels: it lies outside as a whole.
        let n_blocks = (self.n * self.results().iter().product::<usize>()).div_ceil(PIXELS) + 1;
        let n_blocks = n_blocks.next_multiple_of(2);
        let starts: Vec<i32> = (0..n_blocks)
            .flat_map(|b| {
                let place = self.place(b * PIXELS, &vec![0; self.sizes.len()]);
                [first as i64].into_iter().chain(place).map(|i| i as i32)
            })
            .collect();
        let y = self
            .run(kernel, &x, &starts, element)
            .unwrap_or_else(|e| panic!("{kernel}: {e}"));
        let is_shared = kernel == "pixels_shared";
        for (i, value) in y.iter().enumerate() {
            let (block, pixel, c) = (i / (PIXELS * CHANNELS), i / CHANNELS % PIXELS, i % CHANNELS);
            let block = if is_shared { block / 2 * 2 } else { block };
            let at = self.place(block * PIXELS + pixel, element);
            let expected = self.value(&x, &at, first + c);
            assert_eq!(*value, expected, "{kernel}: pixel {at:?}, channel {c}");
        }
    }

    fn run(
        &self,
        kernel: &str,
        x: &[f32],
        starts: &[i32],
        element: &[usize],
    ) -> Result<Vec<f32>, Fault> {
        let (device, module) = (device(), Module::parse(&ptx("im2col"))?);
        let n_blocks = starts.len() / (self.sizes.len() + 2);
        let n = n_blocks * PIXELS * CHANNELS;
        let map = encode_tensor_map(&self.map(upload(&device, x)))?;
        let y = device.alloc(n * 4)?;
        let args = Args::new().value(64, &map).u64(upload(&device, starts));
        let offsets = element.iter().zip(&self.filter);
        let args = offsets.fold(args, |args, (e, f)| {
            args.value(2, &((e * f[1]) as u16).to_le_bytes())
        });
        let args = args.u64(y);
        try_run(&device, &module, kernel, &line(n_blocks as u32, 128), &args)?;
        Ok(download(&device, y, n))
    }
}

/// 3 images of 13 x 9 pixels, a filter of 3 x 2 elements, 2 apart along the first axis.
fn plane() -> Images {
    Images {
        channels: 20,
        sizes: vec![13, 9],
        n: 3,
        filter: vec![[3, 2], [2, 1]],
        steps: vec![2, 1],
        pads: vec![[2, 1], [0, 1]],
    }
}

#[test]
fn pixels_of_every_rank() {
    let row = Images {
        channels: 16,
        sizes: vec![50],
        n: 4,
        filter: vec![[5, 3]],
        steps: vec![3],
        pads: vec![[4, 6]],
    };
    (0..5).for_each(|e| row.check("pixels_3d", &[e], 0));
    let plane = plane();
    for (x, y) in [(0, 0), (1, 0), (2, 1)] {
        plane.check("pixels_4d", &[x, y], 0);
        plane.check("pixels_shared", &[x, y], 16);
    }
    let space = Images {
        channels: 16,
        sizes: vec![5, 6, 7],
        n: 2,
        filter: vec![[3, 1], [1, 1], [2, 3]],
        steps: vec![1, 2, 2],
        pads: vec![[1, 1], [0, 0], [3, 0]],
    };
    for element in [[0, 0, 0], [1, 0, 1], [2, 0, 1]] {
        space.check("pixels_5d", &element, 0);
    }
}

#[test]
fn copies_that_no_one_has_defined_are_faults() {
    let plane = plane();
    let x = plane.elements();
    let fault = |starts: [i32; 4], element: [usize; 2]| {
        let fault = plane.run("pixels_4d", &x, &starts, &element);
        let fault = fault.expect_err("a fault");
        assert_eq!(fault.kind(), FaultKind::Misuse, "{fault}");
        fault.to_string()
    };
    let text = fault([0, -1, 0, 0], [0, 0]);
    assert!(text.contains("begins at pixel -1, which is none of -2, in steps of 2"));
    let text = fault([0, -2, 9, 0], [0, 0]);
    assert!(text.contains("begins at pixel 9"), "{text}");
    let text = fault([0, -2, 0, 0], [128, 0]);
    assert!(text.contains("an offset of 256; 0 to 255"), "{text}");
}

/// A map of one mode in a copy of the other.
#[test]
fn maps_and_copies_have_one_mode() {
    let plane = plane();
    let (device, module) = (device(), Module::parse(&ptx("im2col")).unwrap());
    let address = upload(&device, &plane.elements());
    let tiles = TensorMap {
        tile: vec![16, 4, 4, 4],
        pixels: None,
        ..plane.map(address)
    };
    let map = encode_tensor_map(&tiles).unwrap();
    let args = Args::new().value(64, &map).u64(upload(&device, &[0i32; 4]));
    let args = args.value(2, &[0, 0]).value(2, &[0, 0]);
    let args = args.u64(device.alloc(4096).unwrap());
    let fault = try_run(&device, &module, "pixels_4d", &line(1, 128), &args).unwrap_err();
    assert!(
        fault.to_string().contains("im2col mode by a map of tiles"),
        "{fault}"
    );
    let map = encode_tensor_map(&plane.map(address)).unwrap();
    let args = Args::new().value(64, &map).u64(device.alloc(4096).unwrap());
    let fault = try_run(&device, &module, "tile_4d", &line(1, 128), &args).unwrap_err();
    assert!(
        fault.to_string().contains("a tile by a map in im2col mode"),
        "{fault}"
    );
    let mut wrong = plane.map(address);
    wrong.pixels = Some(Pixels {
        steps: vec![9, 1],
        ..wrong.pixels.unwrap_or_default()
    });
    let fault = encode_tensor_map(&wrong).expect_err("steps of 9");
    assert!(fault.to_string().contains("a step of 9 pixels"), "{fault}");
}
