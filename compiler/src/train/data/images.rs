//! Operations on images, random ones among them.

use super::{Batch, Dataset, Epoch, Random};
use crate::error::{Error, Result};
use gristmill_runtime::{DType, Tensor};

/// An operation on an image of `f32[channels, height, width]`. Random ones draw their numbers anew for each example and epoch.
///
/// The formulas are those of TensorFlow's `tf.image`; its images have channels last and ours first.
#[derive(Clone, Debug, PartialEq)]
pub enum ImageOp {
    /// Cuts a window of a size at a random place, after `padding` zeros on each side (`random_crop`).
    RandomCrop {
        /// Rows of the window.
        height: usize,
        /// Columns of the window.
        width: usize,
        /// Zeros on each side.
        padding: usize,
    },
    /// Cuts a window of a size from the middle; of an odd rest, one row or column more is below or on the right.
    CenterCrop {
        /// Rows of the window.
        height: usize,
        /// Columns of the window.
        width: usize,
    },
    /// Exchanges left and right with a probability of one half (`random_flip_left_right`).
    RandomFlip,
    /// Adds a number from `-delta` to below `delta` to all elements (`random_brightness`).
    RandomBrightness {
        /// Largest change.
        delta: f32,
    },
    /// Multiplies the distance of each element from the mean of its channel by a number from `low` to below `high` (`random_contrast`).
    RandomContrast {
        /// Smallest factor.
        low: f32,
        /// Largest factor.
        high: f32,
    },
    /// Subtracts the mean of the image and divides by its deviation, at least `1 / sqrt(elements)` (`per_image_standardization`).
    Standardize,
    /// Multiplies all elements.
    Scale(f32),
    /// Subtracts a mean from each channel and divides by a deviation; a single pair is for all channels.
    Normalize {
        /// Means by channel.
        mean: Vec<f32>,
        /// Deviations by channel.
        deviation: Vec<f32>,
    },
}

/// The examples of a data set with images as operations change them: [`Dataset::images`].
///
/// Images are `[n, channels, height, width]` or `[n, height, width]` of any number type; they become `f32[n, channels, height, width]`.
#[derive(Clone, Debug)]
pub struct Images<D> {
    data: D,
    name: String,
    ops: Vec<ImageOp>,
}

impl<D> Images<D> {
    pub(super) fn new(data: D, name: &str, ops: impl IntoIterator<Item = ImageOp>) -> Images<D> {
        Images {
            data,
            name: name.to_owned(),
            ops: ops.into_iter().collect(),
        }
    }
}

impl<D: Dataset> Dataset for Images<D> {
    fn len(&self) -> usize {
        self.data.len()
    }

    fn rows(&self, places: &[usize], epoch: Epoch) -> Result<Batch> {
        let mut batch = self.data.rows(places, epoch)?;
        let random = Random::new(epoch, self.n_random(), 0);
        let mut images = batch.iter_mut().filter(|(name, _)| *name == self.name);
        let Some((_, images)) = images.next() else {
            let known = batch.iter().map(|(name, _)| name.as_str());
            let message = gristmill_runtime::nearest::unknown("tensor", &self.name, known);
            return Err(Error::invalid(message).context("images"));
        };
        let changed = self.changed(images, places, &random);
        *images = changed.map_err(|e| e.context(format!("images {:?}", self.name)))?;
        Ok(batch)
    }

    fn n_random(&self) -> u32 {
        self.data.n_random() + 1
    }
}

impl<D> Images<D> {
    fn changed(&self, images: &Tensor, places: &[usize], random: &Random) -> Result<Tensor> {
        let (channels, height, width) = match *images.shape() {
            [_, height, width] => (1, height, width),
            [_, channels, height, width] => (channels, height, width),
            ref shape => {
                let message = format!(
                    "{shape:?}: expected [n, channels, height, width] or [n, height, width]"
                );
                return Err(Error::invalid(message));
            }
        };
        let converted = match images.dtype() {
            DType::U8 | DType::F32 => None,
            _ => Some(Tensor::from_f64s(
                DType::F32,
                images.shape(),
                &images.to_f64s(),
            )?),
        };
        let images = converted.as_ref().unwrap_or(images);
        let n = channels * height * width;
        let mut image = Image::default();
        let mut all: Vec<f32> = Vec::new();
        let mut shape = [places.len(), channels, height, width];
        for (i, &place) in places.iter().enumerate() {
            image.shape = [channels, height, width];
            image.read(images, i * n..(i + 1) * n);
            let mut random = random.at(place);
            for op in &self.ops {
                op.apply(&mut image, &mut random)?;
            }
            shape[1..].copy_from_slice(&image.shape);
            if all.capacity() == 0 {
                all.reserve_exact(places.len() * image.pixels.len());
            }
            all.extend_from_slice(&image.pixels);
        }
        Ok(Tensor::from_slice(&all, &shape)?)
    }
}

/// An image in work.
#[derive(Default)]
struct Image {
    /// Channels, height, width.
    shape: [usize; 3],
    pixels: Vec<f32>,
    /// Memory of the image before.
    spare: Vec<f32>,
}

impl Image {
    /// Reads elements of a tensor of `u8` or `f32`.
    fn read(&mut self, from: &Tensor, range: std::ops::Range<usize>) {
        self.pixels.clear();
        match from.dtype() {
            DType::U8 => {
                let bytes = &from.as_slice::<u8>()[range];
                self.pixels.extend(bytes.iter().map(|&x| f32::from(x)));
            }
            _ => self
                .pixels
                .extend_from_slice(&from.as_slice::<f32>()[range]),
        }
    }

    /// Cuts a window that begins at a row and a column, which may lie before the first ones: there are zeros outside.
    fn cut(&mut self, top: isize, left: isize, size: [usize; 2]) {
        let [channels, height, width] = self.shape;
        std::mem::swap(&mut self.pixels, &mut self.spare);
        self.pixels.clear();
        self.pixels.resize(channels * size[0] * size[1], 0.0);
        let first = left.max(0) as usize;
        let last = (left + size[1] as isize).clamp(0, width as isize) as usize;
        for channel in 0..channels {
            for row in 0..size[0] {
                let from = top + row as isize;
                if from < 0 || from >= height as isize || first >= last {
                    continue;
                }
                let from = (channel * height + from as usize) * width;
                let to = (channel * size[0] + row) * size[1] + (first as isize - left) as usize;
                let source = &self.spare[from + first..from + last];
                self.pixels[to..][..last - first].copy_from_slice(source);
            }
        }
        self.shape = [channels, size[0], size[1]];
    }

    fn channels(&mut self) -> impl Iterator<Item = &mut [f32]> {
        let n = self.shape[1] * self.shape[2];
        self.pixels.chunks_exact_mut(n.max(1))
    }
}

/// The sum in `f64`, in eight interleaved parts, so that it is fast and always the same.
fn sum(xs: &[f32], f: impl Fn(f64) -> f64) -> f64 {
    let mut parts = [0.0; 8];
    let chunks = xs.chunks_exact(8);
    let rest: f64 = chunks.remainder().iter().map(|&x| f(f64::from(x))).sum();
    for chunk in chunks {
        for (part, &x) in parts.iter_mut().zip(chunk) {
            *part += f(f64::from(x));
        }
    }
    parts.iter().sum::<f64>() + rest
}

fn mean(xs: &[f32]) -> f64 {
    sum(xs, |x| x) / xs.len().max(1) as f64
}

impl ImageOp {
    fn apply(&self, image: &mut Image, random: &mut Random) -> Result<()> {
        match *self {
            ImageOp::RandomCrop {
                height,
                width,
                padding,
            } => image.random_crop([height, width], padding, random)?,
            ImageOp::CenterCrop { height, width } => {
                let rows = room(image.shape[1], height, "rows")?;
                let columns = room(image.shape[2], width, "columns")?;
                image.cut(rows as isize / 2, columns as isize / 2, [height, width]);
            }
            ImageOp::RandomFlip => {
                if random.chance(0.5) {
                    let width = image.shape[2].max(1);
                    let rows = image.pixels.chunks_exact_mut(width);
                    rows.for_each(<[f32]>::reverse);
                }
            }
            ImageOp::RandomBrightness { delta } => {
                let change = random.between(-f64::from(delta), f64::from(delta)) as f32;
                image.pixels.iter_mut().for_each(|x| *x += change);
            }
            ImageOp::RandomContrast { low, high } => {
                image.contrast(random.between(f64::from(low), f64::from(high)) as f32);
            }
            ImageOp::Standardize => standardize(&mut image.pixels),
            ImageOp::Scale(factor) => image.pixels.iter_mut().for_each(|x| *x *= factor),
            ImageOp::Normalize {
                ref mean,
                ref deviation,
            } => normalize(image, mean, deviation)?,
        }
        Ok(())
    }
}

impl Image {
    fn random_crop(&mut self, size: [usize; 2], padding: usize, random: &mut Random) -> Result<()> {
        let [_, height, width] = self.shape;
        let padded = |n: usize| n.saturating_add(padding.saturating_mul(2));
        let rows = room(padded(height), size[0], "rows")?;
        let columns = room(padded(width), size[1], "columns")?;
        let top = random.below(rows + 1) as isize - padding as isize;
        let left = random.below(columns + 1) as isize - padding as isize;
        self.cut(top, left, size);
        Ok(())
    }

    fn contrast(&mut self, factor: f32) {
        for channel in self.channels() {
            let mean = mean(channel) as f32;
            let pixels = channel.iter_mut();
            pixels.for_each(|x| *x = (*x - mean) * factor + mean);
        }
    }
}

/// The rows or columns that a window leaves. Errors when it is larger than the image, or empty.
fn room(has: usize, wanted: usize, what: &str) -> Result<usize> {
    let room = has.checked_sub(wanted).filter(|_| wanted > 0);
    room.ok_or_else(|| Error::invalid(format!("a window of {wanted} {what} of an image of {has}")))
}

fn standardize(pixels: &mut [f32]) {
    let n = pixels.len().max(1) as f64;
    let mean = mean(pixels);
    let variance = sum(pixels, |x| (x - mean) * (x - mean)) / n;
    let factor = 1.0 / variance.sqrt().max(1.0 / n.sqrt());
    for x in pixels {
        *x = ((f64::from(*x) - mean) * factor) as f32;
    }
}

fn normalize(image: &mut Image, mean: &[f32], deviation: &[f32]) -> Result<()> {
    let channels = image.shape[0];
    for (what, values) in [("means", mean), ("deviations", deviation)] {
        if ![1, channels].contains(&values.len()) {
            let n = values.len();
            let message =
                format!("{n} {what} for {channels} channels: expected 1, or one for each");
            return Err(Error::invalid(message));
        }
    }
    for (i, channel) in image.channels().enumerate() {
        let of = |values: &[f32]| values[if values.len() == 1 { 0 } else { i }];
        let (mean, factor) = (of(mean), 1.0 / of(deviation));
        channel.iter_mut().for_each(|x| *x = (*x - mean) * factor);
    }
    Ok(())
}
