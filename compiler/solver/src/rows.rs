//! Rows of indices in one allocation (compressed sparse rows).

/// For each of `n` rows a slice of indices.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Rows {
    offsets: Vec<u32>,
    items: Vec<u32>,
}

impl Rows {
    /// Sorts `(row, item)` pairs into `n` rows; within a row, the order of the pairs stays.
    pub fn from_pairs(n: usize, pairs: impl Iterator<Item = (u32, u32)> + Clone) -> Rows {
        let mut offsets = vec![0u32; n + 1];
        pairs
            .clone()
            .for_each(|(row, _)| offsets[row as usize + 1] += 1);
        (0..n).for_each(|i| offsets[i + 1] += offsets[i]);
        let mut next = offsets.clone();
        let mut items = vec![0u32; offsets[n] as usize];
        for (row, item) in pairs {
            items[next[row as usize] as usize] = item;
            next[row as usize] += 1;
        }
        Rows { offsets, items }
    }

    /// One row.
    pub fn row(&self, i: usize) -> &[u32] {
        &self.items[self.offsets[i] as usize..self.offsets[i + 1] as usize]
    }

    /// Number of items of all rows.
    pub fn n_items(&self) -> usize {
        self.items.len()
    }
}
