//! Kernels whose items are blocks of a size that the number of threads decides: it is chosen when a program is loaded, from
//! the descriptor alone.

use crate::Descriptor;
use crate::attention::AttentionDesc;
use crate::conv::ConvDesc;
use crate::gemm::GemmDesc;
use crate::winograd::WinogradDesc;

/// A kernel that works by blocks. Any blocks give the same bits; their size decides how well threads share the work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u32)]
pub enum Blocked {
    /// [`GemmDesc`].
    Gemm = 1,
    /// [`ConvDesc`].
    Conv = 2,
    /// [`WinogradDesc`].
    Winograd = 3,
    /// [`AttentionDesc`].
    Attention = 4,
}

/// The work of a blocked kernel, divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Division {
    /// Work items: blocks.
    pub items: usize,
    /// Bytes that each concurrent call needs at `ptrs[WORKSPACE]`.
    pub workspace_bytes: usize,
}

/// A descriptor of a blocked kernel.
trait Blocks: Descriptor {
    /// True when sizes are so small that no product of them overflows, and what divides is not 0.
    fn is_sound(&self) -> bool;

    /// Chooses the blocks.
    fn divide(&mut self, n_threads: usize) -> Division;
}

impl Blocked {
    /// Every kind.
    pub const ALL: [Blocked; 4] = [
        Blocked::Gemm,
        Blocked::Conv,
        Blocked::Winograd,
        Blocked::Attention,
    ];

    /// The kind of an exported kernel, if it is one of these.
    pub fn of_symbol(symbol: &str) -> Option<Blocked> {
        match symbol {
            "gm_gemm_f32" => Some(Blocked::Gemm),
            "gm_conv_f32" => Some(Blocked::Conv),
            "gm_winograd2_f32" | "gm_winograd4_f32" => Some(Blocked::Winograd),
            "gm_attention_f32" => Some(Blocked::Attention),
            _ => None,
        }
    }

    /// The kind with this number.
    pub fn from_u32(value: u32) -> Option<Blocked> {
        Blocked::ALL.into_iter().find(|&b| b as u32 == value)
    }

    /// Size of the descriptor in bytes.
    pub fn descriptor_bytes(self) -> usize {
        match self {
            Blocked::Gemm => size_of::<GemmDesc>(),
            Blocked::Conv => size_of::<ConvDesc>(),
            Blocked::Winograd => size_of::<WinogradDesc>(),
            Blocked::Attention => size_of::<AttentionDesc>(),
        }
    }

    /// Writes blocks for `n_threads` threads (at least 1) into a descriptor. `None`, and nothing written, for bytes that are not
    /// those of a descriptor of this kind.
    pub fn divide(self, descriptor: &mut [u8], n_threads: usize) -> Option<Division> {
        match self {
            Blocked::Gemm => divide::<GemmDesc>(descriptor, n_threads),
            Blocked::Conv => divide::<ConvDesc>(descriptor, n_threads),
            Blocked::Winograd => divide::<WinogradDesc>(descriptor, n_threads),
            Blocked::Attention => divide::<AttentionDesc>(descriptor, n_threads),
        }
    }
}

fn divide<D: Blocks>(bytes: &mut [u8], n_threads: usize) -> Option<Division> {
    if bytes.len() != size_of::<D>() {
        return None;
    }
    // SAFETY: every pattern of bytes is a value of plain data, and there are as many as it has.
    let mut desc = unsafe { bytes.as_ptr().cast::<D>().read_unaligned() };
    if !desc.is_sound() {
        return None;
    }
    let division = desc.divide(n_threads.clamp(1, MOST_THREADS));
    bytes.copy_from_slice(desc.bytes());
    Some(division)
}

/// Threads beyond these make no smaller blocks.
const MOST_THREADS: usize = 1 << 12;

/// Largest product of the sizes of a descriptor: far below where the arithmetic of blocks overflows.
const MOST: usize = 1 << 46;

/// True when the product of all sizes, those of 0 taken for 1, is at most [`MOST`].
fn fit(sizes: &[usize]) -> bool {
    let product = sizes
        .iter()
        .try_fold(1usize, |all, &n| all.checked_mul(n.max(1)));
    product.is_some_and(|n| n <= MOST)
}

impl Blocks for GemmDesc {
    fn is_sound(&self) -> bool {
        let [a, b, c, d] = self.batch.map(|dim| dim.extent);
        fit(&[a, b, c, d, self.m, self.n, self.k])
    }

    fn divide(&mut self, n_threads: usize) -> Division {
        self.plan(n_threads);
        Division {
            items: self.n_items(),
            workspace_bytes: 0,
        }
    }
}

impl Blocks for ConvDesc {
    fn is_sound(&self) -> bool {
        let w = &self.window;
        let channels = [self.groups, self.in_channels, self.out_channels];
        let taps = [w.kernel_d, w.kernel_h, w.kernel_w];
        let pixels = [w.batch, w.out_d, w.out_h, w.out_w];
        let reach = [w.stride_h, w.stride_w, w.dilation_h, w.dilation_w];
        w.valid()
            && fit(&[&channels[..], &taps, &pixels].concat())
            && fit(&[&reach[..], &taps, &pixels[2..], &channels[1..2]].concat())
            && fit(&[w.in_d, w.in_h, w.x_h_stride])
            && fit(&[w.in_w, w.x_w_stride])
    }

    fn divide(&mut self, n_threads: usize) -> Division {
        self.plan(n_threads);
        Division {
            items: self.n_items(),
            workspace_bytes: self.workspace_bytes(),
        }
    }
}

impl Blocks for WinogradDesc {
    fn is_sound(&self) -> bool {
        let w = &self.window;
        let tile = self.tile.saturating_add(2);
        let sizes = [w.batch, w.out_h, w.out_w, w.dilation_h, w.dilation_w];
        let channels = [self.in_channels, self.out_channels];
        self.is_valid() && fit(&[&sizes[..], &channels, &[tile, tile]].concat())
    }

    fn divide(&mut self, n_threads: usize) -> Division {
        self.plan(n_threads);
        Division {
            items: self.n_items(),
            workspace_bytes: self.workspace_bytes(),
        }
    }
}

impl Blocks for AttentionDesc {
    fn is_sound(&self) -> bool {
        fit(&[
            self.batch,
            self.heads,
            self.n_queries,
            self.n_keys,
            self.depth,
            self.value_depth,
        ])
    }

    fn divide(&mut self, n_threads: usize) -> Division {
        self.plan(n_threads);
        Division {
            items: self.n_items(),
            workspace_bytes: self.workspace_bytes(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Isa;
    use crate::testing::Rng;
    use crate::window::Window;

    fn samples() -> Vec<(Blocked, Vec<u8>)> {
        let isa = Isa::Portable;
        let gemm = GemmDesc::new(isa, 384, 768, 768);
        let window = Window::new(1, 58, 58, 64, 3, 3);
        let conv = ConvDesc::new(isa, window, 1, 64, 128);
        let deep = Window::new(1, 16, 16, 64, 3, 3).with_depth([2, 2], [1, 1], [0; 2]);
        let deep_conv = ConvDesc::new(isa, deep, 1, 64, 128);
        let winograd = WinogradDesc::new(isa, 4, window, 64, 128);
        let attention = AttentionDesc::new(isa, 1, 2, 512, 512, 64);
        vec![
            (Blocked::Gemm, gemm.bytes().to_vec()),
            (Blocked::Conv, conv.bytes().to_vec()),
            (Blocked::Conv, deep_conv.bytes().to_vec()),
            (Blocked::Winograd, winograd.bytes().to_vec()),
            (Blocked::Attention, attention.bytes().to_vec()),
        ]
    }

    #[test]
    fn blocks_depend_on_the_last_number_of_threads_only() {
        for (kind, bytes) in samples() {
            assert_eq!(bytes.len(), kind.descriptor_bytes());
            let mut one = bytes.clone();
            let alone = kind.divide(&mut one, 1).unwrap();
            let mut eight = bytes.clone();
            let shared = kind.divide(&mut eight, 8).unwrap();
            assert!(shared.items >= 8 && shared.items > alone.items, "{kind:?}");
            for n_threads in [3, 64, 5000, 1] {
                kind.divide(&mut eight, n_threads).unwrap();
            }
            assert_eq!(eight, one, "{kind:?}");
            assert_eq!(kind.divide(&mut one[1..], 1), None);
        }
    }

    #[test]
    fn no_bytes_panic() {
        let mut rng = Rng(7);
        for (kind, bytes) in samples() {
            let mut n_sound = 0;
            for i in 0..8 * bytes.len() + 20_000 {
                let mut damaged = bytes.clone();
                match i.checked_sub(8 * bytes.len()) {
                    None => damaged[i / 8] ^= 1 << (i % 8),
                    Some(_) => {
                        for _ in 0..1 + rng.below(4) {
                            let word = 8 * rng.below(bytes.len() / 8);
                            let shift = rng.below(64);
                            let value = (rng.next() >> shift).to_le_bytes();
                            damaged[word..word + 8].copy_from_slice(&value);
                        }
                    }
                }
                n_sound += usize::from(kind.divide(&mut damaged, 1 + rng.below(70)).is_some());
            }
            assert!(n_sound > 1000, "{kind:?}: {n_sound}");
        }
    }
}
