//! Every shape and type of `mma.sync`, and every layout of `wgmma`, against plain products of small whole numbers.

use gristmill_emulator::{Args, Module, Swizzle, TensorElement, TensorMap, encode_tensor_map};

use super::{
    formats::{Mode, fp8, fp8_value, small_float, value},
    support::{Random, device, download, line, run, upload},
};

/// An element type of a matrix: name, bits, encoding and decoding.
#[derive(Clone, Copy)]
struct Element {
    name: &'static str,
    bits: usize,
    encode: fn(f64) -> u64,
    decode: fn(u64) -> f64,
}

const F16: Element = Element {
    name: "f16",
    bits: 16,
    encode: |x| small_float(x, 5, 10, Mode::Nearest),
    decode: |b| value(b, 5, 10),
};
const BF16: Element = Element {
    name: "bf16",
    bits: 16,
    encode: |x| small_float(x, 8, 7, Mode::Nearest),
    decode: |b| value(b, 8, 7),
};
const TF32: Element = Element {
    name: "tf32",
    bits: 32,
    encode: |x| u64::from((x as f32).to_bits()),
    decode: |b| f32::from_bits(b as u32).into(),
};
const F32: Element = Element {
    name: "f32",
    ..TF32
};
const E4M3: Element = Element {
    name: "e4m3",
    bits: 8,
    encode: |x| fp8(x, 4, 3),
    decode: |b| fp8_value(b, 4, 3),
};
const E5M2: Element = Element {
    name: "e5m2",
    bits: 8,
    encode: |x| fp8(x, 5, 2),
    decode: |b| fp8_value(b, 5, 2),
};
const S8: Element = Element {
    name: "s8",
    bits: 8,
    encode: |x| x as i8 as u8 as u64,
    decode: |b| f64::from(b as i8),
};
const U8: Element = Element {
    name: "u8",
    bits: 8,
    encode: |x| x.abs() as u64,
    decode: |b| b as f64,
};
const S32: Element = Element {
    name: "s32",
    bits: 32,
    encode: |x| x as i32 as u32 as u64,
    decode: |b| f64::from(b as i32),
};
const F64: Element = Element {
    name: "f64",
    bits: 64,
    encode: f64::to_bits,
    decode: f64::from_bits,
};

/// Small whole numbers, exact in every type.
fn matrix(random: &mut Random, rows: usize, columns: usize, element: Element) -> Vec<u64> {
    (0..rows * columns)
        .map(|_| (element.encode)((random.bits() % 7) as f64 - 3.0))
        .collect()
}

fn multiply(
    a: &[u64],
    b: &[u64],
    c: &[u64],
    [m, n, k]: [usize; 3],
    [ea, eb, ec]: [Element; 3],
) -> Vec<f64> {
    let at = |i: usize, j: usize| -> f64 {
        (0..k)
            .map(|q| (ea.decode)(a[i * k + q]) * (eb.decode)(b[q * n + j]))
            .sum::<f64>()
            + (ec.decode)(c[i * n + j])
    };
    (0..m * n).map(|x| at(x / n, x % n)).collect()
}

/// Packs elements into words of registers: `per` to a register, in the order given.
fn pack(elements: &[u64], element: Element) -> Vec<u64> {
    let per = (32 / element.bits).max(1);
    elements
        .chunks(per)
        .map(|c| {
            c.iter()
                .rev()
                .fold(0, |all, x| all << element.bits.min(63) | x)
        })
        .collect()
}

/// A kernel that loads the fragments of each lane, executes one `mma`, and stores the result.
fn kernel(opcode: &str, counts: [usize; 3], wide: [bool; 3]) -> String {
    let ty = |wide: bool| if wide { "b64" } else { "b32" };
    let size = |wide: bool| if wide { 8 } else { 4 };
    let mut text = String::from(
        ".version 9.0\n.target sm_90a\n.address_size 64\n.visible .entry k(.param .u64 pa, .param .u64 pb, .param .u64 pc) {\n\
         .reg .b64 %rd<9>;\n.reg .b32 %r<2>;\nmov.u32 %r1, %tid.x;\n",
    );
    for ((name, count), wide) in ["a", "b", "c"].iter().zip(counts).zip(wide) {
        text += &format!(
            ".reg .{} %{name}<{count}>;\nld.param.u64 %rd1, [p{name}];\nmul.wide.u32 %rd2, %r1, {};\nadd.s64 %rd1, %rd1, %rd2;\n",
            ty(wide),
            count * size(wide)
        );
        for k in 0..count {
            text += &format!(
                "ld.global.{} %{name}{k}, [%rd1+{}];\n",
                ty(wide),
                k * size(wide)
            );
        }
    }
    let list = |name: &str, count: usize| -> String {
        (0..count)
            .map(|k| format!("%{name}{k}"))
            .collect::<Vec<_>>()
            .join(", ")
    };
    let [a, b, c] = [
        list("a", counts[0]),
        list("b", counts[1]),
        list("c", counts[2]),
    ];
    text += &format!("{opcode} {{{c}}}, {{{a}}}, {{{b}}}, {{{c}}};\n");
    for k in 0..counts[2] {
        text += &format!(
            "st.global.{} [%rd1+{}], %c{k};\n",
            ty(wide[2]),
            k * size(wide[2])
        );
    }
    text + "ret;\n}\n"
}

/// Elements of a lane in the order of its registers, after the figures of PTX ISA's "Matrix fragments for mma".
fn fragment(rows: usize, columns: usize, per: usize, lane: usize) -> Vec<(usize, usize)> {
    let (group, thread) = (lane / 4, lane % 4);
    let mut found = Vec::new();
    for chunk in (0..columns).step_by(4 * per) {
        for half in (0..rows).step_by(8) {
            found.extend((0..per).map(|j| (group + half, chunk + thread * per + j)));
        }
    }
    found
}

fn check_mma(shape: [usize; 3], [a, b, c]: [Element; 3]) {
    let [m, n, k] = shape;
    let mut random = Random((m + n * k) as u64);
    let (x, y, z) = (
        matrix(&mut random, m, k, a),
        matrix(&mut random, k, n, b),
        matrix(&mut random, m, n, c),
    );
    let per = |e: Element| (32 / e.bits).max(1);
    let fragments = |f: &dyn Fn(usize) -> Vec<u64>, e: Element| -> Vec<Vec<u64>> {
        (0..32).map(|l| pack(&f(l), e)).collect()
    };
    let of_a = fragments(
        &|l| {
            fragment(m, k, per(a), l)
                .into_iter()
                .map(|(i, q)| x[i * k + q])
                .collect()
        },
        a,
    );
    // The right-hand side is laid out as its transpose.
    let of_b = fragments(
        &|l| {
            fragment(n, k, per(b), l)
                .into_iter()
                .map(|(j, q)| y[q * n + j])
                .collect()
        },
        b,
    );
    let places = |l: usize| -> Vec<(usize, usize)> {
        (0..m)
            .step_by(8)
            .flat_map(|h| [0, 1].map(|j| (l / 4 + h, l % 4 * 2 + j)))
            .collect()
    };
    let of_c = fragments(
        &|l| places(l).into_iter().map(|(i, j)| z[i * n + j]).collect(),
        c,
    );
    let counts = [of_a[0].len(), of_b[0].len(), of_c[0].len()];
    let wide = [a, b, c].map(|e| e.bits == 64);
    let opcode = format!(
        "mma.sync.aligned.m{m}n{n}k{k}.row.col.{}.{}.{}.{}",
        c.name, a.name, b.name, c.name
    );
    let module =
        Module::parse(&kernel(&opcode, counts, wide)).unwrap_or_else(|e| panic!("{opcode}: {e}"));
    let device = device();
    let send = |f: &[Vec<u64>], wide: bool| match wide {
        true => upload(&device, &f.concat()),
        false => upload(
            &device,
            &f.concat().iter().map(|w| *w as u32).collect::<Vec<_>>(),
        ),
    };
    let to = send(&of_c, wide[2]);
    let args = Args::new()
        .u64(send(&of_a, wide[0]))
        .u64(send(&of_b, wide[1]))
        .u64(to);
    run(&device, &module, "k", &line(1, 32), &args);
    let count = 32 * counts[2];
    let words: Vec<u64> = match wide[2] {
        true => download(&device, to, count),
        false => download::<u32>(&device, to, count)
            .into_iter()
            .map(u64::from)
            .collect(),
    };
    let expected = multiply(&x, &y, &z, shape, [a, b, c]);
    for lane in 0..32 {
        for (e, (i, j)) in places(lane).into_iter().enumerate() {
            let word = words[lane * counts[2] + e / per(c)];
            let bits = if c.bits == 64 {
                word
            } else {
                word >> (c.bits * (e % per(c))) & (u64::MAX >> (64 - c.bits))
            };
            assert_eq!(
                (c.decode)(bits),
                expected[i * n + j],
                "{opcode}, row {i}, column {j}"
            );
        }
    }
}

#[test]
fn mma_shapes_and_types() {
    for (shape, types) in [
        ([16, 8, 8], [F16, F16, F32]),
        ([16, 8, 8], [F16, F16, F16]),
        ([16, 8, 16], [F16, F16, F32]),
        ([16, 8, 16], [F16, F16, F16]),
        ([16, 8, 8], [BF16, BF16, F32]),
        ([16, 8, 16], [BF16, BF16, F32]),
        ([16, 8, 4], [TF32, TF32, F32]),
        ([16, 8, 8], [TF32, TF32, F32]),
        ([16, 8, 32], [E4M3, E4M3, F32]),
        ([16, 8, 32], [E5M2, E4M3, F32]),
        ([8, 8, 16], [S8, S8, S32]),
        ([8, 8, 16], [U8, S8, S32]),
        ([16, 8, 16], [S8, U8, S32]),
        ([16, 8, 32], [S8, S8, S32]),
        ([8, 8, 4], [F64, F64, F64]),
        ([16, 8, 4], [F64, F64, F64]),
        ([16, 8, 8], [F64, F64, F64]),
        ([16, 8, 16], [F64, F64, F64]),
    ] {
        check_mma(shape, types);
    }
}

/// One product of a warp group: how its operands lie in shared memory.
#[derive(Clone, Copy)]
struct Layout {
    element: Element,
    tensor: TensorElement,
    k: usize,
    n: usize,
    swizzle: Swizzle,
    /// Columns are neighbours in memory, not the axis that is summed over.
    transposed: [bool; 2],
    a_in_registers: bool,
    accumulator: Element,
}

/// Boxes that are copied: offset in shared memory, coordinates in the tensor.
type Boxes = Vec<(usize, [usize; 2])>;

/// A tile copied by a tensor map, and the descriptor of its first product: what TMA writes is what wgmma reads. Returns
/// the boxes (offset, coordinates), the box, and the descriptor without its address.
fn operand_layout(outer: usize, l: &Layout, transposed: bool) -> (Boxes, [u32; 2], u64) {
    let width = match l.swizzle {
        Swizzle::None => 16,
        Swizzle::B32 => 32,
        Swizzle::B64 => 64,
        Swizzle::B128 => 128,
    };
    let code: u64 = [(16, 0), (128, 1), (64, 2), (32, 3)]
        .iter()
        .find(|(w, _)| *w == width)
        .unwrap()
        .1;
    let size = l.element.bits / 8;
    let inner = width / size;
    let (along, across) = if transposed {
        (outer, l.k)
    } else {
        (l.k, outer)
    };
    let boxes: Vec<_> = (0..along)
        .step_by(inner)
        .enumerate()
        .map(|(i, x)| (i * width * across, [x, 0]))
        .collect();
    // Eight rows of a box lie `8 * width` bytes apart; boxes lie a whole box apart.
    let (rows, next) = (8 * width as u64, (width * across) as u64);
    let (leading, stride) = match (transposed, l.swizzle) {
        (false, _) => (next, rows),
        (true, Swizzle::None) => (rows, next),
        (true, _) => (next, rows),
    };
    (
        boxes,
        [inner as u32, across as u32],
        leading >> 4 << 16 | stride >> 4 << 32 | code << 62,
    )
}

fn wgmma_kernel(
    l: &Layout,
    boxes: [&Boxes; 2],
    bytes: [usize; 2],
    descriptors: [u64; 2],
) -> String {
    let registers = l.n / 2 * l.accumulator.bits / 32;
    let mut text = format!(
        ".version 9.0\n.target sm_90a\n.address_size 64\n\
         .visible .entry k(.param .align 64 .b8 ma[128], .param .align 64 .b8 mb[128], .param .u64 pa, .param .u64 pc) {{\n\
         .shared .align 1024 .b8 sa[{}];\n.shared .align 1024 .b8 sb[{}];\n.shared .align 8 .b8 bar[8];\n\
         .reg .pred %p<4>;\n.reg .b32 %r<9>;\n.reg .b64 %rd<9>;\n.reg .b32 %c<{registers}>;\n.reg .b32 %a<4>;\n\
         mov.u32 %r1, %tid.x;\nmov.u32 %r2, bar;\nsetp.ne.u32 %p1, %r1, 0;\n@%p1 bra WAIT;\n\
         mbarrier.init.shared.b64 [%r2], 1;\nmbarrier.arrive.expect_tx.shared.b64 _, [%r2], {};\n",
        bytes[0].max(16),
        bytes[1],
        if l.a_in_registers {
            bytes[1]
        } else {
            bytes[0] + bytes[1]
        }
    );
    for (which, (name, list)) in ["a", "b"].iter().zip(boxes).enumerate() {
        if which == 0 && l.a_in_registers {
            continue;
        }
        text +=
            &format!("mov.b64 %rd1, m{name};\ncvta.param.u64 %rd1, %rd1;\nmov.u32 %r3, s{name};\n");
        for (offset, [x, y]) in list {
            text += &format!(
                "add.u32 %r4, %r3, {offset};\ncp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%r4], [%rd1, {{{x}, {y}}}], [%r2];\n"
            );
        }
    }
    text += "WAIT:\nbar.sync 0;\nTRY:\nmbarrier.try_wait.parity.shared.b64 %p2, [%r2], 0;\n@!%p2 bra TRY;\n";
    for (name, descriptor) in ["a", "b"].iter().zip(descriptors) {
        text += &format!("mov.u64 %rd3, s{name};\nshr.u64 %rd3, %rd3, 4;\nor.b64 %rd{name}, %rd3, {descriptor};\n")
            .replace("%rda", "%rd4")
            .replace("%rdb", "%rd5");
    }
    text += "ld.param.u64 %rd6, [pa];\nmul.wide.u32 %rd7, %r1, 16;\nadd.s64 %rd6, %rd6, %rd7;\n";
    text += "ld.global.v4.b32 {%a0, %a1, %a2, %a3}, [%rd6];\n";
    let list: Vec<String> = (0..registers).map(|k| format!("%c{k}")).collect();
    let a = if l.a_in_registers {
        "{%a0, %a1, %a2, %a3}"
    } else {
        "%rd4"
    };
    let (ta, tb) = (u8::from(l.transposed[0]), u8::from(l.transposed[1]));
    let tail = match (l.element.bits, l.accumulator.name, l.a_in_registers) {
        (_, "s32", _) => String::new(),
        (16, _, true) => format!(", 1, 1, {tb}"),
        (16, _, false) => format!(", 1, 1, {ta}, {tb}"),
        _ => ", 1, 1".to_owned(),
    };
    text += &format!(
        "setp.ne.u32 %p3, 0, 0;\nwgmma.fence.sync.aligned;\nwgmma.mma_async.sync.aligned.m64n{}k{}.{}.{}.{} {{{}}}, {a}, %rd5, %p3{tail};\n\
         wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;\n",
        l.n,
        l.k,
        l.accumulator.name,
        l.element.name,
        l.element.name,
        list.join(", ")
    );
    text += &format!(
        "ld.param.u64 %rd6, [pc];\nmul.wide.u32 %rd7, %r1, {};\nadd.s64 %rd6, %rd6, %rd7;\n",
        4 * registers
    );
    for (k, register) in list.iter().enumerate() {
        text += &format!("st.global.b32 [%rd6+{}], {register};\n", 4 * k);
    }
    text + "ret;\n}\n"
}

fn check_wgmma(l: Layout) {
    let (m, n, k) = (64, l.n, l.k);
    let what = format!(
        "{} n{n} {:?} {:?} {}",
        l.element.name, l.swizzle, l.transposed, l.a_in_registers
    );
    let mut random = Random((n + k) as u64);
    let (x, y) = (
        matrix(&mut random, m, k, l.element),
        matrix(&mut random, k, n, l.element),
    );
    let zero = vec![0; m * n];
    let device = device();
    let bytes = |elements: Vec<u64>| -> Vec<u8> {
        elements
            .iter()
            .flat_map(|e| e.to_le_bytes()[..l.element.bits / 8].to_vec())
            .collect()
    };
    // In memory: rows of `a` or its transpose, rows of the transpose of `b` or `b` itself.
    let transpose = |a: &[u64], rows: usize, columns: usize| -> Vec<u64> {
        (0..a.len())
            .map(|i| a[i % rows * columns + i / rows])
            .collect()
    };
    let in_memory = [
        bytes(if l.transposed[0] {
            transpose(&x, m, k)
        } else {
            x.clone()
        }),
        bytes(if l.transposed[1] {
            y.clone()
        } else {
            transpose(&y, k, n)
        }),
    ];
    let layouts = [
        operand_layout(m, &l, l.transposed[0]),
        operand_layout(n, &l, l.transposed[1]),
    ];
    let maps: Vec<[u8; 128]> = (0..2)
        .map(|which| {
            let outer = [m, n][which];
            let (along, across) = if l.transposed[which] {
                (outer, k)
            } else {
                (k, outer)
            };
            encode_tensor_map(&TensorMap {
                element: l.tensor,
                address: upload(&device, &in_memory[which]),
                sizes: vec![along as u64, across as u64],
                strides_bytes: vec![(along * l.element.bits / 8) as u64],
                tile: layouts[which].1.to_vec(),
                swizzle: l.swizzle,
                fills_with_nan: false,
                pixels: None,
            })
            .unwrap_or_else(|e| panic!("{what}: {e}"))
        })
        .collect();
    let per = 32 / l.element.bits;
    let fragments: Vec<u32> = (0..128)
        .flat_map(|t| {
            let own: Vec<u64> = fragment(16, k, per, t % 32)
                .into_iter()
                .map(|(i, q)| x[(t / 32 * 16 + i) * k + q])
                .collect();
            pack(&own, l.element)
                .into_iter()
                .map(|w| w as u32)
                .collect::<Vec<_>>()
        })
        .collect();
    let text = wgmma_kernel(
        &l,
        [&layouts[0].0, &layouts[1].0],
        [in_memory[0].len(), in_memory[1].len()],
        [layouts[0].2, layouts[1].2],
    );
    let module = Module::parse(&text).unwrap_or_else(|e| panic!("{what}: {e}"));
    let registers = n / 2 * l.accumulator.bits / 32;
    let c = device.alloc(128 * registers * 4).unwrap();
    let args = Args::new()
        .value(64, &maps[0])
        .value(64, &maps[1])
        .u64(upload(&device, &fragments))
        .u64(c);
    run(&device, &module, "k", &line(1, 128), &args);
    let words: Vec<u32> = download(&device, c, 128 * registers);
    let expected = multiply(
        &x,
        &y,
        &zero,
        [m, n, k],
        [l.element, l.element, l.accumulator],
    );
    let per = 32 / l.accumulator.bits;
    for t in 0..128 {
        // PTX ISA, "Accumulator D": eight columns at a time, two rows eight apart, two neighbours each.
        let places = (0..n / 8).flat_map(|b| {
            [0, 1]
                .into_iter()
                .flat_map(move |h| [0, 1].map(move |j| (b, h, j)))
        });
        for (e, (b, h, j)) in places.enumerate() {
            let (row, column) = (t / 32 * 16 + t % 32 / 4 + 8 * h, 8 * b + t % 4 * 2 + j);
            let word = u64::from(words[t * registers + e / per]);
            let bits =
                word >> (l.accumulator.bits * (e % per)) & (u64::MAX >> (64 - l.accumulator.bits));
            assert_eq!(
                (l.accumulator.decode)(bits),
                expected[row * n + column],
                "{what}, row {row}, column {column}"
            );
        }
    }
}

#[test]
fn wgmma_layouts_and_types() {
    let half = Layout {
        element: F16,
        tensor: TensorElement::F16,
        k: 16,
        n: 64,
        swizzle: Swizzle::B32,
        transposed: [false; 2],
        a_in_registers: false,
        accumulator: F32,
    };
    let mut layouts = vec![
        half,
        Layout {
            element: BF16,
            tensor: TensorElement::Bf16,
            n: 256,
            ..half
        },
        Layout {
            accumulator: F16,
            n: 8,
            ..half
        },
        Layout {
            swizzle: Swizzle::None,
            ..half
        },
        Layout {
            a_in_registers: true,
            n: 24,
            ..half
        },
        Layout {
            element: TF32,
            tensor: TensorElement::F32,
            k: 8,
            ..half
        },
        Layout {
            element: E4M3,
            tensor: TensorElement::U8,
            k: 32,
            ..half
        },
        Layout {
            element: E5M2,
            tensor: TensorElement::U8,
            k: 32,
            a_in_registers: true,
            ..half
        },
        Layout {
            element: S8,
            tensor: TensorElement::U8,
            k: 32,
            accumulator: S32,
            ..half
        },
        Layout {
            element: U8,
            tensor: TensorElement::U8,
            k: 32,
            accumulator: S32,
            swizzle: Swizzle::None,
            ..half
        },
    ];
    for swizzle in [Swizzle::None, Swizzle::B32, Swizzle::B64, Swizzle::B128] {
        for transposed in [[false, true], [true, true]] {
            // A transposed operand fills the swizzle; the other one must be as wide, so both are, or it is in registers.
            let n = 128;
            if transposed == [true, true] {
                layouts.push(Layout {
                    swizzle,
                    transposed,
                    n,
                    ..half
                });
            } else {
                layouts.push(Layout {
                    swizzle,
                    transposed,
                    n,
                    a_in_registers: true,
                    ..half
                });
            }
        }
    }
    for layout in layouts {
        check_wgmma(layout);
    }
}
