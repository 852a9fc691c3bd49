//! Clusters: addresses of other blocks' shared memory, and the barrier of all blocks.

use super::{
    access::CLUSTER_STRIDE,
    gang::{Block, Gang},
    warp::{Flow, Issue, Wait, Warp, lanes},
};
use crate::{fault::Result, lanes::Slots, memory::window};

/// Key of a cluster's barrier in the race check, where mbarriers have their address.
const CLUSTER_KEY: u64 = u64::MAX;

impl Block {
    fn is_at_cluster_barrier(&self) -> bool {
        let mut warps = self.warps.iter().flatten();
        warps.all(|w| w.is_done() || self.cluster_arrived.contains(&w.id))
    }
}

impl Gang<'_> {
    /// `mapa`: the same place in the block of another rank.
    pub(super) fn map_rank(
        &mut self,
        warp: &mut Warp,
        at: Issue,
        slots: &Slots,
        wide: bool,
    ) -> Result<()> {
        let ranks = *warp.file.narrow(slots.b);
        for lane in lanes(at.active) {
            let at = at.of_lane(lane);
            let own = self.blocks[at.block].index;
            if self.block_of_rank(own, ranks[lane]).is_none() {
                let what = format!("rank {}, which the cluster does not have", ranks[lane]);
                return Err(self.misuse(warp, at, what));
            }
            let base = u64::from(ranks[lane] + 1) * CLUSTER_STRIDE;
            if wide {
                let mut values = *warp.file.wide(slots.a);
                let offset = values[lane].wrapping_sub(window::SHARED) % CLUSTER_STRIDE;
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
    pub(super) fn rank_of(&mut self, warp: &mut Warp, at: Issue, slots: &Slots, wide: bool) {
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

    pub(super) fn cluster_arrive(&mut self, warp: &mut Warp, at: Issue) -> Result<Flow> {
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

    pub(super) fn cluster_wait(&mut self, warp: &mut Warp, at: Issue) -> Result<Flow> {
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

    /// Opens cluster barriers at which all live warps have arrived; true if there was one.
    pub(super) fn settle_clusters(&mut self) -> bool {
        if self.blocks.iter().all(|b| b.cluster_arrived.is_empty()) {
            return false;
        }
        let blocks = 0..self.blocks.len();
        let leaders: Vec<usize> = blocks.map(|b| self.cluster_leader(b)).collect();
        let mut opened = false;
        for leader in (0..self.blocks.len()).filter(|b| leaders[*b] == *b) {
            let members = || (0..leaders.len()).filter(|b| leaders[*b] == leader);
            let somebody = members().any(|b| !self.blocks[b].cluster_arrived.is_empty());
            let everybody = members().all(|b| self.blocks[b].is_at_cluster_barrier());
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
