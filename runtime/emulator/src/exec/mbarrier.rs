//! mbarriers: phases that are complete when all arrivals and all announced bytes have come.
//!
//! The state is in the eight bytes of shared memory that the kernel gives, so overwriting it shows: bits 0 to 19 are
//! pending arrivals, 20 to 39 expected ones, 40 to 60 transaction bytes (biased), 61 the phase, 62 and 63 a mark.

use super::{
    access::{Kind, addresses},
    gang::Gang,
    warp::{Flow, Issue, Wait, Warp, lanes},
};
use crate::{
    decode::program::{Address, Mbarrier, MbarrierOp, NONE},
    fault::Result,
    lanes::LANES,
};

/// Largest count of arrivals, and of bytes, that a phase may have.
const MOST: u32 = (1 << 20) - 1;

/// Where an mbarrier is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Spot {
    pub block: usize,
    pub address: u64,
}

impl Spot {
    pub fn key(self) -> (usize, u64) {
        (self.block, self.address)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct State {
    pub pending: u32,
    pub expected: u32,
    pub bytes: i32,
    pub phase: u32,
}

impl State {
    fn pack(self) -> u64 {
        let bytes = (self.bytes + (1 << 20)) as u64 & 0x1f_ffff;
        u64::from(self.pending)
            | u64::from(self.expected) << 20
            | bytes << 40
            | u64::from(self.phase) << 61
            | 1 << 62
    }

    fn new(count: u32) -> State {
        State {
            pending: count,
            expected: count,
            bytes: 0,
            phase: 0,
        }
    }

    fn is_complete(self) -> bool {
        self.pending == 0 && self.bytes == 0
    }

    fn next_phase(self) -> State {
        State {
            pending: self.expected,
            phase: self.phase ^ 1,
            ..self
        }
    }

    fn unpack(bits: u64) -> Option<State> {
        let state = State {
            pending: bits as u32 & MOST,
            expected: (bits >> 20) as u32 & MOST,
            bytes: (bits >> 40 & 0x1f_ffff) as i32 - (1 << 20),
            phase: (bits >> 61 & 1) as u32,
        };
        (bits >> 62 == 1).then_some(state)
    }
}

impl Gang<'_> {
    /// State of an mbarrier; `None` if the bytes are not those of one.
    pub(super) fn mbarrier_state(&self, spot: Spot) -> Option<State> {
        let at = spot.address as usize;
        let bytes = self.blocks[spot.block].shared.get(at..at + 8)?;
        State::unpack(u64::from_le_bytes(bytes.try_into().ok()?))
    }

    fn set_mbarrier(&mut self, spot: Spot, bits: u64) {
        let at = spot.address as usize;
        self.blocks[spot.block].shared[at..at + 8].copy_from_slice(&bits.to_le_bytes());
    }

    /// Where each active lane's mbarrier is, checked.
    fn mbarrier_spot(
        &self,
        warp: &Warp,
        at: Issue,
        address: &Address,
        lane: usize,
    ) -> Result<Spot> {
        let to = addresses(warp, address)[lane];
        let at = at.of_lane(lane);
        let (block, start) = self.shared_range(warp, at, address.space, to, 8, Kind::Mbarrier)?;
        Ok(Spot {
            block,
            address: start as u64,
        })
    }

    pub(super) fn mbarrier(
        &mut self,
        warp: &mut Warp,
        at: Issue,
        mbarrier: &Mbarrier,
    ) -> Result<Flow> {
        if let MbarrierOp::Wait { parity, blocking } = mbarrier.op {
            return self.mbarrier_wait(warp, at, mbarrier, parity, blocking);
        }
        let mut tokens = [0; LANES];
        for lane in lanes(at.active) {
            let spot = self.mbarrier_spot(warp, at, &mbarrier.address, lane)?;
            let operand =
                (mbarrier.operand != NONE).then(|| warp.file.narrow(mbarrier.operand)[lane]);
            let at = at.of_lane(lane);
            if mbarrier.op == MbarrierOp::Init {
                self.mbarrier_init(warp, at, spot, operand.unwrap_or(0))?;
            } else {
                tokens[lane] = self.mbarrier_update(warp, at, spot, (mbarrier.op, operand))?;
            }
        }
        warp.file.put_wide(mbarrier.token, at.active, &tokens);
        Ok(Flow::Next)
    }

    /// Executes an operation other than to initialise and to wait; returns the state before it.
    fn mbarrier_update(
        &mut self,
        warp: &Warp,
        at: Issue,
        spot: Spot,
        (op, operand): (MbarrierOp, Option<u32>),
    ) -> Result<u64> {
        let state = self.known_state(warp, at, spot)?;
        let bytes = i64::from(operand.unwrap_or(0));
        match op {
            MbarrierOp::Invalidate => self.set_mbarrier(spot, 0),
            MbarrierOp::Expect => self.mbarrier_count(warp, at, spot, 0, bytes)?,
            MbarrierOp::ArriveExpect => {
                self.race_arrive(warp, at, spot);
                self.mbarrier_count(warp, at, spot, 1, bytes)?;
            }
            _ => {
                self.race_arrive(warp, at, spot);
                let count = operand.unwrap_or(1);
                if op == MbarrierOp::ArriveDrop {
                    let expected = state.expected.saturating_sub(count);
                    self.set_mbarrier(spot, State { expected, ..state }.pack());
                }
                self.mbarrier_count(warp, at, spot, count, 0)?;
            }
        }
        Ok(state.pack())
    }

    fn race_arrive(&mut self, warp: &Warp, at: Issue, spot: Spot) {
        if let Some(races) = &mut self.races {
            races.mbarrier_arrive(at.block, warp.id, spot.key());
        }
    }

    fn mbarrier_init(&mut self, warp: &Warp, at: Issue, spot: Spot, count: u32) -> Result<()> {
        if count == 0 || count > MOST {
            let what = format!("an mbarrier for {count} arrivals; 1 to {MOST} are possible");
            return Err(self.misuse(warp, at, what));
        }
        self.set_mbarrier(spot, State::new(count).pack());
        Ok(())
    }

    fn known_state(&self, warp: &Warp, at: Issue, spot: Spot) -> Result<State> {
        self.mbarrier_state(spot).ok_or_else(|| {
            self.misuse(
                warp,
                at,
                format!(
                    "no mbarrier at shared address {:#x}: not initialised, or overwritten",
                    spot.address
                ),
            )
        })
    }

    /// Counts arrivals and bytes, and completes the phase when nothing is left.
    fn mbarrier_count(
        &mut self,
        warp: &Warp,
        at: Issue,
        spot: Spot,
        arrivals: u32,
        bytes: i64,
    ) -> Result<()> {
        let state = self.known_state(warp, at, spot)?;
        if arrivals > state.pending {
            let what = format!(
                "{arrivals} arrivals at the mbarrier at {:#x}, which expects {} more in this phase",
                spot.address, state.pending
            );
            return Err(self.misuse(warp, at, what));
        }
        let total = i64::from(state.bytes) + bytes;
        if total > i64::from(MOST) {
            return Err(self.misuse(
                warp,
                at,
                format!("{total} bytes announced in one phase; at most {MOST} are possible"),
            ));
        }
        self.mbarrier_settle(
            spot,
            State {
                pending: state.pending - arrivals,
                bytes: total as i32,
                ..state
            },
        );
        Ok(())
    }

    /// Bytes have come. `false` if there is no mbarrier.
    pub(super) fn mbarrier_complete(&mut self, spot: Spot, bytes: u64) -> bool {
        let Some(state) = self.mbarrier_state(spot) else {
            return false;
        };
        self.mbarrier_settle(
            spot,
            State {
                bytes: state.bytes - bytes as i32,
                ..state
            },
        );
        true
    }

    fn mbarrier_settle(&mut self, spot: Spot, state: State) {
        if !state.is_complete() {
            return self.set_mbarrier(spot, state.pack());
        }
        if let Some(races) = &mut self.races {
            races.mbarrier_flip(spot.key());
        }
        self.set_mbarrier(spot, state.next_phase().pack());
    }

    fn mbarrier_wait(
        &mut self,
        warp: &mut Warp,
        at: Issue,
        mbarrier: &Mbarrier,
        parity: bool,
        blocking: bool,
    ) -> Result<Flow> {
        let mut done = 0;
        let mut waits = None;
        for lane in lanes(at.active) {
            let spot = self.mbarrier_spot(warp, at, &mbarrier.address, lane)?;
            let state = self.known_state(warp, at.of_lane(lane), spot)?;
            let phase = if parity {
                warp.file.narrow(mbarrier.operand)[lane] & 1
            } else {
                (warp.file.wide(mbarrier.operand)[lane] >> 61 & 1) as u32
            };
            if state.phase != phase {
                done |= 1 << lane;
                if let Some(races) = &mut self.races {
                    races.mbarrier_pass(at.block, warp.id, spot.key());
                }
            } else {
                waits = Some(Wait::Mbarrier { spot, phase });
            }
        }
        if let Some(wait) = waits.filter(|_| blocking) {
            return Ok(Flow::Wait(wait));
        }
        warp.file.put_predicate(mbarrier.done, at.active, done);
        Ok(waits.map_or(Flow::Next, |_| Flow::Spin))
    }

    /// An arrival on behalf of copies that are complete.
    pub(super) fn mbarrier_arrive_late(
        &mut self,
        warp: &Warp,
        at: Issue,
        address: &Address,
    ) -> Result<()> {
        for lane in lanes(at.active) {
            let spot = self.mbarrier_spot(warp, at, address, lane)?;
            self.race_arrive(warp, at, spot);
            self.mbarrier_count(warp, at.of_lane(lane), spot, 1, 0)?;
        }
        Ok(())
    }

    /// True when a group no longer has to wait.
    pub(super) fn is_over(&self, block: usize, wait: Wait) -> bool {
        match wait {
            Wait::Mbarrier { spot, phase } => {
                self.mbarrier_state(spot).is_none_or(|s| s.phase != phase)
            }
            Wait::Cluster(generation) => self.blocks[block].cluster_generation > generation,
            Wait::WarpGroup { warp, group } => self.group_has_committed(block, warp, group),
            _ => false,
        }
    }
}
