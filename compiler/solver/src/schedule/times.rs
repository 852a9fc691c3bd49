//! Times of transfers, computed once for each sort of link: simulation and list scheduling ask for
//! them over and over.

use crate::problem::Problem;
use crate::{LinkProfile, Nanos};

/// Sorts of links above which times are computed when asked for.
const MOST_SORTS: usize = 16;

/// Time of each tensor over each sort of link.
#[derive(Clone, Debug)]
pub(crate) struct TransferTimes {
    n_devices: usize,
    /// Sort of each ordered pair of devices; all devices and themselves have the first.
    sort: Vec<u32>,
    n_sorts: usize,
    /// By tensor and sort; empty when there are too many sorts.
    times: Vec<Nanos>,
}

impl TransferTimes {
    pub(crate) fn new(p: &Problem) -> TransferTimes {
        let n = p.n_devices();
        // A link and the number of its ends that are accelerators decide all times. An example pair
        // for each sort.
        let mut sorts: Vec<Option<(LinkProfile, u32)>> = vec![None];
        let mut examples: Vec<(usize, usize)> = vec![(0, 0)];
        let mut sort = vec![0u32; n * n];
        for (from, to) in (0..n)
            .flat_map(|a| (0..n).map(move |b| (a, b)))
            .filter(|(a, b)| a != b)
        {
            let ends = [from, to]
                .iter()
                .filter(|&&d| !p.devices[d].is_host)
                .count() as u32;
            let what = Some((p.links.get(from, to), ends));
            let known = sorts.iter().position(|s| *s == what);
            sort[from * n + to] = known.unwrap_or(sorts.len()) as u32;
            if known.is_none() {
                sorts.push(what);
                examples.push((from, to));
            }
        }
        let n_sorts = sorts.len();
        let row = |x: usize| examples.iter().map(move |e| p.transfer(x, e.0, e.1));
        let times = if n_sorts > MOST_SORTS {
            Vec::new()
        } else {
            (0..p.tensors.len()).flat_map(row).collect()
        };
        TransferTimes {
            n_devices: n,
            sort,
            n_sorts,
            times,
        }
    }

    /// [`Problem::transfer`].
    pub(crate) fn get(&self, p: &Problem, tensor: usize, from: usize, to: usize) -> Nanos {
        match self.times.is_empty() {
            false => {
                self.times[tensor * self.n_sorts + self.sort[from * self.n_devices + to] as usize]
            }
            true => p.transfer(tensor, from, to),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::Rng;
    use crate::samples::{Shape, random};

    #[test]
    fn times_are_those_of_the_problem() {
        let mut rng = Rng(31);
        for n_devices in [1, 2, 3, 6] {
            let p = random(
                &mut rng,
                Shape {
                    constrained: true,
                    ..Shape::small(9, n_devices)
                },
            );
            let times = TransferTimes::new(&p);
            for (x, ab) in
                (0..p.tensors.len()).flat_map(|x| (0..n_devices * n_devices).map(move |ab| (x, ab)))
            {
                let (a, b) = (ab / n_devices, ab % n_devices);
                assert_eq!(times.get(&p, x, a, b), p.transfer(x, a, b));
            }
        }
    }
}
