//! Special registers: indices of a thread, extents of the launch, clocks.

/// A special register with a value fixed for the life of a thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Special {
    /// Thread in its block, by axis.
    Tid(usize),
    /// Threads per block.
    Ntid(usize),
    /// Block in the grid.
    Ctaid(usize),
    /// Blocks in the grid.
    Nctaid(usize),
    LaneId,
    WarpId,
    WarpsPerBlock,
    /// Mask of lanes relative to this one.
    LanesEq,
    LanesLe,
    LanesLt,
    LanesGe,
    LanesGt,
    /// Block in its cluster.
    ClusterCtaid(usize),
    /// Blocks per cluster.
    ClusterNctaid(usize),
    /// Cluster in the grid.
    ClusterId(usize),
    /// Clusters in the grid.
    Nclusterid(usize),
    /// Linear index of the block in its cluster.
    ClusterRank,
    ClusterSize,
    DynamicShared,
    TotalShared,
    SmId,
    SmCount,
    GridId,
    IsCluster,
    WarpSize,
}

impl Special {
    /// The register that `name`, percent sign included, stands for.
    pub fn parse(name: &str) -> Option<Special> {
        if let Some((stem, axis)) = name.rsplit_once('.') {
            let axis = ["x", "y", "z"].iter().position(|a| *a == axis)?;
            return Special::of_axis(stem, axis);
        }
        Some(match name {
            "%laneid" => Special::LaneId,
            "%warpid" => Special::WarpId,
            "%nwarpid" => Special::WarpsPerBlock,
            "%lanemask_eq" => Special::LanesEq,
            "%lanemask_le" => Special::LanesLe,
            "%lanemask_lt" => Special::LanesLt,
            "%lanemask_ge" => Special::LanesGe,
            "%lanemask_gt" => Special::LanesGt,
            "%cluster_ctarank" => Special::ClusterRank,
            "%cluster_nctarank" => Special::ClusterSize,
            "%dynamic_smem_size" => Special::DynamicShared,
            "%total_smem_size" => Special::TotalShared,
            "%smid" => Special::SmId,
            "%nsmid" => Special::SmCount,
            "%gridid" => Special::GridId,
            "%is_explicit_cluster" => Special::IsCluster,
            "WARP_SZ" => Special::WarpSize,
            _ => return None,
        })
    }

    fn of_axis(stem: &str, axis: usize) -> Option<Special> {
        Some(match stem {
            "%tid" => Special::Tid(axis),
            "%ntid" => Special::Ntid(axis),
            "%ctaid" => Special::Ctaid(axis),
            "%nctaid" => Special::Nctaid(axis),
            "%cluster_ctaid" => Special::ClusterCtaid(axis),
            "%cluster_nctaid" => Special::ClusterNctaid(axis),
            "%clusterid" => Special::ClusterId(axis),
            "%nclusterid" => Special::Nclusterid(axis),
            _ => return None,
        })
    }
}
