//! Sums over shares in one fixed tree, whatever the number of devices is.

use super::copies::{accumulator, cast, origin};
use super::emit::Emitter;
use crate::error::{Error, Result};
use crate::ir::{Op, ReduceKind, ScalarOp, ValueId};

impl Emitter<'_> {
    /// The sums on all devices, or on the server of an old value: pairs of neighbours, then pairs of pairs. Each device
    /// joins its own shares.
    pub(super) fn sum_in_tree(&mut self, v: ValueId, parts: &[ValueId]) -> Result<Vec<ValueId>> {
        let origin = origin(self.old, v);
        let dtype = self.old.ty(v).dtype;
        let accumulator = accumulator(dtype);
        let n_devices = self.shares.n_devices();
        let mut of_devices = Vec::with_capacity(n_devices);
        for device in 0..n_devices {
            let place = self.places.devices[device].clone();
            let own = self.shares.devices.iter().zip(parts);
            let own: Vec<ValueId> = own
                .filter(|(d, _)| **d == device)
                .map(|(_, v)| *v)
                .collect();
            of_devices.push(self.at(&place, |new| {
                let wide = own
                    .iter()
                    .map(|&part| cast(new, part, accumulator, &origin));
                let wide = wide.collect::<Result<Vec<ValueId>>>()?;
                tree(wide, |pair| {
                    new.add1(Op::Map(ScalarOp::Add), &pair, &origin)
                })
            })?);
        }
        let sums = self.sums_of_devices(v, of_devices)?;
        let back = |(device, &sum): (usize, &ValueId)| {
            let place = self.place_of_whole(device, v);
            self.at(&place, |new| cast(new, sum, dtype, &origin))
        };
        sums.iter().enumerate().map(back).collect()
    }

    /// One sum of the devices' sums for each device, or one for all.
    fn sums_of_devices(&mut self, v: ValueId, sums: Vec<ValueId>) -> Result<Vec<ValueId>> {
        let origin = origin(self.old, v);
        let add = Op::Map(ScalarOp::Add);
        if self.has_servers() || !sums.len().is_power_of_two() {
            let place = self.place_of_whole(0, v);
            let sum = self.at(&place, |new| {
                tree(sums, |pair| new.add1(add.clone(), &pair, &origin))
            })?;
            return Ok(vec![sum]);
        }
        // Recursive doubling: each device has the sum of a block of devices, then that of two blocks.
        let mut sums = sums;
        let mut block = 1;
        while block < sums.len() {
            for low in (0..sums.len()).filter(|d| d & block == 0) {
                let pair = [sums[low], sums[low + block]];
                let kind = ReduceKind::Sum;
                let both = self.new.add(Op::AllReduce { kind }, &pair, &origin)?;
                (sums[low], sums[low + block]) = (both[0], both[1]);
            }
            block *= 2;
        }
        Ok(sums)
    }
}

/// Values joined in pairs of neighbours until there is one. The last one of an odd number waits.
fn tree(
    mut values: Vec<ValueId>,
    mut add: impl FnMut([ValueId; 2]) -> Result<ValueId>,
) -> Result<ValueId> {
    while values.len() > 1 {
        let join = |pair: &[ValueId]| match *pair {
            [a, b] => add([a, b]),
            [one, ..] => Ok(one),
            [] => Err(Error::internal("a pair of nothing")),
        };
        values = values.chunks(2).map(join).collect::<Result<_>>()?;
    }
    let first = values.first().copied();
    first.ok_or_else(|| Error::internal("a sum of no shares"))
}
