//! Single instructions against scalar Rust: PTX text around one opcode, random and special operands, bits compared.

use super::{
    formats::{Mode, round_single, round_sum, rounded_single, small_float},
    support::{Random, device, download, line, upload},
};
use gristmill_emulator::{Args, Module};

/// Threads of a test launch: eight warps.
const THREADS: usize = 256;

/// An instruction: opcode, types of its target and sources (`h` 16, `r` 32, `d` 64 bits, `p` a predicate), and what it
/// computes of its operands' bits.
pub struct Case {
    pub opcode: &'static str,
    pub types: &'static str,
    pub f: fn([u64; 3]) -> u64,
}

const fn case(opcode: &'static str, types: &'static str, f: fn([u64; 3]) -> u64) -> Case {
    Case { opcode, types, f }
}

fn register(ty: u8) -> &'static str {
    match ty {
        b'h' => "b16",
        b'r' => "b32",
        b'p' => "pred",
        _ => "b64",
    }
}

fn width(ty: u8) -> u32 {
    match ty {
        b'h' => 16,
        b'r' => 32,
        b'p' => 1,
        _ => 64,
    }
}

/// A kernel that applies `opcode` to one operand triple per thread.
pub fn kernel(opcode: &str, types: &[u8]) -> String {
    let (target, sources) = (types[0], &types[1..]);
    let mut text = String::from(
        ".version 9.0\n.target sm_90a\n.address_size 64\n.visible .entry k(.param .u64 in, .param .u64 out) {\n\
         .reg .b64 %rd<8>;\n.reg .b32 %r<4>;\n",
    );
    text += &format!(".reg .{} %to;\n", register(target));
    for (k, ty) in sources.iter().enumerate() {
        text += &format!(".reg .{} %from{k};\n", register(*ty));
    }
    text += "ld.param.u64 %rd1, [in];\nld.param.u64 %rd2, [out];\nmov.u32 %r1, %tid.x;\nmul.wide.u32 %rd3, %r1, 24;\n\
             add.s64 %rd1, %rd1, %rd3;\nmul.wide.u32 %rd4, %r1, 8;\nadd.s64 %rd2, %rd2, %rd4;\n";
    let mut list = Vec::new();
    for (k, ty) in sources.iter().enumerate() {
        match ty {
            b'p' => {
                text += &format!(
                    "ld.global.u32 %r2, [%rd1+{}];\nsetp.ne.u32 %from{k}, %r2, 0;\n",
                    8 * k
                )
            }
            _ => text += &format!("ld.global.{} %from{k}, [%rd1+{}];\n", register(*ty), 8 * k),
        }
        list.push(format!("%from{k}"));
    }
    text += &format!("{opcode} %to, {};\n", list.join(", "));
    text += match target {
        b'p' => "selp.u64 %rd5, 1, 0, %to;\n",
        b'h' => "cvt.u64.u16 %rd5, %to;\n",
        b'r' => "cvt.u64.u32 %rd5, %to;\n",
        _ => "mov.u64 %rd5, %to;\n",
    };
    text + "st.global.u64 [%rd2], %rd5;\nret;\n}\n"
}

const SPECIAL_32: [u32; 24] = [
    0,
    1,
    2,
    3,
    31,
    32,
    33,
    0x7f,
    0x80,
    0xff,
    0x7fff,
    0x8000,
    0xffff,
    0x7fff_ffff,
    0x8000_0000,
    0xffff_ffff,
    0x3f80_0000,
    0xbf80_0000,
    0x7f80_0000,
    0xff80_0000,
    0x7fc0_0000,
    0x0080_0000,
    0x007f_ffff,
    0x7f7f_ffff,
];
const SPECIAL_64: [u64; 16] = [
    0,
    1,
    63,
    64,
    65,
    0x7fff_ffff_ffff_ffff,
    0x8000_0000_0000_0000,
    u64::MAX,
    0x3ff0_0000_0000_0000,
    0xbff0_0000_0000_0000,
    0x7ff0_0000_0000_0000,
    0xfff0_0000_0000_0000,
    0x7ff8_0000_0000_0000,
    0x0010_0000_0000_0000,
    0x000f_ffff_ffff_ffff,
    0x7fef_ffff_ffff_ffff,
];
const SPECIAL_16: [u16; 14] = [
    0, 1, 0x3c00, 0xbc00, 0x7c00, 0xfc00, 0x7e00, 0x0400, 0x03ff, 0x7bff, 0x3f80, 0x7f80, 0x8000,
    0xffff,
];

/// An operand: special, small, a float near 1, or any bits.
fn operand(random: &mut Random, ty: u8) -> u64 {
    let bits = random.bits();
    let pick = random.bits();
    match (pick % 4, ty) {
        (0, b'h') => u64::from(SPECIAL_16[bits as usize % SPECIAL_16.len()]),
        (0, b'r') => u64::from(SPECIAL_32[bits as usize % SPECIAL_32.len()]),
        (0, b'd') => SPECIAL_64[bits as usize % SPECIAL_64.len()],
        (1, b'p') => bits & 1,
        (1, _) => bits % 70,
        (2, b'r') => u64::from((random.float() * 100.0).to_bits()),
        (2, b'd') => (f64::from(random.float()) * 100.0).to_bits(),
        (2, b'h') => u64::from(0x3800 | bits as u16 & 0x87ff),
        (_, b'p') => bits & 1,
        _ => bits & (u64::MAX >> (64 - width(ty))),
    }
}

/// Runs an opcode on random operands: operands and results.
pub fn results(opcode: &str, types: &str, seed: u64) -> Vec<([u64; 3], u64)> {
    let types = types.as_bytes();
    let module = Module::parse(&kernel(opcode, types)).unwrap_or_else(|e| panic!("{opcode}: {e}"));
    let device = device();
    let mut random = Random(seed);
    let mut operands = vec![[0u64; 3]; THREADS];
    for triple in &mut operands {
        for (value, ty) in triple.iter_mut().zip(&types[1..]) {
            *value = operand(&mut random, *ty);
        }
    }
    let flat: Vec<u64> = operands.iter().flatten().copied().collect();
    let out = device.alloc(THREADS * 8).unwrap();
    let args = Args::new().u64(upload(&device, &flat)).u64(out);
    super::support::run(&device, &module, "k", &line(1, THREADS as u32), &args);
    operands
        .into_iter()
        .zip(download(&device, out, THREADS))
        .collect()
}

#[track_caller]
fn check(cases: &[Case]) {
    let mut wrong = Vec::new();
    for case in cases {
        let mask = u64::MAX >> (64 - width(case.types.as_bytes()[0]));
        for (operands, found) in results(case.opcode, case.types, 7) {
            let expected = (case.f)(operands) & mask;
            if found != expected {
                wrong.push(format!(
                    "{} {operands:x?}: found {found:#x}, expected {expected:#x}",
                    case.opcode
                ));
                break;
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

fn s(x: u64) -> i32 {
    x as i32
}

fn w(x: i32) -> u64 {
    u64::from(x as u32)
}

#[test]
fn integers() {
    check(&[
        case("add.s32", "rrr", |[a, b, _]| w(s(a).wrapping_add(s(b)))),
        case("add.sat.s32", "rrr", |[a, b, _]| {
            w(s(a).saturating_add(s(b)))
        }),
        case("sub.u16", "hhh", |[a, b, _]| a.wrapping_sub(b)),
        case("sub.s64", "ddd", |[a, b, _]| a.wrapping_sub(b)),
        case("mul.lo.s32", "rrr", |[a, b, _]| a.wrapping_mul(b)),
        case("mul.lo.u16", "hhh", |[a, b, _]| a.wrapping_mul(b)),
        case("mul.lo.s64", "ddd", |[a, b, _]| a.wrapping_mul(b)),
        case("mul.hi.u32", "rrr", |[a, b, _]| (a * b) >> 32),
        case("mul.hi.s32", "rrr", |[a, b, _]| {
            ((i64::from(s(a)) * i64::from(s(b))) >> 32) as u64
        }),
        case("mul.hi.s16", "hhh", |[a, b, _]| {
            ((i32::from(a as i16) * i32::from(b as i16)) >> 16) as u64
        }),
        case("mul.hi.u64", "ddd", |[a, b, _]| {
            ((u128::from(a) * u128::from(b)) >> 64) as u64
        }),
        case("mul.hi.s64", "ddd", |[a, b, _]| {
            ((i128::from(a as i64) * i128::from(b as i64)) >> 64) as u64
        }),
        case("mul.wide.s32", "drr", |[a, b, _]| {
            (i64::from(s(a)) * i64::from(s(b))) as u64
        }),
        case("mul.wide.u32", "drr", |[a, b, _]| a * b),
        case("mul.wide.u16", "rhh", |[a, b, _]| a * b),
        case("mul.wide.s16", "rhh", |[a, b, _]| {
            w(i32::from(a as i16) * i32::from(b as i16))
        }),
        case("mad.lo.s32", "rrrr", |[a, b, c]| {
            a.wrapping_mul(b).wrapping_add(c)
        }),
        case("mad.hi.u32", "rrrr", |[a, b, c]| {
            ((a * b) >> 32).wrapping_add(c)
        }),
        case("mad.wide.u32", "drrd", |[a, b, c]| (a * b).wrapping_add(c)),
        case("mad.wide.s32", "drrd", |[a, b, c]| {
            ((i64::from(s(a)) * i64::from(s(b))) as u64).wrapping_add(c)
        }),
        case("mad.lo.u64", "dddd", |[a, b, c]| {
            a.wrapping_mul(b).wrapping_add(c)
        }),
        case("mul24.lo.s32", "rrr", |[a, b, _]| {
            w((s(a) << 8 >> 8).wrapping_mul(s(b) << 8 >> 8))
        }),
        case("mul24.hi.u32", "rrr", |[a, b, _]| {
            ((a & 0xff_ffff) * (b & 0xff_ffff)) >> 16
        }),
        case("div.u32", "rrr", |[a, b, _]| {
            a.checked_div(b).unwrap_or(u64::MAX)
        }),
        case("div.s32", "rrr", |[a, b, _]| {
            if b == 0 {
                u64::MAX
            } else {
                w(s(a).wrapping_div(s(b)))
            }
        }),
        case("div.s64", "ddd", |[a, b, _]| {
            if b == 0 {
                u64::MAX
            } else {
                (a as i64).wrapping_div(b as i64) as u64
            }
        }),
        case("rem.u32", "rrr", |[a, b, _]| if b == 0 { a } else { a % b }),
        case("rem.s32", "rrr", |[a, b, _]| {
            if b == 0 {
                a
            } else {
                w(s(a).wrapping_rem(s(b)))
            }
        }),
        case("rem.u64", "ddd", |[a, b, _]| if b == 0 { a } else { a % b }),
        case("abs.s32", "rr", |[a, ..]| w(s(a).wrapping_abs())),
        case("neg.s64", "dd", |[a, ..]| a.wrapping_neg()),
        case("min.s32", "rrr", |[a, b, _]| w(s(a).min(s(b)))),
        case("max.u32", "rrr", |[a, b, _]| a.max(b)),
        case("min.s16", "hhh", |[a, b, _]| {
            (a as i16).min(b as i16) as u64
        }),
        case("max.s64", "ddd", |[a, b, _]| {
            (a as i64).max(b as i64) as u64
        }),
        case("sad.s32", "rrrr", |[a, b, c]| {
            u64::from(s(a).abs_diff(s(b)).wrapping_add(c as u32))
        }),
        case("sad.u32", "rrrr", |[a, b, c]| {
            u64::from((a as u32).abs_diff(b as u32).wrapping_add(c as u32))
        }),
        case("add.u16x2", "rrr", |[a, b, _]| {
            (a & 0xffff).wrapping_add(b) & 0xffff | (a >> 16).wrapping_add(b >> 16) << 16
        }),
        case("dp4a.s32.u32", "rrrr", |[a, b, c]| {
            let products =
                (0..4).map(|k| i32::from((a >> (8 * k)) as i8) * i32::from((b >> (8 * k)) as u8));
            w(products.fold(s(c), i32::wrapping_add))
        }),
        case("dp2a.hi.u32.s32", "rrrr", |[a, b, c]| {
            let products = (0..2)
                .map(|k| i32::from((a >> (16 * k)) as u16) * i32::from((b >> (8 * k + 16)) as i8));
            w(products.fold(s(c), i32::wrapping_add))
        }),
    ]);
}

#[test]
fn bits() {
    check(&[
        case("and.b32", "rrr", |[a, b, _]| a & b),
        case("or.b64", "ddd", |[a, b, _]| a | b),
        case("xor.b16", "hhh", |[a, b, _]| a ^ b),
        case("not.b64", "dd", |[a, ..]| !a),
        case("cnot.b32", "rr", |[a, ..]| u64::from(a == 0)),
        case(
            "shl.b32",
            "rrr",
            |[a, b, _]| if b > 31 { 0 } else { a << b },
        ),
        case(
            "shl.b64",
            "ddr",
            |[a, b, _]| if b > 63 { 0 } else { a << b },
        ),
        case(
            "shr.u32",
            "rrr",
            |[a, b, _]| if b > 31 { 0 } else { a >> b },
        ),
        case("shr.s32", "rrr", |[a, b, _]| w(s(a) >> b.min(31))),
        case("shr.s64", "ddr", |[a, b, _]| (a as i64 >> b.min(63)) as u64),
        case("shr.s16", "hhr", |[a, b, _]| (a as i16 >> b.min(15)) as u64),
        case("shf.l.wrap.b32", "rrrr", |[a, b, c]| {
            (b << 32 | a) << (c & 31) >> 32
        }),
        case("shf.l.clamp.b32", "rrrr", |[a, b, c]| {
            (b << 32 | a) << c.min(32) >> 32
        }),
        case("shf.r.wrap.b32", "rrrr", |[a, b, c]| {
            (b << 32 | a) >> (c & 31)
        }),
        case("shf.r.clamp.b32", "rrrr", |[a, b, c]| {
            (b << 32 | a) >> c.min(32)
        }),
        case("popc.b32", "rr", |[a, ..]| u64::from(a.count_ones())),
        case("popc.b64", "rd", |[a, ..]| u64::from(a.count_ones())),
        case("clz.b32", "rr", |[a, ..]| {
            u64::from((a as u32).leading_zeros())
        }),
        case("clz.b64", "rd", |[a, ..]| u64::from(a.leading_zeros())),
        case("brev.b32", "rr", |[a, ..]| {
            u64::from((a as u32).reverse_bits())
        }),
        case("brev.b64", "dd", |[a, ..]| a.reverse_bits()),
        case("bfind.u32", "rr", |[a, ..]| {
            (31u32.wrapping_sub((a as u32).leading_zeros())).into()
        }),
        case("bfind.shiftamt.u32", "rr", |[a, ..]| {
            if a == 0 {
                u64::MAX
            } else {
                u64::from((a as u32).leading_zeros())
            }
        }),
        case("bfind.s64", "rd", |[a, ..]| {
            let bits = if (a as i64) < 0 { !a } else { a };
            (63u32.wrapping_sub(bits.leading_zeros())).into()
        }),
        case("bfe.u32", "rrrr", |[a, b, c]| extract(a, b, c, 32, false)),
        case("bfe.s32", "rrrr", |[a, b, c]| extract(a, b, c, 32, true)),
        case("bfe.u64", "ddrr", |[a, b, c]| extract(a, b, c, 64, false)),
        case("bfe.s64", "ddrr", |[a, b, c]| extract(a, b, c, 64, true)),
        case("prmt.b32", "rrrr", |[a, b, c]| {
            let byte = |k: u64| {
                let nibble = c >> (4 * k) & 15;
                let byte = (b << 32 | a) >> (8 * (nibble & 7)) & 255;
                if nibble & 8 == 0 {
                    byte
                } else {
                    255 * (byte >> 7)
                }
            };
            (0..4).fold(0, |all, k| all | byte(k) << (8 * k))
        }),
        case("bmsk.clamp.b32", "rrr", |[a, b, _]| {
            (0..32)
                .filter(|k| (a..a + b).contains(k))
                .fold(0, |all, k| all | 1 << k)
        }),
        case("selp.b32", "rrrp", |[a, b, c]| if c != 0 { a } else { b }),
        case("selp.f64", "dddp", |[a, b, c]| if c != 0 { a } else { b }),
        case(
            "slct.b32.s32",
            "rrrr",
            |[a, b, c]| if s(c) >= 0 { a } else { b },
        ),
        case("mov.b32", "rr", |[a, ..]| a),
        case("xor.pred", "ppp", |[a, b, _]| a ^ b),
        case("and.pred", "ppp", |[a, b, _]| a & b),
        case("not.pred", "pp", |[a, ..]| 1 - a),
    ]);
}

/// PTX ISA's pseudo-code of `bfe`.
fn extract(a: u64, position: u64, length: u64, bits: u64, signed: bool) -> u64 {
    let (position, length) = (position & 255, length & 255);
    let fill = if !signed || length == 0 {
        0
    } else {
        a >> (position + length - 1).min(bits - 1) & 1
    };
    let bit = |k: u64| {
        if k < length && position + k < bits {
            a >> (position + k) & 1
        } else {
            fill
        }
    };
    (0..bits).fold(0, |all, k| all | bit(k) << k)
}

#[test]
fn four_operands_and_tables() {
    // The fourth operand is a constant.
    for (position, length) in [(0u64, 8u64), (5, 40), (31, 1), (40, 3), (3, 0)] {
        let text = format!(
            "{{ .reg .b32 %t; mov.b32 %t, {position}; bfi.b32 %to, %from0, %from1, %t, {length}; }} //"
        );
        for ([a, b, _], found) in results(&text, "rrr", 3) {
            let bit =
                |k: u64| if (position..position + length).contains(&k) { a >> (k - position) } else { b >> k } & 1;
            assert_eq!(
                found,
                (0..32).fold(0, |all, k| all | bit(k) << k),
                "bfi {position} {length}"
            );
        }
    }
    for table in [0x80u64, 0xe8, 0x96, 0x1b, 0xca] {
        let text = format!("lop3.b32 %to, %from0, %from1, %from2, {table}; //");
        for ([a, b, c], found) in results(&text, "rrrr", 4) {
            let bit = |k: u64| table >> ((a >> k & 1) << 2 | (b >> k & 1) << 1 | c >> k & 1) & 1;
            assert_eq!(
                found,
                (0..32).fold(0, |all, k| all | bit(k) << k),
                "lop3 {table:#x}"
            );
        }
    }
    let text = "{ .reg .b32 %t; add.cc.u32 %t, %from0, %from1; addc.u32 %to, %from2, 0; } //";
    for ([a, b, c], found) in results(text, "rrrr", 5) {
        assert_eq!(found, (c + ((a + b) >> 32)) & 0xffff_ffff);
    }
    let text = "{ .reg .b32 %t; sub.cc.u32 %t, %from0, %from1; subc.u32 %to, %from2, 1; } //";
    for ([a, b, c], found) in results(text, "rrrr", 6) {
        assert_eq!(found, c.wrapping_sub(1 + u64::from(a < b)) & 0xffff_ffff);
    }
    let text = "{ .reg .b32 %t; mad.lo.cc.u32 %t, %from0, %from1, %from2; madc.hi.u32 %to, %from0, %from1, 7; } //";
    for ([a, b, c], found) in results(text, "rrrr", 7) {
        let low = ((a * b) & 0xffff_ffff) + c;
        assert_eq!(found, (((a * b) >> 32) + 7 + (low >> 32)) & 0xffff_ffff);
    }
}

fn f(x: u64) -> f32 {
    f32::from_bits(x as u32)
}

/// A single-precision result: NaN is canonical.
fn r(x: f32) -> u64 {
    if x.is_nan() {
        0x7fff_ffff
    } else {
        u64::from(x.to_bits())
    }
}

fn flush(x: f32) -> f32 {
    if x.is_subnormal() {
        0f32.copysign(x)
    } else {
        x
    }
}

fn least(a: f32, b: f32) -> f32 {
    match (a.is_nan(), b.is_nan()) {
        (true, _) => b,
        (_, true) => a,
        _ if a == b => {
            if a.is_sign_negative() {
                a
            } else {
                b
            }
        }
        _ => {
            if a < b {
                a
            } else {
                b
            }
        }
    }
}

#[test]
fn single_precision() {
    check(&[
        case("add.f32", "rrr", |[a, b, _]| r(f(a) + f(b))),
        case("sub.rn.f32", "rrr", |[a, b, _]| r(f(a) - f(b))),
        case("mul.f32", "rrr", |[a, b, _]| r(f(a) * f(b))),
        case(
            "fma.rn.f32",
            "rrrr",
            |[a, b, c]| r(f(a).mul_add(f(b), f(c))),
        ),
        case("div.rn.f32", "rrr", |[a, b, _]| r(f(a) / f(b))),
        case("sqrt.rn.f32", "rr", |[a, ..]| r(f(a).sqrt())),
        case("rcp.rn.f32", "rr", |[a, ..]| r(1.0 / f(a))),
        case("add.ftz.f32", "rrr", |[a, b, _]| {
            r(flush(flush(f(a)) + flush(f(b))))
        }),
        case("fma.rn.ftz.f32", "rrrr", |[a, b, c]| {
            r(flush(flush(f(a)).mul_add(flush(f(b)), flush(f(c)))))
        }),
        case("mul.ftz.sat.f32", "rrr", |[a, b, _]| {
            let x = flush(flush(f(a)) * flush(f(b)));
            r(if x > 0.0 { x.min(1.0) } else { 0.0 })
        }),
        case("add.sat.f32", "rrr", |[a, b, _]| {
            let x = f(a) + f(b);
            r(if x > 0.0 { x.min(1.0) } else { 0.0 })
        }),
        case("min.f32", "rrr", |[a, b, _]| r(least(f(a), f(b)))),
        case("max.f32", "rrr", |[a, b, _]| r(-least(-f(a), -f(b)))),
        case("min.NaN.f32", "rrr", |[a, b, _]| {
            r(if f(a).is_nan() || f(b).is_nan() {
                f32::NAN
            } else {
                least(f(a), f(b))
            })
        }),
        case("abs.f32", "rr", |[a, ..]| a & 0x7fff_ffff),
        case("neg.f32", "rr", |[a, ..]| a ^ 0x8000_0000),
        case("copysign.f32", "rrr", |[a, b, _]| {
            a & 0x8000_0000 | b & 0x7fff_ffff
        }),
        case("setp.lt.f32", "prr", |[a, b, _]| u64::from(f(a) < f(b))),
        case("setp.geu.f32", "prr", |[a, b, _]| {
            u64::from(f(a) >= f(b) || f(a).is_nan() || f(b).is_nan())
        }),
        case("setp.ne.f32", "prr", |[a, b, _]| {
            u64::from(f(a) < f(b) || f(a) > f(b))
        }),
        case("setp.equ.f32", "prr", |[a, b, _]| {
            u64::from(f(a) == f(b) || f(a).is_nan() || f(b).is_nan())
        }),
        case("setp.nan.f32", "prr", |[a, b, _]| {
            u64::from(f(a).is_nan() || f(b).is_nan())
        }),
        case("setp.lt.ftz.f32", "prr", |[a, b, _]| {
            u64::from(flush(f(a)) < flush(f(b)))
        }),
        case("setp.lt.and.f32", "prrp", |[a, b, c]| {
            u64::from(f(a) < f(b)) & c
        }),
        case("setp.gt.or.s32", "prrp", |[a, b, c]| {
            u64::from(s(a) > s(b)) | c
        }),
        case("setp.hi.u32", "prr", |[a, b, _]| u64::from(a > b)),
        case("setp.le.s16", "phh", |[a, b, _]| {
            u64::from(a as i16 <= b as i16)
        }),
        case("setp.lt.s64", "pdd", |[a, b, _]| {
            u64::from((a as i64) < b as i64)
        }),
        case("set.ge.u32.f32", "rrr", |[a, b, _]| {
            if f(a) >= f(b) { 0xffff_ffff } else { 0 }
        }),
        case(
            "set.ne.f32.s32",
            "rrr",
            |[a, b, _]| if a != b { r(1.0) } else { 0 },
        ),
        case("testp.subnormal.f32", "pr", |[a, ..]| {
            u64::from(f(a).is_subnormal())
        }),
    ]);
}

#[test]
fn directed_rounding() {
    fn sum(a: f64, b: f64, mode: Mode) -> u64 {
        r(round_sum(a, b, mode))
    }
    fn exact(x: f64, mode: Mode) -> u64 {
        r(round_single(x, mode))
    }
    fn quotient(a: f64, b: f64, mode: Mode) -> u64 {
        let q = a / b;
        // The sign of what the quotient lacks.
        let rest = if q.is_finite() && b.is_finite() {
            (-q).mul_add(b, a) * b.signum()
        } else {
            0.0
        };
        r(rounded_single(q, rest, mode))
    }
    check(&[
        case("add.rz.f32", "rrr", |[a, b, _]| {
            sum(f(a).into(), f(b).into(), Mode::Zero)
        }),
        case("add.rm.f32", "rrr", |[a, b, _]| {
            sum(f(a).into(), f(b).into(), Mode::Down)
        }),
        case("sub.rp.f32", "rrr", |[a, b, _]| {
            sum(f(a).into(), (-f(b)).into(), Mode::Up)
        }),
        case("mul.rz.f32", "rrr", |[a, b, _]| {
            exact(f64::from(f(a)) * f64::from(f(b)), Mode::Zero)
        }),
        case("mul.rp.f32", "rrr", |[a, b, _]| {
            exact(f64::from(f(a)) * f64::from(f(b)), Mode::Up)
        }),
        case("fma.rm.f32", "rrrr", |[a, b, c]| {
            sum(f64::from(f(a)) * f64::from(f(b)), f(c).into(), Mode::Down)
        }),
        case("fma.rz.f32", "rrrr", |[a, b, c]| {
            sum(f64::from(f(a)) * f64::from(f(b)), f(c).into(), Mode::Zero)
        }),
        case("div.rz.f32", "rrr", |[a, b, _]| {
            quotient(f(a).into(), f(b).into(), Mode::Zero)
        }),
        case("div.rp.f32", "rrr", |[a, b, _]| {
            quotient(f(a).into(), f(b).into(), Mode::Up)
        }),
        case("cvt.rz.f32.f64", "rd", |[a, ..]| {
            exact(f64::from_bits(a), Mode::Zero)
        }),
        case("cvt.rp.f32.f64", "rd", |[a, ..]| {
            exact(f64::from_bits(a), Mode::Up)
        }),
    ]);
}

fn d(x: u64) -> f64 {
    f64::from_bits(x)
}

#[test]
fn double_precision() {
    // What a NaN's bits are, PTX leaves open.
    let cases = [
        case("add.f64", "ddd", |[a, b, _]| (d(a) + d(b)).to_bits()),
        case("mul.rn.f64", "ddd", |[a, b, _]| (d(a) * d(b)).to_bits()),
        case("fma.rn.f64", "dddd", |[a, b, c]| {
            d(a).mul_add(d(b), d(c)).to_bits()
        }),
        case("div.rn.f64", "ddd", |[a, b, _]| (d(a) / d(b)).to_bits()),
        case("sqrt.rn.f64", "dd", |[a, ..]| d(a).sqrt().to_bits()),
        case("neg.f64", "dd", |[a, ..]| (-d(a)).to_bits()),
        case("cvt.rni.f64.f64", "dd", |[a, ..]| {
            d(a).round_ties_even().to_bits()
        }),
        case("cvt.rmi.f64.f64", "dd", |[a, ..]| d(a).floor().to_bits()),
        case("cvt.f64.f32", "dr", |[a, ..]| f64::from(f(a)).to_bits()),
        case("cvt.rn.f64.s64", "dd", |[a, ..]| {
            (a as i64 as f64).to_bits()
        }),
        case("cvt.rn.f64.u64", "dd", |[a, ..]| (a as f64).to_bits()),
    ];
    for case in &cases {
        for (operands, found) in results(case.opcode, case.types, 8) {
            let expected = (case.f)(operands);
            let same = found == expected || d(found).is_nan() && d(expected).is_nan();
            assert!(
                same,
                "{} {operands:x?}: found {found:#x}, expected {expected:#x}",
                case.opcode
            );
        }
    }
    check(&[case("setp.ltu.f64", "pdd", |[a, b, _]| {
        u64::from(d(a) < d(b) || d(a).is_nan() || d(b).is_nan())
    })]);
}

/// To an integer as `cvt` does: NaN is 0, or the middle of the range if 64 bits are concerned.
fn whole(x: f64, least: i128, most: i128, wide: bool) -> u64 {
    if x.is_nan() {
        return if !wide {
            0
        } else if least < 0 {
            least as u64
        } else {
            (most as u64 >> 1) + 1
        };
    }
    (x as i128).clamp(least, most) as u64
}

#[test]
fn conversions_of_integers_and_floats() {
    const S32: (i128, i128) = (i32::MIN as i128, i32::MAX as i128);
    const U32: (i128, i128) = (0, u32::MAX as i128);
    const S64: (i128, i128) = (i64::MIN as i128, i64::MAX as i128);
    const U64: (i128, i128) = (0, u64::MAX as i128);
    check(&[
        case("cvt.s32.s16", "rh", |[a, ..]| w(i32::from(a as i16))),
        case("cvt.u64.u32", "dr", |[a, ..]| a),
        case("cvt.s64.s32", "dr", |[a, ..]| i64::from(s(a)) as u64),
        case("cvt.u32.u64", "rd", |[a, ..]| a),
        case("cvt.u16.u32", "hr", |[a, ..]| a),
        case("cvt.s32.s8", "rr", |[a, ..]| w(i32::from(a as i8))),
        case("cvt.u32.u8", "rr", |[a, ..]| a & 0xff),
        case("cvt.sat.u8.s32", "rr", |[a, ..]| s(a).clamp(0, 255) as u64),
        case("cvt.sat.s8.s32", "rr", |[a, ..]| w(s(a).clamp(-128, 127))),
        case("cvt.sat.s16.s64", "hd", |[a, ..]| {
            (a as i64).clamp(-32768, 32767) as u64
        }),
        case("cvt.rn.f32.s32", "rr", |[a, ..]| r(s(a) as f32)),
        case("cvt.rn.f32.u64", "rd", |[a, ..]| r(a as f32)),
        case("cvt.rz.f32.u32", "rr", |[a, ..]| {
            r(round_single(a as f64, Mode::Zero))
        }),
        case("cvt.rp.f32.s32", "rr", |[a, ..]| {
            r(round_single(f64::from(s(a)), Mode::Up))
        }),
        case("cvt.rzi.s32.f32", "rr", |[a, ..]| {
            whole(f(a).into(), S32.0, S32.1, false)
        }),
        case("cvt.rni.s32.f32", "rr", |[a, ..]| {
            whole(f64::from(f(a)).round_ties_even(), S32.0, S32.1, false)
        }),
        case("cvt.rmi.s32.f32", "rr", |[a, ..]| {
            whole(f64::from(f(a)).floor(), S32.0, S32.1, false)
        }),
        case("cvt.rpi.u32.f32", "rr", |[a, ..]| {
            whole(f64::from(f(a)).ceil(), U32.0, U32.1, false)
        }),
        case("cvt.rzi.u32.f32", "rr", |[a, ..]| {
            whole(f(a).into(), U32.0, U32.1, false)
        }),
        case("cvt.rzi.s64.f32", "dr", |[a, ..]| {
            whole(f(a).into(), S64.0, S64.1, true)
        }),
        case("cvt.rzi.u64.f64", "dd", |[a, ..]| {
            whole(d(a), U64.0, U64.1, true)
        }),
        case("cvt.rni.s32.f64", "rd", |[a, ..]| {
            whole(d(a).round_ties_even(), S32.0, S32.1, true)
        }),
        case("cvt.rni.f32.f32", "rr", |[a, ..]| r(f(a).round_ties_even())),
        case("cvt.rpi.f32.f32", "rr", |[a, ..]| r(f(a).ceil())),
        case("cvt.sat.f32.f32", "rr", |[a, ..]| {
            r(if f(a) > 0.0 { f(a).min(1.0) } else { 0.0 })
        }),
        case("cvt.rn.f32.f64", "rd", |[a, ..]| r(d(a) as f32)),
    ]);
}

/// Bits of a half by enumeration: exponent bits, fraction bits, mode.
fn half(x: f64, exponent: u32, fraction: u32, mode: Mode) -> u64 {
    small_float(x, exponent, fraction, mode)
}

fn widen(x: u64, exponent: u32, fraction: u32) -> f64 {
    super::formats::value(x & 0xffff, exponent, fraction)
}

#[test]
fn half_precision() {
    check(&[
        case("cvt.rn.f16.f32", "hr", |[a, ..]| {
            half(f(a).into(), 5, 10, Mode::Nearest)
        }),
        case("cvt.rz.f16.f32", "hr", |[a, ..]| {
            half(f(a).into(), 5, 10, Mode::Zero)
        }),
        case("cvt.rn.bf16.f32", "hr", |[a, ..]| {
            half(f(a).into(), 8, 7, Mode::Nearest)
        }),
        case("cvt.rz.bf16.f32", "hr", |[a, ..]| {
            half(f(a).into(), 8, 7, Mode::Zero)
        }),
        case("cvt.rn.f16.f64", "hd", |[a, ..]| {
            half(d(a), 5, 10, Mode::Nearest)
        }),
        case("cvt.rp.f16.s32", "hr", |[a, ..]| {
            half(f64::from(s(a)), 5, 10, Mode::Up)
        }),
        case("cvt.f32.f16", "rh", |[a, ..]| r(widen(a, 5, 10) as f32)),
        case("cvt.f32.bf16", "rh", |[a, ..]| r(widen(a, 8, 7) as f32)),
        case("cvt.rn.f16x2.f32", "rrr", |[a, b, _]| {
            half(f(a).into(), 5, 10, Mode::Nearest) << 16 | half(f(b).into(), 5, 10, Mode::Nearest)
        }),
        case("cvt.rn.relu.bf16x2.f32", "rrr", |[a, b, _]| {
            let relu = |x: u64| if f(x) <= 0.0 { 0.0 } else { f64::from(f(x)) };
            half(relu(a), 8, 7, Mode::Nearest) << 16 | half(relu(b), 8, 7, Mode::Nearest)
        }),
        case("add.f16", "hhh", |[a, b, _]| {
            half(widen(a, 5, 10) + widen(b, 5, 10), 5, 10, Mode::Nearest)
        }),
        case("mul.bf16", "hhh", |[a, b, _]| {
            half(widen(a, 8, 7) * widen(b, 8, 7), 8, 7, Mode::Nearest)
        }),
        case("sub.f16x2", "rrr", |[a, b, _]| {
            let part = |k: u64| {
                half(
                    widen(a >> k, 5, 10) - widen(b >> k, 5, 10),
                    5,
                    10,
                    Mode::Nearest,
                )
            };
            part(0) | part(16) << 16
        }),
        case("add.sat.f16", "hhh", |[a, b, _]| {
            let sum = widen(a, 5, 10) + widen(b, 5, 10);
            half(
                if sum > 0.0 { sum.min(1.0) } else { 0.0 },
                5,
                10,
                Mode::Nearest,
            )
        }),
        case("fma.rn.f16", "hhhh", |[a, b, c]| fused(a, b, c, 5, 10)),
        case("fma.rn.bf16", "hhhh", |[a, b, c]| fused(a, b, c, 8, 7)),
        case("fma.rn.bf16x2", "rrrr", |[a, b, c]| {
            fused(a, b, c, 8, 7) | fused(a >> 16, b >> 16, c >> 16, 8, 7) << 16
        }),
        case("min.f16", "hhh", |[a, b, _]| {
            half(
                f64::from(least(widen(a, 5, 10) as f32, widen(b, 5, 10) as f32)),
                5,
                10,
                Mode::Nearest,
            )
        }),
        case("neg.bf16x2", "rr", |[a, ..]| a ^ 0x8000_8000),
        case("abs.f16", "hh", |[a, ..]| a & 0x7fff),
        case("setp.lt.f16", "phh", |[a, b, _]| {
            u64::from(widen(a, 5, 10) < widen(b, 5, 10))
        }),
        case("setp.neu.bf16", "phh", |[a, b, _]| {
            u64::from(widen(a, 8, 7) != widen(b, 8, 7))
        }),
    ]);
}

/// A fused product and sum, with what double precision loses of the sum.
fn fused(a: u64, b: u64, c: u64, exponent: u32, fraction: u32) -> u64 {
    let [a, b, c] = [a, b, c].map(|x| widen(x, exponent, fraction));
    super::formats::small_sum(a * b, c, exponent, fraction)
}

#[test]
fn eight_bit_floats() {
    for (opcode, exponent, fraction) in [
        ("cvt.rn.satfinite.e4m3x2.f32", 4, 3),
        ("cvt.rn.satfinite.e5m2x2.f32", 5, 2),
    ] {
        for ([a, b, _], found) in results(opcode, "hrr", 11) {
            let small = |x: u64| super::formats::fp8(f(x).into(), exponent, fraction);
            assert_eq!(found, small(a) << 8 | small(b), "{opcode} {a:#x} {b:#x}");
        }
    }
    for (opcode, exponent, fraction) in
        [("cvt.rn.f16x2.e4m3x2", 4, 3), ("cvt.rn.f16x2.e5m2x2", 5, 2)]
    {
        for ([a, ..], found) in results(opcode, "rh", 12) {
            let value = |x: u64| super::formats::fp8_value(x & 255, exponent, fraction);
            let expected = half(value(a), 5, 10, Mode::Nearest)
                | half(value(a >> 8), 5, 10, Mode::Nearest) << 16;
            assert_eq!(found, expected, "{opcode} {a:#x}");
        }
    }
}

/// Approximations, within the stated error of the exact value: in units of the last place, and absolutely.
#[test]
fn approximations() {
    type Approximation = (&'static str, fn(f64) -> f64, f64, f64);
    let cases: [Approximation; 9] = [
        ("ex2.approx.f32", f64::exp2, 1.0, 0.0),
        ("lg2.approx.f32", f64::log2, 1.0, 0.0),
        ("rcp.approx.f32", |x| 1.0 / x, 0.5, 0.0),
        ("rsqrt.approx.f32", |x| 1.0 / x.sqrt(), 0.51, 0.0),
        ("sqrt.approx.f32", f64::sqrt, 0.5, 0.0),
        ("sin.approx.f32", f64::sin, 1.0, 1e-6),
        ("cos.approx.f32", f64::cos, 1.0, 1e-6),
        ("tanh.approx.f32", f64::tanh, 1.0, 0.0),
        ("ex2.approx.ftz.f32", f64::exp2, 1.0, 1.2e-38),
    ];
    for (opcode, exact, ulps, absolute) in cases {
        for ([a, ..], found) in results(opcode, "rr", 13) {
            let (x, found) = (f64::from(f(a)), f64::from(f(found)));
            let expected = exact(x);
            if opcode.starts_with("sin") || opcode.starts_with("cos") {
                // Far from zero PTX promises nothing.
                if x.abs() > 1e4 && x.is_finite() {
                    continue;
                }
            }
            let ulp = f64::from(f32::EPSILON) * expected.abs().max(f64::from(f32::MIN_POSITIVE));
            let same = found == expected
                || found.is_nan() && expected.is_nan()
                || (found - expected).abs() <= ulps * ulp + absolute
                || found.is_infinite() && expected.abs() > f64::from(f32::MAX);
            assert!(
                same,
                "{opcode} of {x:e}: found {found:e}, expected {expected:e}"
            );
        }
    }
}
