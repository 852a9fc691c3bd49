//! Tables over the grammar, merging and fitting.

use super::*;

fn spec(text: &str) -> DeviceSpec {
    DeviceSpec::parse(text).unwrap_or_else(|e| panic!("{text:?}: {e}"))
}

#[test]
fn the_grammar_as_a_table() {
    for (text, printed) in [
        ("", ""),
        ("/", ""),
        ("/job:*/replica:*/task:*/device:*:*", ""),
        (
            "/job:worker/replica:0/task:1/device:GPU:2",
            "/job:worker/replica:0/task:1/device:GPU:2",
        ),
        (
            "/device:GPU:2/task:1/job:worker",
            "/job:worker/task:1/device:GPU:2",
        ),
        ("/job:ps/task:1", "/job:ps/task:1"),
        ("/device:gpu", "/device:GPU:*"),
        ("/device:gpu:*", "/device:GPU:*"),
        ("/device:*:3", "/device:*:3"),
        ("/device:XLA_CPU:0", "/device:XLA_CPU:0"),
        ("/device:TPU:7", "/device:TPU:7"),
        ("/cpu:0", "/device:CPU:0"),
        ("/CPU:*", "/device:CPU:*"),
        ("/gpu", "/device:GPU:*"),
        ("gpu:0", "/device:GPU:0"),
        ("GPU:0", "/device:GPU:0"),
        ("emu:1", "/device:EMU:1"),
        ("/job:a_1/cpu:1", "/job:a_1/device:CPU:1"),
        ("/job:a/job:b/task:1/task:2", "/job:b/task:2"),
        ("/job:a/job:*", ""),
        ("/task:3/task:*", ""),
        ("/gpu:1/device:GPU:0", "/device:GPU:0"),
        ("/device:*:1/gpu:0", "/device:GPU:0"),
        ("/gpu:1/gpu", "/device:GPU:*"),
    ] {
        let found = spec(text);
        assert_eq!(found.to_string(), printed, "{text:?}");
        assert_eq!(spec(printed), found, "{text:?} prints as what parses back");
    }
}

#[test]
fn errors_say_what_cannot_be_read() {
    let bad = [
        "/gpu:0/device:CPU:1",
        "/tpu:0",
        "/jobs:worker/cpu:0",
        "a:b:c",
        "/job",
        "/job:",
        "/job:1st",
        "/job:a-b",
        "/job:a:b",
        "/replica:x",
        "/task:-1",
        "/task:+1",
        "/task:4294967296",
        "/device:",
        "/device:GPU:0:1",
        "/gpu:",
        "/cpu:1x",
    ];
    let errors: Vec<String> = bad
        .map(|t| DeviceSpec::parse(t).unwrap_err().to_string())
        .into();
    let hint = "; whole names are like /job:worker/replica:0/task:1/device:GPU:0, /gpu:1 or cpu";
    let text: Vec<&str> = errors
        .iter()
        .map(|e| e.strip_suffix(hint).unwrap_or(e))
        .collect();
    assert_eq!(
        text,
        [
            "Cannot specify multiple device types: /gpu:0/device:CPU:1",
            "Unknown attribute: 'tpu' in '/tpu:0'",
            "Unknown attribute: 'jobs' in '/jobs:worker/cpu:0'",
            "Unknown attribute: 'a' in 'a:b:c'",
            "device '/job': expected job:.., got 'job'",
            "device '/job:': expected a job (a letter, then letters, digits or _), got ''",
            "device '/job:1st': expected a job (a letter, then letters, digits or _), got '1st'",
            "device '/job:a-b': expected a job (a letter, then letters, digits or _), got 'a-b'",
            "device '/job:a:b': expected job:.., got 'job:a:b'",
            "device '/replica:x': expected a number, got 'x'",
            "device '/task:-1': expected a number, got '-1'",
            "device '/task:+1': expected a number, got '+1'",
            "device '/task:4294967296': expected a number, got '4294967296'",
            "device '/device:': expected a device type (a letter, then letters, digits or _), got ''",
            "device '/device:GPU:0:1': expected device:.., got 'device:GPU:0:1'",
            "device '/gpu:': expected a number, got ''",
            "device '/cpu:1x': expected a number, got '1x'",
        ]
    );
}

#[test]
fn merging_as_a_table() {
    for (a, b, hard, soft) in [
        ("", "/gpu:0", "/device:GPU:0", "/device:GPU:0"),
        (
            "/job:a",
            "/gpu",
            "/job:a/device:GPU:*",
            "/job:a/device:GPU:*",
        ),
        (
            "/job:a/gpu:0",
            "/task:1/gpu:*",
            "/job:a/task:1/device:GPU:0",
            "/job:a/task:1/device:GPU:0",
        ),
        ("/job:a", "/job:b", "jobs", "jobs"),
        ("/replica:0", "/replica:1", "replicas", "replicas"),
        ("/task:0/gpu:0", "/task:1/gpu:0", "tasks", "tasks"),
        ("/job:a/gpu:0", "/cpu:0", "types", "/job:a"),
        ("/gpu", "/job:a/cpu:3", "types", "/job:a"),
        ("/gpu:0", "/gpu:1", "ids", "/device:GPU:*"),
        ("/device:*:0", "/gpu:1", "ids", "/device:GPU:*"),
    ] {
        for (mode, expected) in [(Merge::Hard, hard), (Merge::Soft, soft)] {
            let text = match spec(a).merge(&spec(b), mode) {
                Ok(merged) => merged.to_string(),
                Err(e) => {
                    let (what, names) = (expected, format!("'{}' and '{}'", spec(a), spec(b)));
                    assert_eq!(
                        e.to_string(),
                        format!("Cannot merge devices with incompatible {what}: {names}")
                    );
                    continue;
                }
            };
            assert_eq!(text, expected, "{a:?} with {b:?}, {mode:?}");
        }
    }
}

#[test]
fn scopes_fill_field_by_field() {
    for (outer, inner, expected) in [
        ("/job:foo", "/device:gpu:1", "/job:foo/device:GPU:1"),
        (
            "/job:worker/gpu:0",
            "/task:1",
            "/job:worker/task:1/device:GPU:0",
        ),
        ("/gpu:1", "/cpu", "/device:CPU:1"),
        ("/gpu:1", "/gpu:*", "/device:GPU:1"),
        ("/gpu:1", "", "/device:GPU:1"),
    ] {
        assert_eq!(
            spec(inner).fill(&spec(outer)).to_string(),
            expected,
            "{outer:?} around {inner:?}"
        );
    }
}

#[test]
fn what_fits_a_device() {
    let local = DeviceName::local(DeviceKind::Cpu, 1);
    let remote = DeviceName::parse("/job:worker/replica:1/task:2/device:GPU:0").unwrap();
    for (text, fits_local, fits_remote) in [
        ("", true, true),
        ("cpu", true, false),
        ("cpu:0", false, false),
        ("/job:localhost/replica:0/task:0/cpu:1", true, false),
        ("/job:worker", false, true),
        ("/replica:1/task:2/gpu:*", false, true),
        ("/replica:0", true, false),
        ("/task:2/device:*:0", false, true),
        ("/device:TPU:0", false, false),
    ] {
        assert_eq!(
            (spec(text).fits(&local), spec(text).fits(&remote)),
            (fits_local, fits_remote),
            "{text:?}"
        );
    }
    assert!(DeviceSpec::from(&local).fits(&DeviceName::parse("/job:worker/cpu:1").unwrap()));
    assert!(!DeviceSpec::only(&local).fits(&DeviceName::parse("/job:worker/cpu:1").unwrap()));
    for name in [&local, &remote] {
        assert!(DeviceSpec::from(name).fits(name));
        assert_eq!(DeviceSpec::from(name).to_string(), name.to_string());
        assert_eq!(DeviceSpec::only(name).to_string(), name.full());
    }
}

/// Every specification over two values, or none, of each field.
fn all_specs() -> Vec<DeviceSpec> {
    let texts: [[&str; 3]; 5] = [
        ["", "/job:localhost", "/job:b"],
        ["", "/replica:0", "/replica:1"],
        ["", "/task:0", "/task:1"],
        ["", "/device:CPU:*", "/device:GPU:*"],
        ["", "0", "1"],
    ];
    let digits = |n: usize| (0..5).map(move |i| n / 3usize.pow(i) % 3);
    let parse = |n: usize| {
        let picked: Vec<&str> = digits(n).enumerate().map(|(i, d)| texts[i][d]).collect();
        let device = match (picked[3], picked[4]) {
            (device, "") => device.to_owned(),
            ("", index) => format!("/device:*:{index}"),
            (device, index) => device.replace('*', index),
        };
        spec(&format!("{}{}{}{device}", picked[0], picked[1], picked[2]))
    };
    (0..3usize.pow(5)).map(parse).collect()
}

#[test]
fn merging_is_intersection() {
    let specs = all_specs();
    let names: Vec<DeviceName> = specs
        .iter()
        .filter_map(|s| DeviceName::parse(&s.to_string()).ok())
        .collect();
    assert!(names.len() > 30);
    for a in &specs {
        assert_eq!(spec(&a.to_string()), *a);
        assert_eq!(a.merge(a, Merge::Hard).as_ref(), Ok(a));
        for b in &specs {
            let (hard, soft) = (a.merge(b, Merge::Hard), a.merge(b, Merge::Soft));
            assert_eq!(hard.as_ref().ok(), b.merge(a, Merge::Hard).as_ref().ok());
            assert_eq!(soft.as_ref().ok(), b.merge(a, Merge::Soft).as_ref().ok());
            match &hard {
                Ok(merged) => {
                    assert_eq!(soft.as_ref(), Ok(merged));
                    assert!(
                        names
                            .iter()
                            .all(|n| merged.fits(n) == (a.fits(n) && b.fits(n)))
                    );
                }
                Err(_) => assert!(!names.iter().any(|n| a.fits(n) && b.fits(n)), "{a} and {b}"),
            }
            // Soft merging fails exactly where job, replica or task contradict, and never changes them.
            assert_eq!(soft.is_ok(), a.relaxed().is_compatible(&b.relaxed()));
            if let Ok(soft) = soft {
                assert_eq!(
                    Ok(soft.relaxed()),
                    a.relaxed().merge(&b.relaxed(), Merge::Hard)
                );
            }
        }
    }
}

#[test]
fn any_text_parses_or_fails_and_what_parses_prints_back() {
    let words = [
        "/",
        ":",
        "*",
        "job",
        "replica",
        "task",
        "device",
        "cpu",
        "GPU",
        "a_1",
        "0",
        "17",
        "-",
        "\u{e9}",
        " ",
        "99999999999",
    ];
    let mut state = 1u64;
    let mut n_good = 0;
    for _ in 0..50_000 {
        let mut text = String::new();
        let mut next = |n: usize| {
            state = state
                .wrapping_mul(6364136223846793005)
                .wrapping_add(1442695040888963407);
            (state >> 33) as usize % n
        };
        for _ in 0..next(9) {
            text.push_str(words[next(words.len())]);
        }
        if let Ok(found) = DeviceSpec::parse(&text) {
            assert_eq!(DeviceSpec::parse(&found.to_string()), Ok(found), "{text:?}");
            n_good += 1;
        }
    }
    assert!(n_good > 1000, "{n_good}");
}
