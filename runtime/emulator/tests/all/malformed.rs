//! Broken text is an error with a line, never a panic.

use gristmill_emulator::{Args, Checks, FaultKind, LaunchConfig, Module};

use super::support::{Random, device, ptx};

const HEAD: &str = ".version 9.0\n.target sm_90a\n.address_size 64\n";

fn fault(body: &str) -> (FaultKind, String) {
    let text = format!(
        "{HEAD}.visible .entry k(.param .u64 p) {{\n.reg .b32 %r<4>;\n.reg .b64 %rd<4>;\n.reg .pred %p<2>;\n{body}\n}}"
    );
    let result = Module::parse(&text).and_then(|m| m.check());
    let fault = result.expect_err("this text is broken");
    (fault.kind(), fault.to_string())
}

#[test]
fn messages_name_the_line_and_what_was_expected() {
    let cases = [
        ("add.s32 %r1, %r2;", FaultKind::Unsupported, "PTX line 8"),
        (
            "add.s32 %r1, %r2, %rd1;",
            FaultKind::Syntax,
            "expected a register for s32, found one for b64",
        ),
        (
            "add.s32 %r1, %r2, %r9;",
            FaultKind::Unsupported,
            "special register `%r9`",
        ),
        ("bra nowhere;", FaultKind::Syntax, "expected a label"),
        (
            "ld.global.u32 %r1, %r2;",
            FaultKind::Syntax,
            "expected an address",
        ),
        (
            "ld.global.v2.u32 {%r1}, [%rd1];",
            FaultKind::Syntax,
            "expected 2 registers",
        ),
        (
            "frobnicate.b32 %r1, %r2;",
            FaultKind::Unsupported,
            "PTX line 8: frobnicate.b32",
        ),
        ("mov.u32 %r1, [", FaultKind::Syntax, "expected"),
        (
            "@%p9 bra L; L: ret;",
            FaultKind::Syntax,
            "unknown predicate `%p9`",
        ),
        (
            ".surf x;",
            FaultKind::Unsupported,
            "unsupported directive `.surf`",
        ),
        (
            ".local .b8 big[2000000000]; mov.u32 %r1, 0;",
            FaultKind::Unsupported,
            "bytes of local memory per thread",
        ),
        (
            ".reg .b64 %big<900000>; mov.u32 %r1, 0;",
            FaultKind::Unsupported,
            "words per thread",
        ),
        (
            "mma.sync.aligned.m16n8k64.row.col.s32.s8.s8.s32 {%r1,%r1,%r1,%r1}, {%r1,%r1,%r1,%r1,%r1,%r1,%r1,%r1}, \
             {%r1,%r1,%r1,%r1}, {%r1,%r1,%r1,%r1};",
            FaultKind::Unsupported,
            "this shape",
        ),
        (
            "call (%r1), f, (%r2);",
            FaultKind::Unsupported,
            "no body of function `f`",
        ),
    ];
    for (body, kind, part) in cases {
        let (found, message) = fault(body);
        assert!(
            found == kind && message.contains(part),
            "{body}: {found:?}: {message}"
        );
    }
}

#[test]
fn all_unsupported_instructions_are_listed() {
    let (kind, message) =
        fault("tcgen05.alloc.b32 %r1;\nadd.s32 %r1, %r1, 1;\nsured.b.1d.u32 %r1, %r2;");
    assert_eq!(kind, FaultKind::Unsupported);
    assert_eq!(
        message,
        "kernel `k` has instructions that the emulator lacks:\n  PTX line 8: tcgen05.alloc.b32\n  PTX line 10: sured.b.1d.u32"
    );
}

/// Cuts and garbles real modules; whatever comes out is a module or a fault.
#[test]
fn garbled_modules_do_not_panic() {
    let mut random = Random(11);
    let words = [
        "",
        ",",
        "{",
        "}",
        "[",
        "]",
        "%r1",
        "%p1",
        ".b64",
        "0x",
        "9999999999999999999999",
        "\"",
        "/*",
        "é",
        "_",
        "@",
        "<",
        ";",
    ];
    for name in ["softmax", "histogram", "integers"] {
        let text = ptx(name);
        for _ in 0..150 {
            let at = text.floor_char_boundary(random.bits() as usize % text.len());
            let end = text.floor_char_boundary((at + random.bits() as usize % 12).min(text.len()));
            let word = words[random.bits() as usize % words.len()];
            let garbled = format!("{}{word}{}", &text[..at], &text[end..]);
            let _ = Module::parse(&garbled).and_then(|m| m.check());
            let _ = Module::parse(&text[..at]).and_then(|m| m.check());
        }
    }
}

/// The same for modules that are launched: faults, or results, but an end.
#[test]
fn garbled_kernels_run_into_faults() {
    let mut random = Random(12);
    let text = ptx("histogram");
    let limits = gristmill_emulator::Limits {
        instruction_budget: 20_000,
        ..*device().limits()
    };
    for _ in 0..150 {
        let lines: Vec<&str> = text.lines().collect();
        let drop = 20 + random.bits() as usize % (lines.len() - 21);
        let swap = 20 + random.bits() as usize % (lines.len() - 21);
        let mut garbled = lines.clone();
        garbled.swap(drop, swap);
        garbled.remove(drop);
        let Ok(module) = Module::parse(&garbled.join("\n")) else {
            continue;
        };
        let device = gristmill_emulator::Device::new(limits);
        let buffer = device.alloc(4096).unwrap();
        let args = Args::new()
            .u64(buffer)
            .u64(buffer)
            .u64(buffer)
            .u64(buffer)
            .u32(100);
        let config = LaunchConfig {
            block: [128, 1, 1],
            ..LaunchConfig::default()
        };
        let _ = device.launch(
            &module,
            "histogram",
            &config,
            args.bytes(),
            &Checks { races: true },
        );
    }
}
