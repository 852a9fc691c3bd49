//! Prices of minimal filtering beside direct sums, and the form of the least price.

use super::WinogradDesc;
use crate::isa::Isa;
use crate::window::Window;

/// Fewest input and output channels: below, transforms are most of the work.
const LEAST_CHANNELS: usize = 16;
/// Largest transformed weights, in bytes.
const MOST_WEIGHTS: usize = 64 << 20;

// Prices in multiply-adds, fitted to 22 shapes on a Zen 4 core: the share of the direct time comes out within 16 % of the measured one,
// but for images of 7x7 whose weights are in the cache, where F(4, 3) takes half of its price.

/// To read a weight from memory, all of it where nothing else takes as long.
const WEIGHT: f64 = 11.4;
/// The part of that which is not hidden behind products.
const NOT_HIDDEN: f64 = 0.4;
/// To transform an element, for tiles of 2 and of 4 pixels.
const ELEMENT: [f64; 2] = [10.0, 13.0];
/// Least gain that a byte of memory is worth.
const BYTE: f64 = 2.5;

/// A form, and what it takes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Priced {
    /// The convolution by minimal filtering.
    pub desc: WinogradDesc,
    /// Its predicted time as a share of that of direct sums.
    pub share: f64,
}

impl WinogradDesc {
    /// The form of the least price for a window over `c` input and `k` output channels; `None` where direct sums are cheaper.
    pub fn cheapest(isa: Isa, window: Window, [c, k]: [usize; 2]) -> Option<Priced> {
        if !WinogradDesc::takes(&window) || c.min(k) < LEAST_CHANNELS {
            return None;
        }
        let forms = [2, 4].map(|tile| WinogradDesc::new(isa, tile, window, c, k));
        let fits = |desc: &WinogradDesc| desc.n_weights() * size_of::<f32>() <= MOST_WEIGHTS;
        let priced = forms
            .into_iter()
            .filter(fits)
            .map(|desc| (price(&desc), desc));
        let (least, desc) = priced.min_by(|(a, _), (b, _)| a.total_cmp(b))?;
        let direct = sums(9 * window.n_pixels() * c * k, 9 * c * k);
        let share = least / direct;
        (share < 1.0).then_some(Priced { desc, share })
    }
}

fn price(desc: &WinogradDesc) -> f64 {
    let transforms = desc.n_transformed() as f64 * ELEMENT[usize::from(desc.tile == 4)];
    sums(desc.multiply_adds(), desc.n_weights()) + transforms
}

/// The price of products, of their weights' way from memory, and of the memory.
fn sums(multiply_adds: usize, n_weights: usize) -> f64 {
    let (products, reads) = (multiply_adds as f64, n_weights as f64 * WEIGHT);
    let hidden = products.min(reads) * NOT_HIDDEN;
    products.max(reads) + hidden + (n_weights * size_of::<f32>()) as f64 * BYTE
}
