//! Tensor cores, asynchronous copies and clusters: whole kernels against plain Rust, and the same with planted bugs.

use gristmill_emulator::{
    Args, Device, Fault, FaultKind, LaunchConfig, Module, Swizzle, TensorElement, TensorMap,
    encode_tensor_map,
};

use super::{
    kernels::product,
    support::{Random, device, download, line, ptx, relative_error, try_run, upload},
};

fn to_bf16(x: f32) -> u16 {
    ((x.to_bits() + 0x7fff + (x.to_bits() >> 16 & 1)) >> 16) as u16
}

fn from_bf16(h: u16) -> f32 {
    f32::from_bits(u32::from(h) << 16)
}

/// Random bf16 matrices `a` [m, k] and `b` [n, k], and `a` times `b` transposed.
fn problem(m: usize, n: usize, k: usize) -> (Vec<u16>, Vec<u16>, Vec<f64>) {
    let mut random = Random((m + n + k) as u64);
    let mut matrix =
        |count: usize| -> Vec<u16> { random.floats(count).into_iter().map(to_bf16).collect() };
    let (a, b) = (matrix(m * k), matrix(n * k));
    let wide = |m: &[u16]| -> Vec<f32> { m.iter().map(|h| from_bf16(*h)).collect() };
    let rows = wide(&b);
    let transposed: Vec<f32> = (0..k * n).map(|i| rows[i % n * k + i / n]).collect();
    let expected = product(&wide(&a), &transposed, m, n, k);
    (a, b, expected)
}

fn mma_gemm(text: &str) -> Result<f64, Fault> {
    let (m, n, k) = (128, 192, 160);
    let (a, b, expected) = problem(m, n, k);
    let (device, module) = (device(), Module::parse(text)?);
    let c = device.alloc(m * n * 4)?;
    let args = Args::new()
        .u64(upload(&device, &a))
        .u64(upload(&device, &b))
        .u64(c);
    let args = args.u32(m as u32).u32(n as u32).u32(k as u32);
    let config = LaunchConfig {
        grid: [3, 2, 1],
        block: [128, 1, 1],
        ..LaunchConfig::default()
    };
    try_run(&device, &module, "mma_gemm", &config, &args)?;
    Ok(error(&download(&device, c, m * n), &expected))
}

/// As `relative_error`, with infinity for results that are no numbers.
fn error(found: &[f32], expected: &[f64]) -> f64 {
    if found.iter().all(|x| x.is_finite()) {
        relative_error(found, expected)
    } else {
        f64::INFINITY
    }
}

#[test]
fn mma_with_asynchronous_copies() {
    let error = mma_gemm(&ptx("mma_gemm")).unwrap();
    assert!(error < 1e-6, "{error}");
}

fn map(
    element: TensorElement,
    address: u64,
    sizes: [u64; 2],
    tile: [u32; 2],
    swizzle: Swizzle,
) -> [u8; 128] {
    let strides_bytes = vec![sizes[0] * element.size_bytes() as u64];
    let (sizes, tile) = (sizes.to_vec(), tile.to_vec());
    let map = TensorMap {
        element,
        address,
        sizes,
        strides_bytes,
        tile,
        swizzle,
        fills_with_nan: false,
        pixels: None,
    };
    encode_tensor_map(&map).unwrap()
}

fn wgmma_gemm(text: &str) -> Result<f64, Fault> {
    let (m, n, k) = (256, 256, 320);
    let (a, b, expected) = problem(m, n, k);
    let (device, module) = (device(), Module::parse(text)?);
    let c = device.alloc(m * n * 2)?;
    let [da, db] = [&a, &b].map(|x| upload(&device, x));
    let tile_map = |address, columns: usize, rows: usize, tile: [u32; 2]| {
        map(
            TensorElement::Bf16,
            address,
            [columns as u64, rows as u64],
            tile,
            Swizzle::B128,
        )
    };
    let args = Args::new()
        .value(64, &tile_map(da, k, m, [64, 128]))
        .value(64, &tile_map(db, k, n, [64, 128]))
        .value(64, &tile_map(c, n, m, [64, 64]))
        .u32(m as u32)
        .u32(n as u32)
        .u32(k as u32);
    let config = LaunchConfig {
        dynamic_shared_bytes: 3 * 32768 + 32768,
        ..line(3, 384)
    };
    try_run(&device, &module, "wgmma_gemm", &config, &args)?;
    let found: Vec<f32> = download::<u16>(&device, c, m * n)
        .into_iter()
        .map(from_bf16)
        .collect();
    Ok(error(&found, &expected))
}

#[test]
fn wgmma_with_tensor_maps_and_a_ring() {
    // The result is rounded to bf16: 2^-9 at most, about 1.7e-3 on average.
    let error = wgmma_gemm(&ptx("wgmma_gemm")).unwrap();
    assert!(error < 2.5e-3, "{error}");
}

/// `text` with the `nth` occurrence of `from` replaced.
fn replaced(text: &str, from: &str, nth: usize, to: &str) -> String {
    let (at, _) = text
        .match_indices(from)
        .nth(nth)
        .unwrap_or_else(|| panic!("`{from}` occurs less than {nth} times"));
    format!("{}{to}{}", &text[..at], &text[at + from.len()..])
}

#[track_caller]
fn assert_caught(result: Result<f64, Fault>, kind: FaultKind, part: &str) {
    let fault = result.expect_err("the bug is caught");
    let text = fault.to_string();
    assert!(
        fault.kind() == kind && text.contains(part),
        "{:?}: {text}",
        fault.kind()
    );
}

#[test]
fn mma_bugs_are_caught() {
    let text = ptx("mma_gemm");
    // A wait that leaves the group under way that is read next.
    let bug = replaced(&text, "cp.async.wait_group 1", 0, "cp.async.wait_group 2");
    assert_caught(mma_gemm(&bug), FaultKind::Race, "by a cp.async of warp");
    // No barrier before the tiles are overwritten, or none before they are read.
    for nth in 0..2 {
        let bug = replaced(&text, "bar.sync", nth, "// bar.sync");
        assert_caught(mma_gemm(&bug), FaultKind::Race, "race: ");
    }
    // Fragments of the right-hand side in the wrong order: no fault, but a wrong result.
    let at = text.find("mma.sync").unwrap();
    let line = &text[at..at + text[at..].find('\n').unwrap()];
    let lists: Vec<&str> = line.split(['{', '}']).collect();
    let (x, y) = lists[5]
        .split_once(", ")
        .or(lists[5].split_once(','))
        .unwrap();
    let bug = text.replace(
        line,
        &line.replace(&format!("{{{}}}", lists[5]), &format!("{{{y},{x}}}")),
    );
    assert!(mma_gemm(&bug).unwrap() > 1e-2);
}

#[test]
fn wgmma_bugs_are_caught() {
    let text = ptx("wgmma_gemm");
    // A stage is given back before the product that reads it is complete.
    let bug = replaced(
        &text,
        "wgmma.wait_group.sync.aligned 0",
        0,
        "wgmma.wait_group.sync.aligned 1",
    );
    assert_caught(wgmma_gemm(&bug), FaultKind::Race, "by a wgmma of warp");
    // Consumers that do not say that they are done.
    let bug = replaced(
        &text,
        "mbarrier.arrive.release",
        0,
        "// mbarrier.arrive.release",
    );
    assert_caught(
        wgmma_gemm(&bug),
        FaultKind::Deadlock,
        "waits for phase 0 of the mbarrier",
    );
    // Fewer bytes announced than come: the phase ends too early, or the count never comes to zero.
    let at = text.find("mbarrier.arrive.expect_tx").unwrap();
    let register = text[at..]
        .split(", ")
        .nth(2)
        .unwrap()
        .split(';')
        .next()
        .unwrap();
    let bug = text.replace(
        &format!("mov.u32 \t{register}, 32768"),
        &format!("mov.u32 \t{register}, 32752"),
    );
    assert_ne!(bug, text);
    assert!(matches!(
        wgmma_gemm(&bug).map_err(|f| f.kind()),
        Err(FaultKind::Deadlock | FaultKind::Race | FaultKind::Misuse)
    ));
    // A matrix descriptor with the wrong stride: no fault, but a wrong result.
    let right = (1u64 << 62 | 64u64 << 32 | 1 << 16).to_string();
    let wrong = (1u64 << 62 | 32u64 << 32 | 1 << 16).to_string();
    let bug = text.replace(&right, &wrong);
    assert_ne!(bug, text);
    assert!(wgmma_gemm(&bug).unwrap() > 1e-2);
    // The tile is stored without the fence that lets asynchronous reads see ordinary writes.
    let bug = replaced(&text, "fence.proxy.async", 1, "// fence.proxy.async");
    assert_caught(
        wgmma_gemm(&bug),
        FaultKind::Race,
        "without a fence.proxy.async after the write by warp",
    );
    // A store that is not waited for.
    let bug = replaced(
        &text,
        "cp.async.bulk.wait_group 0",
        0,
        "// cp.async.bulk.wait_group 0",
    );
    assert_caught(
        wgmma_gemm(&bug),
        FaultKind::Race,
        "by a bulk copy of warp 4",
    );
}

fn cluster_module(text: &str) -> (Device, Module) {
    (device(), Module::parse(text).unwrap())
}

#[test]
fn blocks_of_a_cluster_read_each_others_memory() {
    let (device, module) = cluster_module(&ptx("clusters"));
    let x: Vec<f32> = (0..256).map(|i| i as f32).collect();
    let y = device.alloc(1024).unwrap();
    let args = Args::new().u64(upload(&device, &x)).u64(y);
    try_run(&device, &module, "cluster_sum", &line(4, 64), &args).unwrap();
    let expected: Vec<f32> = (0..256)
        .map(|i| x[i] + x[((i / 64) ^ 1) * 64 + 63 - i % 64])
        .collect();
    assert_eq!(download::<f32>(&device, y, 256), expected);

    let bug = replaced(&ptx("clusters"), "barrier.cluster", 0, "// ");
    let bug = replaced(&bug, "barrier.cluster", 0, "// ");
    let (device, module) = cluster_module(&bug);
    let args = Args::new()
        .u64(upload(&device, &x))
        .u64(device.alloc(1024).unwrap());
    let result = try_run(&device, &module, "cluster_sum", &line(4, 64), &args);
    assert_caught(result.map(|()| 0.0), FaultKind::Race, "race: ");
}

#[test]
fn a_multicast_reaches_both_blocks_and_fills_with_zero() {
    let (device, module) = cluster_module(&ptx("clusters"));
    let (columns, rows) = (40, 20);
    let x: Vec<f32> = (0..columns * rows).map(|i| i as f32 + 1.0).collect();
    let tensor = map(
        TensorElement::F32,
        upload(&device, &x),
        [columns as u64, rows as u64],
        [16, 16],
        Swizzle::None,
    );
    let y = device.alloc(4 * 512 * 4).unwrap();
    let args = Args::new().value(64, &tensor).u64(y);
    try_run(&device, &module, "multicast", &line(4, 128), &args).unwrap();
    let found: Vec<f32> = download(&device, y, 4 * 512);
    for (i, value) in found.iter().enumerate() {
        let (block, tile, row, column) = (i / 512, i / 256 % 2, i / 16 % 16, i % 16);
        let (r, c) = (tile * 16 + row, (block / 2 * 16 + column) as i32 - 4);
        let inside = r < rows && (0..columns as i32).contains(&c);
        let expected = if inside {
            x[r * columns + c as usize]
        } else {
            0.0
        };
        assert_eq!(
            *value, expected,
            "block {block}, tile {tile}, row {row}, column {column}"
        );
    }
}

#[test]
fn tiles_are_added_inside_the_tensor_only() {
    let (device, module) = cluster_module(&ptx("clusters"));
    let (columns, rows) = (24, 5);
    let y = upload(&device, &vec![0.5f32; columns * rows]);
    let tensor = map(
        TensorElement::F32,
        y,
        [columns as u64, rows as u64],
        [32, 8],
        Swizzle::None,
    );
    let args = Args::new().value(64, &tensor).u32(1000);
    try_run(&device, &module, "tile_sum", &line(3, 64), &args).unwrap();
    for (i, value) in download::<f32>(&device, y, columns * rows)
        .into_iter()
        .enumerate()
    {
        let (row, column) = (i / columns, i % columns);
        let element = ((row + 2) * 32 + column - 8.min(column)) as f32;
        let expected = if column >= 8 {
            0.5 + 3.0 * element + 3000.0
        } else {
            0.5
        };
        assert_eq!(value, expected, "row {row}, column {column}");
    }
}

#[test]
fn ranges_are_copied_in_and_out() {
    let (device, module) = cluster_module(&ptx("clusters"));
    let x = Random(9).floats(768);
    let y = device.alloc(768 * 4).unwrap();
    let args = Args::new().u64(upload(&device, &x)).u64(y);
    try_run(&device, &module, "ranges", &line(3, 256), &args).unwrap();
    let expected: Vec<f32> = x.iter().map(|x| x * 2.0).collect();
    assert_eq!(download::<f32>(&device, y, 768), expected);
    // One range too many.
    let args = Args::new().u64(upload(&device, &x)).u64(y);
    let result = try_run(&device, &module, "ranges", &line(4, 256), &args);
    assert_caught(
        result.map(|()| 0.0),
        FaultKind::OutOfBounds,
        "bulk copy of 1024 bytes",
    );
}

#[test]
fn tensor_maps_are_checked_as_cuda_does() {
    let good = TensorMap {
        element: TensorElement::F32,
        address: 1 << 44,
        sizes: vec![64, 64],
        strides_bytes: vec![256],
        tile: vec![32, 8],
        swizzle: Swizzle::B128,
        fills_with_nan: false,
        pixels: None,
    };
    assert!(encode_tensor_map(&good).is_ok());
    let cases = [
        (
            TensorMap {
                address: 8,
                ..good.clone()
            },
            "not a multiple of 16",
        ),
        (
            TensorMap {
                tile: vec![64, 8],
                ..good.clone()
            },
            "more than the swizzle's 128",
        ),
        (
            TensorMap {
                tile: vec![2, 8],
                ..good.clone()
            },
            "not a multiple of 16",
        ),
        (
            TensorMap {
                tile: vec![32, 257],
                ..good.clone()
            },
            "a tile of 257",
        ),
        (
            TensorMap {
                strides_bytes: vec![200],
                ..good.clone()
            },
            "stride 200",
        ),
        (
            TensorMap {
                sizes: vec![0, 64],
                ..good.clone()
            },
            "size 0",
        ),
        (
            TensorMap {
                sizes: vec![64],
                ..good.clone()
            },
            "1 sizes, 1 strides and 2 sides",
        ),
    ];
    for (map, part) in cases {
        let fault = encode_tensor_map(&map).expect_err(part);
        assert!(
            fault.kind() == FaultKind::InvalidCall && fault.to_string().contains(part),
            "{fault}"
        );
    }
}
