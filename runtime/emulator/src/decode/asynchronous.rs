//! Asynchronous copies, mbarriers, bulk copies and clusters.

use super::{
    Decoder, Ins, malformed,
    memory::{operation, space},
    program::{Action, AddressSpace, AtomicOp, Bulk, BulkKind, Copy, Mbarrier, MbarrierOp, NONE},
    tensor::immediate,
    unsupported,
};
use crate::{fault::Result, lanes::Slots, parse::ast::Operand, types::Type};

/// Operation of an mbarrier by the opcode, and the index of its address operand.
fn mbarrier_op(ins: &Ins) -> Option<(MbarrierOp, usize)> {
    Some(match ins.parts[1] {
        "init" => (MbarrierOp::Init, 0),
        "inval" => (MbarrierOp::Invalidate, 0),
        "arrive" if ins.has("expect_tx") => (MbarrierOp::ArriveExpect, 1),
        "arrive" => (MbarrierOp::Arrive, 1),
        "arrive_drop" if !ins.has("expect_tx") => (MbarrierOp::ArriveDrop, 1),
        "expect_tx" => (MbarrierOp::Expect, 0),
        wait @ ("try_wait" | "test_wait") => {
            let parity = ins.has("parity");
            let blocking = wait == "try_wait";
            (MbarrierOp::Wait { parity, blocking }, 1)
        }
        _ => return None,
    })
}

impl<'a> Decoder<'a> {
    /// `false` if the opcode is none of these.
    pub(super) fn asynchronous(&mut self, ins: &Ins<'a>) -> Result<bool> {
        match ins.root() {
            "cp" if ins.has("bulk") => return self.bulk(ins),
            "cp" if ins.has("async") => return self.copy_async(ins),
            "mbarrier" => return self.mbarrier(ins),
            "fence" if ins.has("proxy") && ins.has("async") => self.emit_action(Action::ProxyFence),
            "fence" if ins.has("proxy") || ins.has("mbarrier_init") => {
                self.emit_action(Action::Nothing)
            }
            "barrier" if ins.has("cluster") && ins.has("arrive") => {
                self.emit_action(Action::ClusterArrive)
            }
            "barrier" if ins.has("cluster") => self.emit_action(Action::ClusterWait),
            "mapa" | "getctarank" => self.cluster_address(ins)?,
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// `mapa.shared::cluster.u32 d, a, rank` and `getctarank.u64 d, a`
    fn cluster_address(&mut self, ins: &Ins<'a>) -> Result<()> {
        let ty = ins.ty()?;
        let wide = ty.units() == 2;
        let a = self.source(ins.operand(1)?, ty)?;
        if ins.root() == "getctarank" {
            let d = self.target(ins.operand(0)?, Type::U32)?;
            self.emit(Action::RankOf { wide }, Slots::unary(d, a));
            return Ok(());
        }
        let d = self.target(ins.operand(0)?, ty)?;
        let b = self.source(ins.operand(2)?, Type::U32)?;
        self.emit(Action::MapRank { wide }, Slots::binary(d, a, b));
        Ok(())
    }

    fn copy_async(&mut self, ins: &Ins<'a>) -> Result<bool> {
        let action = if ins.has("commit_group") {
            Action::CopyCommit
        } else if ins.has("wait_all") {
            Action::CopyWait(None)
        } else if ins.has("wait_group") {
            Action::CopyWait(Some(immediate(ins.operand(0)?)? as u32))
        } else if ins.has("mbarrier") {
            if !ins.has("noinc") {
                return Err(unsupported("without `.noinc`"));
            }
            Action::CopyArrive(self.address(ins.operand(0)?, AddressSpace::Shared)?)
        } else if ins.has("global") {
            Action::Copy(Box::new(self.copy_to_shared(ins)?))
        } else {
            return Ok(false);
        };
        self.emit_action(action);
        Ok(true)
    }

    fn copy_to_shared(&mut self, ins: &Ins<'a>) -> Result<Copy> {
        let to = self.address(ins.operand(0)?, AddressSpace::Shared)?;
        let from = self.address(ins.operand(1)?, AddressSpace::Global)?;
        let bytes = immediate(ins.operand(2)?)? as u32;
        if !matches!(bytes, 4 | 8 | 16) {
            return Err(malformed(format!("{bytes} bytes; 4, 8 or 16 are possible")));
        }
        let is_size = !ins.has("L2::cache_hint") || ins.operands.len() > 4;
        let source_bytes = match ins.operands.get(3).filter(|_| is_size) {
            Some(Operand::Not(_)) => return Err(unsupported("an ignored source")),
            Some(size) => self.source(size, Type::U32)?,
            None => NONE,
        };
        Ok(Copy {
            to,
            from,
            bytes,
            source_bytes,
        })
    }

    fn mbarrier(&mut self, ins: &Ins<'a>) -> Result<bool> {
        let Some((op, at)) = mbarrier_op(ins) else {
            return Ok(false);
        };
        let address = self.address(ins.operand(at)?, space(ins))?;
        let mut mbarrier = Mbarrier {
            op,
            address,
            operand: NONE,
            token: NONE,
            done: NONE,
        };
        if let MbarrierOp::Wait { parity, .. } = op {
            mbarrier.done = self.predicate(ins.operand(0)?)?;
            // A time limit may follow; waiting for ever is allowed.
            mbarrier.operand =
                self.source(ins.operand(2)?, if parity { Type::U32 } else { Type::B64 })?;
        } else {
            if at == 1 {
                mbarrier.token = self.target(ins.operand(0)?, Type::B64)?;
            }
            if let Some(operand) = ins.operands.get(at + 1) {
                mbarrier.operand = self.source(operand, Type::U32)?;
            }
        }
        let needs = matches!(
            op,
            MbarrierOp::Init | MbarrierOp::ArriveExpect | MbarrierOp::Expect
        );
        if needs && mbarrier.operand == NONE {
            return Err(malformed("a count is missing"));
        }
        self.emit_action(Action::Mbarrier(Box::new(mbarrier)));
        Ok(true)
    }

    fn bulk(&mut self, ins: &Ins<'a>) -> Result<bool> {
        if ins.has("commit_group") {
            self.emit_action(Action::BulkCommit);
        } else if ins.has("wait_group") {
            let n = immediate(ins.operand(0)?)? as u32;
            self.emit_action(Action::BulkWait(n));
        } else if ins.has("prefetch") {
            self.emit_action(Action::Nothing);
        } else if ins.has("im2col_no_offs") || ins.parts.iter().any(|p| p.starts_with("im2col::w"))
        {
            return Err(unsupported("this im2col mode"));
        } else if ins.has("tensor") {
            self.bulk_tile(ins)?;
        } else {
            self.bulk_range(ins)?;
        }
        Ok(true)
    }

    /// Direction of a bulk copy, by the order of the state spaces in the opcode.
    fn bulk_kind(&self, ins: &Ins<'a>) -> Result<BulkKind> {
        let spaces: Vec<&str> = ins
            .parts
            .iter()
            .filter(|p| p.starts_with("shared") || **p == "global")
            .copied()
            .collect();
        let reduces = ins.has("reduce");
        match spaces[..] {
            [to, "global"] if to.starts_with("shared") && !reduces => Ok(BulkKind::Load),
            ["global", _] if reduces => {
                let op = operation(ins)
                    .filter(|op| !matches!(op, AtomicOp::Exchange | AtomicOp::CompareAndSwap));
                let ty = ins.ty().ok();
                if ty.is_some_and(|ty| !matches!(ty.size_bytes(), 2 | 4 | 8)) {
                    return Err(unsupported("this type"));
                }
                Ok(BulkKind::Reduce(
                    op.ok_or_else(|| unsupported("this operation"))?,
                    ty,
                ))
            }
            ["global", _] => Ok(BulkKind::Store),
            [_, "shared::cta"] if !reduces => Ok(BulkKind::Across),
            _ => Err(unsupported("these state spaces")),
        }
    }

    fn bulk_tile(&mut self, ins: &Ins<'a>) -> Result<()> {
        let kind = self.bulk_kind(ins)?;
        let is_load = kind == BulkKind::Load;
        let (map, shared) = if is_load { (1, 0) } else { (0, 1) };
        let Operand::Tensor(base, coordinates) = ins.operand(map)? else {
            return Err(malformed("expected a tensor map with coordinates"));
        };
        let axes = ["1d", "2d", "3d", "4d", "5d"];
        let axes = axes.iter().position(|d| ins.has(d)).map(|k| k + 1);
        if axes != Some(coordinates.len()) {
            return Err(malformed(format!("{} coordinates", coordinates.len())));
        }
        let offsets = self.pixel_offsets(ins, is_load, coordinates.len())?;
        let coordinates = coordinates
            .iter()
            .map(|c| self.source(c, Type::S32))
            .collect::<Result<_>>()?;
        let global = self.address(&Operand::Memory(base.clone(), 0), AddressSpace::Generic)?;
        let shared = self.address(ins.operand(shared)?, AddressSpace::Shared)?;
        let mbarrier = if is_load {
            Some(self.address(ins.operand(2)?, AddressSpace::Shared)?)
        } else {
            None
        };
        let bulk = Bulk {
            kind,
            shared,
            global,
            size: NONE,
            coordinates,
            mbarrier,
            ranks: self.multicast_ranks(ins, if offsets.is_empty() { 3 } else { 4 })?,
            offsets,
        };
        self.emit_action(Action::Bulk(Box::new(bulk)));
        Ok(())
    }

    /// Offsets of a copy in im2col mode from its pixels, one for each spatial axis; empty in another
    /// mode.
    fn pixel_offsets(&mut self, ins: &Ins<'a>, is_load: bool, axes: usize) -> Result<Vec<u32>> {
        if !ins.has("im2col") {
            return Ok(Vec::new());
        }
        if !is_load {
            return Err(unsupported("a store in im2col mode"));
        }
        let Operand::Vector(offsets) = ins.operand(3)? else {
            return Err(malformed("expected the offsets of im2col mode"));
        };
        if axes < 3 || offsets.len() != axes - 2 {
            return Err(malformed(format!(
                "{} offsets of {axes} coordinates",
                offsets.len()
            )));
        }
        offsets.iter().map(|o| self.source(o, Type::U16)).collect()
    }

    /// Mask of ranks in operand `k`, if the copy goes to several.
    fn multicast_ranks(&mut self, ins: &Ins<'a>, k: usize) -> Result<u32> {
        if ins.has("multicast::cluster") {
            self.source(ins.operand(k)?, Type::U16)
        } else {
            Ok(NONE)
        }
    }

    fn bulk_range(&mut self, ins: &Ins<'a>) -> Result<()> {
        let kind = self.bulk_kind(ins)?;
        let (to, from) = (ins.operand(0)?, ins.operand(1)?);
        let (shared, global, space) = match kind {
            BulkKind::Load => (to, from, AddressSpace::Global),
            BulkKind::Across => (to, from, AddressSpace::Shared),
            _ => (from, to, AddressSpace::Global),
        };
        let shared = self.address(shared, AddressSpace::Shared)?;
        let global = self.address(global, space)?;
        let size = self.source(ins.operand(2)?, Type::U32)?;
        let completes = matches!(kind, BulkKind::Load | BulkKind::Across);
        let mbarrier = if completes {
            Some(self.address(ins.operand(3)?, AddressSpace::Shared)?)
        } else {
            None
        };
        let bulk = Bulk {
            kind,
            shared,
            global,
            size,
            coordinates: vec![],
            offsets: vec![],
            mbarrier,
            ranks: self.multicast_ranks(ins, 4)?,
        };
        self.emit_action(Action::Bulk(Box::new(bulk)));
        Ok(())
    }
}
