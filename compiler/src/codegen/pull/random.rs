//! Pull-based code of random bits: every element computes the block that it is a word of.

use super::{Emit, Ix, Order, Puller};
use crate::error::Result;
use crate::ir::{Node, ScalarOp};
use gristmill_kernels::random::{MULTIPLIERS, WORDS, halves, round_keys};
use gristmill_runtime::DType;
use std::hash::Hash;

/// Arithmetic on words.
struct Words<'e, E: Emit> {
    e: &'e mut E,
}

impl<E: Emit> Words<'_, E> {
    /// The low and the high half of a `u64`.
    fn halves(&mut self, x: E::Value) -> Result<[E::Value; 2]> {
        let width = self.e.constant(DType::U64, 32);
        let high = self
            .e
            .primitive(ScalarOp::Shr, DType::U64, DType::U64, &[x, width])?;
        let low = self.e.convert(x, DType::U64, DType::U32)?;
        Ok([low, self.e.convert(high, DType::U64, DType::U32)?])
    }

    /// Both halves of the product of a word and a number.
    fn product(&mut self, x: E::Value, factor: u32) -> Result<[E::Value; 2]> {
        let x = self.e.convert(x, DType::U32, DType::U64)?;
        let factor = self.e.constant(DType::U64, factor.into());
        let product = self
            .e
            .primitive(ScalarOp::Mul, DType::U64, DType::U64, &[x, factor])?;
        self.halves(product)
    }

    /// `x ^ y ^ key`.
    fn mixed(&mut self, x: E::Value, y: E::Value, key: u32) -> Result<E::Value> {
        let key = self.e.constant(DType::U32, key.into());
        let xor = |e: &mut E, pair: [E::Value; 2]| {
            e.primitive(ScalarOp::BitXor, DType::U32, DType::U32, &pair)
        };
        let mixed = xor(self.e, [x, y])?;
        xor(self.e, [mixed, key])
    }

    /// One round of [`philox`](gristmill_kernels::random::philox).
    fn round(&mut self, [a, b, c, d]: [E::Value; 4], key: [u32; 2]) -> Result<[E::Value; 4]> {
        let [low, low_carry] = self.product(a, MULTIPLIERS[0])?;
        let [high, high_carry] = self.product(c, MULTIPLIERS[1])?;
        let first = self.mixed(high_carry, b, key[0])?;
        let third = self.mixed(low_carry, d, key[1])?;
        Ok([first, high, third, low])
    }
}

impl<V: Copy + Eq + Hash> Puller<'_, V> {
    /// An element of [`Op::RandomBits`](crate::ir::Op::RandomBits) of a seed and a first position.
    pub(super) fn random_bits<E: Emit<Value = V>>(
        &mut self,
        e: &mut E,
        node: &Node,
        [seed, from]: [u64; 2],
        at: &[Ix<V>],
    ) -> Result<V> {
        let first = vec![Ix::C(0); self.body.shape(node.inputs[0]).len()];
        let stream = self.value(e, node.inputs[0], &first)?;
        let position = e.linearise(at, self.body.shape(node.outputs[0]));
        let n_words = WORDS as u64;
        let position = e.add(position, Ix::C((from % n_words) as i64));
        let (block, word) = e.div_rem(position, WORDS);
        let block = e.val(block);
        let block = e.index_to_i64(block);
        let block = match from / n_words {
            0 => block,
            before => {
                let before = e.constant(DType::I64, before);
                e.primitive(ScalarOp::Add, DType::I64, DType::I64, &[block, before])?
            }
        };
        let mut words = Words { e };
        let mut counter = Vec::with_capacity(WORDS);
        for x in [block, stream] {
            let x = words.e.convert(x, DType::I64, DType::U64)?;
            counter.extend(words.halves(x)?);
        }
        let mut block = [counter[0], counter[1], counter[2], counter[3]];
        for key in round_keys(halves(seed)) {
            block = words.round(block, key)?;
        }
        Ok(entry(e, block, word))
    }
}

/// The word of a number.
fn entry<E: Emit>(e: &mut E, block: [E::Value; 4], number: Ix<E::Value>) -> E::Value {
    if let Ix::C(i) = number {
        return block[i as usize];
    }
    let mut found = block[0];
    for (i, &word) in block.iter().enumerate().skip(1) {
        let is_own = e.compare_const(Order::Equal, number, i as i64);
        found = e.choose(is_own, word, found);
    }
    found
}
