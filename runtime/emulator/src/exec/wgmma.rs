//! `wgmma`: products of a warp group that read shared memory and write registers when they are waited for.
//!
//! Each warp computes its own 16 of the 64 rows. Layouts of operands in shared memory are those of PTX ISA, "Matrix
//! descriptor", and of CUTLASS's comments on canonical layouts.

use super::{
    gang::Gang,
    matrix::{accumulate, each_element, place_a, to_f32, to_integer},
    race::Async,
    warp::{Flow, Issue, Wait, Warp},
};
use crate::{
    decode::program::{Action, NONE, Shape, Wgmma},
    fault::{FaultKind, Result},
    numeric::format::{F16, Half},
    tensor_map::{permuted, width},
    types::Type,
};
use gristmill_runtime::gpu::Swizzle;

/// A product under way.
#[derive(Clone, Copy, Debug)]
pub(super) struct PendingProduct {
    /// Where its instruction is.
    at: Issue,
    group: u32,
    a: u64,
    b: u64,
    keeps_sum: bool,
}

/// The products of one warp.
#[derive(Default)]
pub(super) struct Products {
    pub pending: Vec<PendingProduct>,
    pub committed: u32,
}

/// An operand in shared memory.
#[derive(Clone, Copy)]
struct Operand {
    start: u64,
    /// Bytes between neighbouring parts; which parts, the layout says.
    leading: u64,
    stride: u64,
    swizzle: Swizzle,
    transposed: bool,
    element_bytes: u64,
}

impl Operand {
    fn new(descriptor: u64, ty: Type, transposed: bool) -> Operand {
        let field = |low: u32| (descriptor >> low & 0x3fff) << 4;
        let swizzle = match descriptor >> 62 {
            0 => Swizzle::None,
            1 => Swizzle::B128,
            2 => Swizzle::B64,
            _ => Swizzle::B32,
        };
        let element_bytes = ty.size_bytes() as u64;
        Operand {
            start: field(0),
            leading: field(16),
            stride: field(32),
            swizzle,
            transposed,
            element_bytes,
        }
    }

    /// Elements in 16 bytes.
    fn per_chunk(self) -> u64 {
        16 / self.element_bytes
    }

    /// Address of the 16 bytes that hold row (or column) `outer` and index `k` of the axis that is summed over.
    fn chunk(self, outer: u64, k: u64) -> u64 {
        let width = width(self.swizzle);
        let address = if self.transposed {
            let chunk = outer / self.per_chunk();
            let per_row = width / 16;
            let (across, along) = (chunk / per_row, chunk % per_row);
            if self.swizzle == Swizzle::None {
                across * self.stride + k % 8 * 16 + k / 8 * self.leading
            } else {
                across * self.leading + along * 16 + k % 8 * width + k / 8 * self.stride
            }
        } else {
            let chunk = k / self.per_chunk();
            let along = if self.swizzle == Swizzle::None {
                chunk * self.leading
            } else {
                chunk * 16
            };
            outer / 8 * self.stride + outer % 8 * width + along
        };
        permuted(self.swizzle, self.start + address)
    }

    /// Calls `f(address, outer, k)` for each 16 bytes of `outer` rows from `first` on and `k` indices: those of its first
    /// element.
    fn each_chunk(
        self,
        first: u64,
        outer: u64,
        k: u64,
        mut f: impl FnMut(u64, u64, u64) -> Result<()>,
    ) -> Result<()> {
        let per = self.per_chunk();
        let (outer_step, k_step) = if self.transposed { (per, 1) } else { (1, per) };
        for o in (0..outer).step_by(outer_step as usize) {
            for q in (0..k).step_by(k_step as usize) {
                f(self.chunk(first + o, q), o, q)?;
            }
        }
        Ok(())
    }
}

impl Gang<'_> {
    /// Enqueues a product; its operands must not be written until it is waited for.
    pub(super) fn wgmma(&mut self, warp: &mut Warp, at: Issue, wgmma: &Wgmma) -> Result<Flow> {
        if let Some(flow) = self.need_all_lanes(warp, at)? {
            return Ok(flow);
        }
        let product = PendingProduct {
            at,
            group: warp.products.committed,
            a: descriptor(warp, wgmma.a_descriptor),
            b: descriptor(warp, wgmma.b_descriptor),
            keeps_sum: match wgmma.scale_d {
                (NONE, _) => true,
                (predicate, flip) => (warp.file.predicates[predicate as usize] ^ flip) & 1 != 0,
            },
        };
        let (a, b, group) = (product.a, product.b, product.group);
        warp.products.pending.push(product);
        if let Some(races) = &self.races {
            let agent = races.group_agent(at.block, first_of_group(warp.id), Async::Product);
            let by = (agent, group + 1);
            for (operand, first, outer) in operands(warp, wgmma, a, b).into_iter().flatten() {
                operand.each_chunk(first, outer, wgmma.shape.k as u64, |address, _, _| {
                    self.race_async(warp, at, by, (at.block, address, 16), false)
                })?;
            }
        }
        Ok(Flow::Next)
    }

    /// Computes the products of all groups but the last `left`. A product is one operation of four warps, so all of them
    /// must have committed it, and its operands may be overwritten once one of them has waited.
    pub(super) fn wgmma_wait(&mut self, warp: &mut Warp, at: Issue, left: u32) -> Result<Flow> {
        if let Some(flow) = self.need_all_lanes(warp, at)? {
            return Ok(flow);
        }
        let end = warp.products.committed.saturating_sub(left);
        if !self.group_has_committed(at.block, warp.id, end) {
            return Ok(Flow::Wait(Wait::WarpGroup {
                warp: warp.id,
                group: end,
            }));
        }
        self.complete_products(warp, end)?;
        for other in (first_of_group(warp.id)..)
            .take(4)
            .filter(|other| *other != warp.id)
        {
            let Some(mut other_warp) = self.blocks[at.block].warps[other as usize].take() else {
                continue;
            };
            let result = self.complete_products(&mut other_warp, end);
            self.blocks[at.block].warps[other as usize] = Some(other_warp);
            result?;
        }
        if let Some(races) = &mut self.races {
            races.group_wait(
                at.block,
                warp.id,
                first_of_group(warp.id),
                Async::Product,
                end,
            );
        }
        Ok(Flow::Next)
    }

    /// True when the other warps of a warp group have committed as many groups of products; the running warp is out of its
    /// block.
    pub(super) fn group_has_committed(&self, block: usize, warp: u32, group: u32) -> bool {
        let others = (first_of_group(warp)..)
            .take(4)
            .filter(|other| *other != warp);
        let warps = &self.blocks[block].warps;
        let has = |w: u32| {
            warps
                .get(w as usize)
                .and_then(Option::as_ref)
                .is_some_and(|w| w.products.committed >= group)
        };
        others.into_iter().all(has)
    }

    fn complete_products(&mut self, warp: &mut Warp, end: u32) -> Result<()> {
        for product in std::mem::take(&mut warp.products.pending) {
            if product.group < end {
                self.make_product(warp, product)?;
            } else {
                warp.products.pending.push(product);
            }
        }
        Ok(())
    }

    fn make_product(&mut self, warp: &mut Warp, product: PendingProduct) -> Result<()> {
        let code = &self.launch.call.program.code;
        let Action::Wgmma(wgmma) = &code[product.at.pc as usize].action else {
            return Ok(());
        };
        let Shape { n, k, .. } = wgmma.shape;
        let of_a = |bits| operand_value(wgmma.a, wgmma.negate[0], bits);
        let of_b = |bits| operand_value(wgmma.b, wgmma.negate[1], bits);
        let mut a = vec![0f32; 16 * k];
        let mut b = vec![0f32; k * n];
        let [of_shared_b, of_shared_a] = operands(warp, wgmma, product.a, product.b);
        if let Some(part) = of_shared_b {
            self.read_operand(warp, product.at, part, k as u64, |outer, q, bits| {
                b[q * n + outer] = of_b(bits);
            })?;
        }
        if let Some(part) = of_shared_a {
            self.read_operand(warp, product.at, part, k as u64, |outer, q, bits| {
                a[outer * k + q] = of_a(bits);
            })?;
        }
        let registers = &wgmma.a_registers;
        each_element(warp, registers, wgmma.a, |lane, r, j, per, bits| {
            let (row, column) = place_a(lane, r, j, per);
            a[row * k + column] = of_a(bits);
        });
        sum_into(warp, wgmma, &a, &b, product.keeps_sum);
        Ok(())
    }

    /// Calls `f(outer, k, bits)` for each element of an operand.
    fn read_operand(
        &self,
        warp: &Warp,
        at: Issue,
        (operand, first, outer): (Operand, u64, u64),
        k: u64,
        mut f: impl FnMut(usize, usize, u32),
    ) -> Result<()> {
        let shared = &self.blocks[at.block].shared;
        let size = operand.element_bytes as usize;
        operand.each_chunk(first, outer, k, |address, o, q| {
            let Some(chunk) = shared.get(address as usize..address as usize + 16) else {
                let what = format!(
                    "out of bounds: wgmma reads shared address {address:#x}, of {:#x} bytes",
                    shared.len()
                );
                return Err(self.fault(FaultKind::OutOfBounds, warp, at, what));
            };
            for (e, bytes) in chunk.chunks_exact(size).enumerate() {
                let little_endian = bytes.iter().rev();
                let bits = little_endian.fold(0, |bits, byte| bits << 8 | u32::from(*byte));
                let (o, q) = (o as usize, q as usize);
                if operand.transposed {
                    f(o + e, q, bits)
                } else {
                    f(o, q + e, bits)
                }
            }
            Ok(())
        })
    }
}

/// First of the four warps that compute together.
fn first_of_group(warp: u32) -> u32 {
    warp / 4 * 4
}

fn descriptor(warp: &Warp, slot: u32) -> u64 {
    match slot {
        NONE => 0,
        slot => warp.file.wide(slot)[0],
    }
}

/// Integers have no sign to change.
fn operand_value(ty: Type, is_negated: bool, bits: u32) -> f32 {
    match ty {
        Type::U8 | Type::S8 => to_integer(ty, bits) as f32,
        _ if is_negated => -to_f32(ty, bits),
        _ => to_f32(ty, bits),
    }
}

/// Row and column of accumulator register `r`, with one element per register.
fn place_d(lane: usize, r: usize) -> (usize, usize) {
    (
        lane / 4 + (r >> 1 & 1) * 8,
        r / 4 * 8 + lane % 4 * 2 + (r & 1),
    )
}

/// Row and column of element `j` of accumulator register `r`, with two elements per register.
fn place_d_packed(lane: usize, r: usize, j: usize) -> (usize, usize) {
    (lane / 4 + (r & 1) * 8, r / 2 * 8 + lane % 4 * 2 + j)
}

/// Operands `b` and, unless it is in registers, `a`: layout, first row (or column) of this warp, and how many.
fn operands(warp: &Warp, wgmma: &Wgmma, a: u64, b: u64) -> [Option<(Operand, u64, u64)>; 2] {
    let of_b = (
        Operand::new(b, wgmma.b, wgmma.transposed[1]),
        0,
        wgmma.shape.n as u64,
    );
    let first = u64::from(warp.id % 4) * 16;
    let of_a = (Operand::new(a, wgmma.a, wgmma.transposed[0]), first, 16);
    [Some(of_b), (wgmma.a_descriptor != NONE).then_some(of_a)]
}

/// `d = a b`, added to the contents of the registers if `keeps_sum`.
fn sum_into(warp: &mut Warp, wgmma: &Wgmma, a: &[f32], b: &[f32], keeps_sum: bool) {
    let Shape { n, k, .. } = wgmma.shape;
    if wgmma.accumulator == Type::S32 {
        return sum_integers(warp, wgmma, a, b, keeps_sum);
    }
    let packed = wgmma.accumulator == Type::F16;
    let place = |lane: usize, r: usize, j: usize| {
        if packed {
            place_d_packed(lane, r, j)
        } else {
            place_d(lane, r)
        }
    };
    let mut c = vec![0f32; 16 * n];
    if keeps_sum {
        each_element(warp, &wgmma.d, wgmma.accumulator, |lane, r, j, _, bits| {
            let (row, column) = place(lane, r, j);
            c[row * n + column] = to_f32(wgmma.accumulator, bits);
        });
    }
    accumulate(a, b, &mut c, k, n);
    for (r, register) in wgmma.d.iter().enumerate() {
        let value = |lane: usize, j: usize| {
            let (row, column) = place(lane, r, j);
            c[row * n + column]
        };
        let half = |lane: usize, j: usize| u32::from(F16::from_f32(value(lane, j)).0);
        let values = std::array::from_fn(|lane| match packed {
            true => half(lane, 0) | half(lane, 1) << 16,
            false => value(lane, 0).to_bits(),
        });
        warp.file.put_narrow(*register, u32::MAX, &values);
    }
}

/// Bytes are exact as floats; their sums of at most 32 products are too.
fn sum_integers(warp: &mut Warp, wgmma: &Wgmma, a: &[f32], b: &[f32], keeps_sum: bool) {
    let Shape { n, k, .. } = wgmma.shape;
    let mut c = vec![0f32; 16 * n];
    accumulate(a, b, &mut c, k, n);
    for (r, register) in wgmma.d.iter().enumerate() {
        let before = *warp.file.narrow(*register);
        let values = std::array::from_fn(|lane| {
            let (row, column) = place_d(lane, r);
            let sum = c[row * n + column] as i32;
            if keeps_sum {
                before[lane].wrapping_add(sum as u32)
            } else {
                sum as u32
            }
        });
        warp.file.put_narrow(*register, u32::MAX, &values);
    }
}
