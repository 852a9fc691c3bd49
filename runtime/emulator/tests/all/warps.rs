//! Exchanges within a warp, atomics of every kind, and accesses of every width, against plain Rust.

use gristmill_emulator::{Args, Module};

use super::support::{Random, device, download, line, module, run, upload};

const LANES: usize = 32;

#[test]
fn shuffles_votes_matches_and_reductions() {
    let (device, module) = (device(), module("integers"));
    let mut random = Random(21);
    let x: Vec<i32> = (0..64)
        .map(|_| (random.bits() % 2_000_000) as i32 - 500_000)
        .collect();
    let rows = 15;
    let out = device.alloc(rows * 64 * 4).unwrap();
    let args = Args::new().u64(upload(&device, &x)).u64(out).u32(64);
    run(&device, &module, "warps", &line(1, 64), &args);
    let found: Vec<i32> = download(&device, out, rows * 64);
    for (t, own) in x.iter().enumerate() {
        let (warp, lane) = (&x[t / LANES * LANES..][..LANES], t % LANES);
        let mask = |f: &dyn Fn(i32) -> bool| {
            (0..LANES)
                .filter(|l| f(warp[*l]))
                .fold(0u32, |m, l| m | 1 << l) as i32
        };
        let odd = mask(&|v| v & 1 != 0);
        let all_same = warp.iter().all(|v| v / 1_000_000 == warp[0] / 1_000_000);
        let expected = [
            warp[5],
            if lane >= 3 { warp[lane - 3] } else { *own },
            if lane % 16 + 7 < 16 {
                warp[lane + 7]
            } else {
                *own
            },
            warp[lane ^ 9],
            odd,
            i32::from(warp.contains(&3)),
            i32::from(warp.iter().all(|v| *v >= 0)),
            mask(&|v| v & 3 == own & 3),
            warp.iter().fold(0, |a, b| a.wrapping_add(*b)),
            *warp.iter().max().unwrap(),
            warp.iter().fold(0, |a, b| a ^ b),
            -1,
            if own & 1 != 0 {
                warp[odd.trailing_zeros() as usize]
            } else {
                -1
            },
            if all_same { -1 } else { 0 },
            i32::from(all_same),
        ];
        for (row, expected) in expected.into_iter().enumerate() {
            assert_eq!(found[row * 64 + t], expected, "row {row}, thread {t}");
        }
    }
}

/// A kernel in which each lane of a warp applies one atomic to the same place and keeps the old value.
fn atomic_kernel(opcode: &str, ty: &str, has_c: bool, in_shared: bool) -> String {
    let space = if in_shared { "shared" } else { "global" };
    let width = if ty.ends_with("64") { 64 } else { 32 };
    let (place, load, store) = if in_shared {
        let first = format!(
            "ld.global.b{width} %old, [%rd2];\nst.shared.b{width} [cell], %old;\nbar.warp.sync -1;\n"
        );
        let last = format!(
            "bar.warp.sync -1;\nld.shared.b{width} %old, [cell];\nst.global.b{width} [%rd2], %old;\n"
        );
        ("cell", first, last)
    } else {
        ("%rd2", String::new(), String::new())
    };
    let c = if has_c { ", %c" } else { "" };
    format!(
        ".version 9.0\n.target sm_90a\n.address_size 64\n.visible .entry k(.param .u64 in, .param .u64 to, .param .u64 out) {{\n\
         .shared .align 8 .b8 cell[8];\n.reg .b64 %rd<6>;\n.reg .b32 %r<2>;\n.reg .b{width} %old, %b, %c;\n.reg .pred %p;\n\
         ld.param.u64 %rd1, [in];\nld.param.u64 %rd2, [to];\nld.param.u64 %rd3, [out];\nmov.u32 %r1, %tid.x;\n\
         mul.wide.u32 %rd4, %r1, 16;\nadd.s64 %rd1, %rd1, %rd4;\nmul.wide.u32 %rd4, %r1, 8;\nadd.s64 %rd3, %rd3, %rd4;\n\
         ld.global.b{width} %b, [%rd1];\nld.global.b{width} %c, [%rd1+8];\nsetp.ne.u32 %p, %r1, 0;\n@%p bra FIRST;\n{load}FIRST:\nbar.warp.sync -1;\n\
         atom.{space}.{opcode}.{ty} %old, [{place}], %b{c};\nst.global.b{width} [%rd3], %old;\nbar.warp.sync -1;\n@%p bra LAST;\n{store}LAST:\nret;\n}}\n",
        load = load.replace("bar.warp.sync -1;\n", ""),
        store = store.replace("bar.warp.sync -1;\n", "")
    )
}

type Atomic = (&'static str, &'static str, fn(u64, u64, u64) -> u64);

#[test]
fn atomics_in_lane_order() {
    let cases: [Atomic; 21] = [
        ("add", "u32", |a, b, _| {
            u64::from((a as u32).wrapping_add(b as u32))
        }),
        ("add", "u64", |a, b, _| a.wrapping_add(b)),
        ("add", "f32", |a, b, _| {
            u64::from((f32::from_bits(a as u32) + f32::from_bits(b as u32)).to_bits())
        }),
        ("add", "f64", |a, b, _| {
            (f64::from_bits(a) + f64::from_bits(b)).to_bits()
        }),
        ("add.noftz", "f16x2", |a, _, _| a),
        ("min", "s32", |a, b, _| {
            u64::from((a as i32).min(b as i32) as u32)
        }),
        ("max", "s32", |a, b, _| {
            u64::from((a as i32).max(b as i32) as u32)
        }),
        ("min", "u32", |a, b, _| a.min(b)),
        ("max", "u32", |a, b, _| a.max(b)),
        ("min", "s64", |a, b, _| (a as i64).min(b as i64) as u64),
        ("max", "u64", |a, b, _| a.max(b)),
        ("and", "b32", |a, b, _| a & b),
        ("or", "b64", |a, b, _| a | b),
        ("xor", "b32", |a, b, _| a ^ b),
        ("exch", "b32", |_, b, _| b),
        ("exch", "b64", |_, b, _| b),
        ("cas", "b32", |a, b, c| if a == b { c } else { a }),
        ("cas", "b64", |a, b, c| if a == b { c } else { a }),
        ("inc", "u32", |a, b, _| if a >= b { 0 } else { a + 1 }),
        (
            "dec",
            "u32",
            |a, b, _| if a == 0 || a > b { b } else { a - 1 },
        ),
        ("or", "b32", |a, b, _| a | b),
    ];
    for (opcode, ty, f) in cases {
        for in_shared in [false, true] {
            let device = device();
            let wide = ty.ends_with("64");
            let mut random = Random(31);
            let mut operand = || match ty {
                "f32" => u64::from(random.float().to_bits()),
                "f64" => f64::from(random.float()).to_bits(),
                // Zeros leave the sum what it is.
                "f16x2" => 0,
                _ if opcode == "cas" || opcode == "inc" || opcode == "dec" => random.bits() % 4,
                _ if wide => random.bits(),
                _ => random.bits() & 0xffff_ffff,
            };
            let operands: Vec<u64> = (0..2 * LANES).map(|_| operand()).collect();
            let start = operand();
            let to = upload(&device, &[start]);
            let out = upload(&device, &[0u64; LANES]);
            let text = atomic_kernel(opcode, ty, opcode == "cas", in_shared);
            let module = Module::parse(&text).unwrap_or_else(|e| panic!("{opcode}.{ty}: {e}"));
            let args = Args::new().u64(upload(&device, &operands)).u64(to).u64(out);
            run(&device, &module, "k", &line(1, 32), &args);
            let mut value = start;
            for (lane, old) in download::<u64>(&device, out, LANES).into_iter().enumerate() {
                assert_eq!(
                    old, value,
                    "atom.{opcode}.{ty}, shared {in_shared}, lane {lane}"
                );
                value = f(value, operands[2 * lane], operands[2 * lane + 1]);
            }
            assert_eq!(
                download::<u64>(&device, to, 1)[0],
                value,
                "atom.{opcode}.{ty}, shared {in_shared}"
            );
        }
    }
}

/// Copies through registers, shared and local memory in every width, with what loads do to narrow numbers.
#[test]
fn accesses_of_every_width() {
    let widths = [
        ("u8", "b32", 1, 1),
        ("s8", "b32", 1, 1),
        ("u16", "b16", 2, 1),
        ("s16", "b32", 2, 1),
        ("u32", "b64", 4, 1),
        ("s32", "b64", 4, 1),
        ("b64", "b64", 8, 1),
        ("v2.u8", "b16", 1, 2),
        ("v4.u8", "b16", 1, 4),
        ("v2.b16", "b16", 2, 2),
        ("v4.b16", "b16", 2, 4),
        ("v2.f32", "b32", 4, 2),
        ("v4.f32", "b32", 4, 4),
        ("v2.f64", "b64", 8, 2),
        ("v2.b64", "b64", 8, 2),
    ];
    for space in ["global", "shared", "local"] {
        for (ty, register, size, count) in widths {
            let bytes = size * count;
            let names: Vec<String> = (0..count).map(|k| format!("%x{k}")).collect();
            let list = if count == 1 {
                names[0].clone()
            } else {
                format!("{{{}}}", names.join(", "))
            };
            // Signed loads fill the register; the store writes the low bytes again.
            let (declare, there) = match space {
                "shared" => (".shared .align 16 .b8 tile[512];\n".to_owned(), "[%rd4]"),
                "local" => (".local .align 16 .b8 tile[16];\n".to_owned(), "[tile]"),
                _ => (String::new(), "[%rd2]"),
            };
            let through = match space {
                "global" => String::new(),
                _ => {
                    format!("st.{space}.{ty} {there}, {list};\nld.{space}.{ty} {list}, {there};\n")
                }
            };
            let address = if space == "shared" {
                "mov.u64 %rd4, tile;\nadd.s64 %rd4, %rd4, %rd3;\n"
            } else {
                ""
            };
            let text = format!(
                ".version 9.0\n.target sm_90a\n.address_size 64\n.visible .entry k(.param .u64 in, .param .u64 out) {{\n{declare}\
                 .reg .b64 %rd<5>;\n.reg .b32 %r<2>;\n.reg .{register} {};\nld.param.u64 %rd1, [in];\nld.param.u64 %rd2, [out];\n\
                 mov.u32 %r1, %tid.x;\nmul.wide.u32 %rd3, %r1, {bytes};\nadd.s64 %rd1, %rd1, %rd3;\nadd.s64 %rd2, %rd2, %rd3;\n{address}\
                 ld.global.{ty} {list}, [%rd1];\n{through}st.global.{ty} [%rd2], {list};\nret;\n}}\n",
                names.join(", ")
            );
            let (device, module) = (
                device(),
                Module::parse(&text).unwrap_or_else(|e| panic!("{space} {ty}: {e}")),
            );
            let mut random = Random(41);
            let data: Vec<u8> = (0..32 * bytes).map(|_| random.bits() as u8).collect();
            let out = device.alloc(data.len()).unwrap();
            run(
                &device,
                &module,
                "k",
                &line(1, 32),
                &Args::new().u64(upload(&device, &data)).u64(out),
            );
            assert_eq!(
                download::<u8>(&device, out, data.len()),
                data,
                "{space} {ty}"
            );
        }
    }
}
