//! Priorities of tasks: longest ways to the end, under several notions of length.

use super::problem::{Payload, Problem};
use crate::cost::Nanos;

/// Least time from the start of each task to the end of all: no transfers, each task where it is fastest.
pub fn least_tails(p: &Problem) -> Vec<Nanos> {
    tails(p, |t| p.least_cost(t), |_, _| Nanos::ZERO)
}

/// Least time from the start of all to the start of each task: no transfers, each task where it is fastest.
pub fn least_heads(p: &Problem) -> Vec<Nanos> {
    let mut heads = vec![Nanos::ZERO; p.n_tasks()];
    for &t in &p.order {
        let before = p.predecessors(t as usize).map(|q| heads[q as usize] + p.least_cost(q as usize));
        heads[t as usize] = before.max().unwrap_or_default();
    }
    heads
}

/// Upward rank: the mean time of the longest way from the start of a task to the end, a mean transfer on every edge (Topcuoglu, Hariri and Wu
/// 2002, eq. 2). The mean over pairs of devices counts pairs of the same device as nothing.
pub fn upward(p: &Problem) -> Vec<Nanos> {
    let mean = mean_transfers(p);
    tails(p, |t| p.mean_cost(t), |x, _| mean[x])
}

/// The time of the longest way from the start of a task to the end when each task is on its device; links are idle.
pub fn placed_tails(p: &Problem, device: &[u32]) -> Vec<Nanos> {
    let own = |t: usize| p.cost(t, device[t] as usize);
    tails(p, own, |x, c| {
        let from = device[p.tensors[x].producer as usize];
        p.transfer(x, from as usize, device[c] as usize)
    })
}

/// Longest ways to the end by the time of a task and that of a tensor to one of its consumers.
fn tails(p: &Problem, own: impl Fn(usize) -> Nanos, way: impl Fn(usize, usize) -> Nanos) -> Vec<Nanos> {
    let mut tails = vec![Nanos::ZERO; p.n_tasks()];
    for &t in p.order.iter().rev() {
        let mut rest = Nanos::ZERO;
        for &x in p.outputs.row(t as usize) {
            for &c in p.consumers.row(x as usize) {
                rest = rest.max(way(x as usize, c as usize) + tails[c as usize]);
            }
        }
        tails[t as usize] = own(t as usize) + rest;
    }
    tails
}

/// Mean transfer time of each tensor over all ordered pairs of devices, a device with itself included.
pub fn mean_transfers(p: &Problem) -> Vec<Nanos> {
    let n = p.n_devices();
    let n_pairs = (n * n).max(1) as u128;
    let pairs = p.links.count_classes();
    let n_hosts = p.devices.iter().filter(|d| d.is_host).count();
    // Of a host copy one for each end that is an accelerator; a device and itself need none.
    let hops = (n - n_hosts) * 2 * n.saturating_sub(1);
    let mean = |tensor: &super::problem::Tensor| {
        let sum: u128 = match tensor.payload {
            Payload::Bytes(bytes) => {
                pairs.iter().map(|(link, n)| u128::from(link.transfer(bytes).0) * *n as u128).sum()
            }
            Payload::HostCopy(time) => u128::from(time.0) * hops as u128,
        };
        Nanos((sum / n_pairs) as u64)
    };
    p.tensors.iter().map(mean).collect()
}

/// Keys under which a device prefers tasks with long tails; ties go to the task that comes first in the topological order.
pub fn keys_of(p: &Problem, tails: &[Nanos]) -> Vec<u64> {
    let mut order: Vec<u32> = p.order.clone();
    order.sort_by_key(|&t| std::cmp::Reverse(tails[t as usize]));
    keys_of_order(&order)
}

/// Keys under which a device prefers tasks that come early in `order`.
pub fn keys_of_order(order: &[u32]) -> Vec<u64> {
    let mut keys = vec![0u64; order.len()];
    order.iter().enumerate().for_each(|(i, &t)| keys[t as usize] = (i as u64 + 1) << 20);
    keys
}
