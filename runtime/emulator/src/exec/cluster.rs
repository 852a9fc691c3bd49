//! Clusters: addresses of other blocks' shared memory, and the barrier of all blocks.

use super::{
    access::CLUSTER_STRIDE,
    gang::Gang,
    warp::{At, Flow, Wait, Warp, lanes},
};
use crate::{fault::Result, lanes::Slots, memory::window};

/// Key of a cluster's barrier in the race check, where mbarriers have their address.
const CLUSTER_KEY: u64 = u64::MAX;

impl Gang<'_> {
    /// `mapa`: the same place in the block of another rank.
    pub(super) fn map_rank(
        &mut self,
        warp: &mut Warp,
        at: At,
        slots: &Slots,
        wide: bool,
    ) -> Result<()> {
        let ranks = *warp.file.narrow(slots.b);
        for lane in lanes(at.active) {
            let at = At {
                active: 1 << lane,
                ..at
            };
            if self
                .block_of_rank(self.blocks[at.block].index, ranks[lane])
                .is_none()
            {
                return Err(self.misuse(
                    warp,
                    at,
                    format!("rank {}, which the cluster does not have", ranks[lane]),
                ));
            }
            let base = u64::from(ranks[lane] + 1) * CLUSTER_STRIDE;
            if wide {
                let offset =
                    warp.file.wide(slots.a)[lane].wrapping_sub(window::SHARED) % CLUSTER_STRIDE;
                let mut values = *warp.file.wide(slots.a);
                values[lane] = window::SHARED + base + offset;
                warp.file.put_wide(slots.d, at.active, &values);
            } else {
                let mut values = *warp.file.narrow(slots.a);
                values[lane] = (base + u64::from(values[lane]) % CLUSTER_STRIDE) as u32;
                warp.file.put_narrow(slots.d, at.active, &values);
            }
        }
        Ok(())
    }

    /// `getctarank`
    pub(super) fn rank_of(&mut self, warp: &mut Warp, at: At, slots: &Slots, wide: bool) {
        let own = self.blocks[at.block].rank;
        let rank = |address: u64| match (address / CLUSTER_STRIDE) as u32 {
            0 => own,
            k => k - 1,
        };
        let values = if wide {
            warp.file
                .wide(slots.a)
                .map(|a| rank(a.wrapping_sub(window::SHARED)))
        } else {
            warp.file.narrow(slots.a).map(|a| rank(u64::from(a)))
        };
        warp.file.put_narrow(slots.d, at.active, &values);
    }

    pub(super) fn cluster_arrive(&mut self, warp: &mut Warp, at: At) -> Result<Flow> {
        if at.active != warp.live {
            return self.wait_for_lanes(warp, at, warp.live);
        }
        if self.blocks[at.block].cluster_arrived.contains(&warp.id) {
            return Err(self.misuse(
                warp,
                at,
                "arrives at the cluster's barrier again before it is complete".to_owned(),
            ));
        }
        warp.cluster_generation = self.blocks[at.block].cluster_generation;
        self.blocks[at.block].cluster_arrived.push(warp.id);
        let key = (self.cluster_leader(at.block), CLUSTER_KEY);
        if let Some(races) = &mut self.races {
            races.mbarrier_arrive(at.block, warp.id, key);
        }
        Ok(Flow::Next)
    }

    pub(super) fn cluster_wait(&mut self, warp: &mut Warp, at: At) -> Result<Flow> {
        if at.active != warp.live {
            return self.wait_for_lanes(warp, at, warp.live);
        }
        if self.blocks[at.block].cluster_generation <= warp.cluster_generation {
            return Ok(Flow::Wait(Wait::Cluster(warp.cluster_generation)));
        }
        let key = (self.cluster_leader(at.block), CLUSTER_KEY);
        if let Some(races) = &mut self.races {
            races.mbarrier_pass(at.block, warp.id, key);
        }
        Ok(Flow::Next)
    }

    /// The first block of the gang that is in the same cluster.
    fn cluster_leader(&self, block: usize) -> usize {
        self.block_of_rank(self.blocks[block].index, 0)
            .unwrap_or(block)
    }

    /// Opens cluster barriers at which all live warps have arrived; whether any was.
    pub(super) fn settle_clusters(&mut self) -> bool {
        if self.blocks.iter().all(|b| b.cluster_arrived.is_empty()) {
            return false;
        }
        let leaders: Vec<usize> = (0..self.blocks.len())
            .map(|b| self.cluster_leader(b))
            .collect();
        let mut opened = false;
        for leader in (0..self.blocks.len()).filter(|b| leaders[*b] == *b) {
            let members = || (0..leaders.len()).filter(|b| leaders[*b] == leader);
            let somebody = members().any(|b| !self.blocks[b].cluster_arrived.is_empty());
            let everybody = members().all(|b| {
                let block = &self.blocks[b];
                block
                    .warps
                    .iter()
                    .flatten()
                    .all(|w| w.is_done() || block.cluster_arrived.contains(&w.id))
            });
            if !somebody || !everybody {
                continue;
            }
            for b in members() {
                self.blocks[b].cluster_arrived.clear();
                self.blocks[b].cluster_generation += 1;
            }
            if let Some(races) = &mut self.races {
                races.mbarrier_flip((leader, CLUSTER_KEY));
            }
            opened = true;
        }
        opened
    }
}
