//! Priorities of tasks: longest paths to the end, under several notions of length.

use crate::Nanos;
use crate::problem::{Payload, Problem};
use std::ops::Add;

/// Least time from the start of each task to the end of all: no transfers, each task where it is
/// fastest.
pub fn least_tails(p: &Problem) -> Vec<Nanos> {
    tails(p, |t| p.least_cost(t), |_, _| Nanos::ZERO)
}

/// Least time from the start of all to the start of each task: no transfers, each task where it is
/// fastest.
pub fn least_heads(p: &Problem) -> Vec<Nanos> {
    let mut heads = vec![Nanos::ZERO; p.n_tasks()];
    for &t in &p.order {
        let before = p
            .predecessors(t as usize)
            .map(|q| heads[q as usize] + p.least_cost(q as usize));
        heads[t as usize] = before.max().unwrap_or_default();
    }
    heads
}

/// Upward rank: the mean time of the longest path from the start of a task to the end, a mean
/// transfer on every edge (Topcuoglu, Hariri and Wu 2002, eq. 2). The mean over pairs of devices
/// counts pairs of the same device as nothing. In the fractions of [`Means`].
pub fn upward(p: &Problem) -> Vec<u128> {
    let means = Means::new(p);
    let transfer = means.transfers();
    tails(p, |t| means.cost(t), |x, _| transfer[x])
}

/// The time of the longest path from the start of a task to the end when each task is on its
/// device; links are idle.
pub fn placed_tails(p: &Problem, device: &[u32]) -> Vec<Nanos> {
    let own = |t: usize| p.cost(t, device[t] as usize);
    tails(p, own, |x, c| {
        let from = device[p.tensors[x].producer as usize];
        p.transfer(x, from as usize, device[c] as usize)
    })
}

/// Longest paths to the end by the time of a task and that of a tensor to one of its consumers.
fn tails<T>(p: &Problem, own: impl Fn(usize) -> T, way: impl Fn(usize, usize) -> T) -> Vec<T>
where
    T: Copy + Ord + Default + Add<Output = T>,
{
    let mut tails = vec![T::default(); p.n_tasks()];
    for &t in p.order.iter().rev() {
        let mut rest = T::default();
        for &x in p.outputs.row(t as usize) {
            for &c in p.consumers.row(x as usize) {
                rest = rest.max(way(x as usize, c as usize) + tails[c as usize]);
            }
        }
        tails[t as usize] = own(t as usize) + rest;
    }
    tails
}

/// Mean times over devices, as whole numbers of fractions of a nanosecond that are so small that
/// nothing is rounded. So the order of sums of means is the same whatever the unit of time: rounded
/// to nanoseconds, ties come and go with it.
pub struct Means<'p> {
    p: &'p Problem,
    /// Fractions in a nanosecond.
    pub per_ns: u128,
}

/// Most fractions of a nanosecond; machines on which that is not enough get rounded means. Sums
/// over a million tasks fit into 128 bits.
const MOST_FRACTIONS: u128 = 1 << 24;

impl<'p> Means<'p> {
    /// A nanosecond is divided by the number of pairs of devices and each number of devices that a
    /// task can run on.
    pub fn new(p: &'p Problem) -> Means<'p> {
        let mut numbers: Vec<usize> = (0..p.n_tasks()).map(|t| p.feasible(t).count()).collect();
        numbers.push(p.n_devices() * p.n_devices());
        numbers.sort_unstable();
        numbers.dedup();
        let multiple = |all: u128, n: &usize| match (*n).max(1) as u128 {
            n if all <= MOST_FRACTIONS => all / greatest_common_divisor(all, n) * n,
            _ => all,
        };
        Means {
            p,
            per_ns: numbers.iter().fold(1, multiple).min(MOST_FRACTIONS),
        }
    }

    /// Of a task, over the devices that it can run on.
    pub fn cost(&self, task: usize) -> u128 {
        let (mut sum, mut n) = (0u128, 0u128);
        let finite = self.p.costs(task).iter().filter(|c| c.is_finite());
        finite.for_each(|c| (sum, n) = (sum + u128::from(c.0), n + 1));
        sum * self.per_ns / n.max(1)
    }

    /// Of the transfer of each tensor, over all ordered pairs of devices, a device with itself
    /// included.
    pub fn transfers(&self) -> Vec<u128> {
        let p = self.p;
        let n = p.n_devices();
        let n_pairs = (n * n).max(1) as u128;
        let pairs = p.links.count_classes();
        let n_hosts = p.devices.iter().filter(|d| d.is_host).count();
        // Of a host copy one for each end that is an accelerator; a device and itself need none.
        let hops = (n - n_hosts) * 2 * n.saturating_sub(1);
        let mean = |tensor: &crate::problem::Tensor| {
            let sum: u128 = match tensor.payload {
                Payload::Bytes(bytes) => pairs
                    .iter()
                    .map(|(link, n)| u128::from(link.transfer(bytes).0) * *n as u128)
                    .sum(),
                Payload::HostCopy(time) => u128::from(time.0) * hops as u128,
            };
            sum * self.per_ns / n_pairs
        };
        p.tensors.iter().map(mean).collect()
    }
}

fn greatest_common_divisor(a: u128, b: u128) -> u128 {
    if b == 0 {
        a
    } else {
        greatest_common_divisor(b, a % b)
    }
}

/// Keys under which a device prefers tasks with long tails; ties go to the task that comes first in
/// the topological order.
pub fn keys_of(p: &Problem, tails: &[Nanos]) -> Vec<u64> {
    let mut order: Vec<u32> = p.order.clone();
    order.sort_by_key(|&t| std::cmp::Reverse(tails[t as usize]));
    keys_of_order(&order)
}

/// Keys under which a device prefers tasks that come early in `order`.
pub fn keys_of_order(order: &[u32]) -> Vec<u64> {
    let mut keys = vec![0u64; order.len()];
    order
        .iter()
        .enumerate()
        .for_each(|(i, &t)| keys[t as usize] = (i as u64 + 1) << 20);
    keys
}
