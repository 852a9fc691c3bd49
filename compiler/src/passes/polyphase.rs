//! Polyphase decomposition of transposed convolutions (Vaidyanathan, "Multirate Systems and Filter Banks", section 4.3):
//! convolutions of stride 1, one for each residue of the output position modulo the strides, whose results interleave.
//!
//! Along an axis of stride `s`, with `pad` elements cut off before the first, position `s i + q` of the result is
//! `sum_m w[first + s m] x[i + shift - m]` with `q + pad = s shift + first`: a convolution by every `s`-th weight from
//! `first` on, in reverse. For weights of 3, a stride of 2 and a pad of 1, even positions are `w[1] x[i]` and odd ones
//! `w[2] x[i] + w[0] x[i + 1]`. Residues of equal windows may share one convolution with more output channels: all of
//! them do when the windows tile the output.

use super::Rebuild;
use super::rebuild::each_node;
use crate::error::Result;
use crate::ir::{Dim, Graph, Layout, Node, Op, PadMode, Type, ValueId, Window};
use gristmill_runtime::{DType, Tensor};

/// Upper bound of the phases of a transposed convolution that is replaced.
const MAX_PHASES: usize = 64;
/// Upper bound of its strides.
const MAX_STRIDE: i64 = 1024;

/// Replaces undilated transposed convolutions of one to three spatial axes by convolutions, channels last,
/// whose kernels are far faster. Regions are gone through too.
pub fn polyphase(g: &Graph) -> Result<Graph> {
    each_node(
        g,
        &polyphase,
        &mut |r, g, id, node| match Decomposition::of(g, node) {
            Some(d) => {
                let y = d.emit(r, node)?;
                r.set(node.outputs[0], y);
                Ok(())
            }
            None => r.copy(id, node),
        },
    )
}

/// True for a node that [`polyphase`] replaces.
pub fn has_phases(g: &Graph, node: &Node) -> bool {
    Decomposition::of(g, node).is_some()
}

/// Neighbouring residues of one window.
#[derive(Clone, Copy)]
struct Phase {
    n_residues: usize,
    /// First position among the weights.
    first: usize,
    n_taps: usize,
    /// Padding of the input before its first element; elements are left out where it is negative.
    low: i64,
    high: i64,
}

/// One spatial axis.
struct Axis {
    stride: usize,
    /// Extent of the weights.
    size: usize,
    phases: Vec<Phase>,
    /// Extent of each phase.
    extent: Dim,
}

/// Numbers of a window along one axis.
struct Extents {
    stride: i64,
    size: i64,
    pad_low: i64,
    /// Elements of the result beyond `stride` for each of the input.
    surplus: i64,
}

impl Extents {
    /// `None` when a number is no extent of a real tensor.
    fn of(window: &Window, output_pads: &[usize], size: &Dim, i: usize) -> Option<Extents> {
        let number = |v: usize| u32::try_from(v).ok().map(i64::from);
        let (stride, size) = (number(window.strides[i])?, number(size.as_usize()?)?);
        let (pad_low, pad_high) = (number(window.pads_low[i])?, number(window.pads_high[i])?);
        let surplus = size + number(output_pads[i])? - pad_low - pad_high - stride;
        let is_plain = (1..=MAX_STRIDE).contains(&stride) && size > 0 && window.dilations[i] == 1;
        is_plain.then_some(Extents {
            stride,
            size,
            pad_low,
            surplus,
        })
    }

    /// Positions of a phase beyond those of the input.
    fn phase_surplus(&self) -> i64 {
        -(-self.surplus).div_euclid(self.stride)
    }

    fn phase(&self, residue: i64) -> Phase {
        let position = residue + self.pad_low;
        let (shift, first) = (position / self.stride, position % self.stride);
        let n_taps = (self.size - first + self.stride - 1)
            .div_euclid(self.stride)
            .max(0);
        Phase {
            n_residues: 1,
            first: first as usize,
            n_taps: n_taps as usize,
            low: n_taps - 1 - shift,
            high: self.phase_surplus() + shift,
        }
    }

    /// The phases of all residues, joined where windows are equal.
    fn phases(&self) -> Vec<Phase> {
        let mut phases: Vec<Phase> = Vec::new();
        for phase in (0..self.stride).map(|q| self.phase(q)) {
            match phases.last_mut() {
                Some(last) if (last.n_taps, last.low) == (phase.n_taps, phase.low) => {
                    last.n_residues += 1;
                }
                _ => phases.push(phase),
            }
        }
        phases
    }

    fn axis(&self, extent: &Dim) -> Axis {
        Axis {
            stride: self.stride as usize,
            size: self.size as usize,
            phases: self.phases(),
            extent: extent.clone() + Dim::constant(self.phase_surplus()),
        }
    }
}

impl Axis {
    /// Each residue by itself.
    fn split(&mut self) {
        let single = |p: &Phase| {
            let p = *p;
            (0..p.n_residues).map(move |i| Phase {
                n_residues: 1,
                first: p.first + i,
                ..p
            })
        };
        self.phases = self.phases.iter().flat_map(single).collect();
    }

    /// True when elements that phases leave out are there, and a phase has elements.
    fn fits(&self, extent: &Dim) -> bool {
        let left_out = |p: &Phase| (-p.low).max(0) + (-p.high).max(0);
        let with_taps = self.phases.iter().filter(|p| p.n_taps > 0);
        let most = with_taps.map(left_out).max().unwrap_or(0);
        let is_there = extent.as_const().map_or(most == 0, |n| n > most);
        is_there && self.extent.as_const().is_none_or(|n| n > 0)
    }

    /// Extent of the weights in whole strides.
    fn n_strides(&self) -> usize {
        self.size.div_ceil(self.stride)
    }
}

/// The phases of a transposed convolution.
struct Decomposition {
    axes: Vec<Axis>,
    groups: usize,
    x: Type,
    w: Type,
    y: Type,
}

impl Decomposition {
    fn of(g: &Graph, node: &Node) -> Option<Decomposition> {
        let Op::ConvTranspose {
            window,
            output_pads,
            groups,
        } = &node.op
        else {
            return None;
        };
        let [x, w] = [0, 1].map(|i| g.ty(node.inputs[i]).clone());
        let y = g.ty(node.outputs[0]).clone();
        let axis = |i| {
            let extents = Extents::of(window, output_pads, &w.shape[2 + i], i)?;
            Some(extents.axis(&x.shape[2 + i]))
        };
        let axes = (0..x.rank() - 2).map(axis).collect::<Option<Vec<_>>>()?;
        let mut made = Decomposition {
            axes,
            groups: *groups,
            x,
            w,
            y,
        };
        made.split_phases();
        made.is_possible().then_some(made)
    }

    /// Residues share a convolution where its channels come out in the order of the residues: along the last axis, or all
    /// of them. Those of groups, often of one channel each, do not.
    fn split_phases(&mut self) {
        let is_whole = self.axes.iter().all(|a| a.phases.len() == 1);
        let last = self.axes.len() - 1;
        for (i, axis) in self.axes.iter_mut().enumerate() {
            if self.groups > 1 || !is_whole && i < last {
                axis.split();
            }
        }
    }

    fn is_possible(&self) -> bool {
        let dtype = self.x.dtype;
        let n_phases = self.axes.iter().map(|a| a.phases.len());
        let mut axes = self.axes.iter().zip(&self.x.shape[2..]);
        (dtype == DType::F32 || dtype.is_narrow_float())
            && self.axes.len() <= 3
            && n_phases.product::<usize>() <= MAX_PHASES
            && axes.all(|(axis, extent)| axis.fits(extent))
            && ![&self.x, &self.y]
                .iter()
                .any(|t| t.shape.n_elements().is(0))
    }

    fn emit(&self, r: &mut Rebuild, node: &Node) -> Result<ValueId> {
        let (x, w) = (r.get(node.inputs[0]), r.get(node.inputs[1]));
        let mut writer = Writer { r, node };
        let n = self.axes.len();
        let perm = [0].into_iter().chain(2..n + 2).chain([1]).collect();
        let x = writer.op(Op::Transpose { perm }, &[x])?;
        let w = self.split_weights(&mut writer, w)?;
        let mut parts = Vec::new();
        for phases in self.combinations() {
            parts.push(self.part(&mut writer, &phases, x, w)?);
        }
        let y = match parts[..] {
            [whole] => whole,
            _ => writer.op(Op::Concat { axis: n + 1 }, &parts)?,
        };
        let y = self.interleaved(&mut writer, y)?;
        self.finished(&mut writer, y)
    }

    /// Phases of the axes, those of the last one changing fastest.
    fn combinations(&self) -> Vec<Vec<Phase>> {
        self.axes.iter().fold(vec![vec![]], |made, axis| {
            let longer = |head: Vec<Phase>| {
                let with = move |&p: &Phase| [&head[..], &[p]].concat();
                axis.phases.iter().map(with)
            };
            made.into_iter().flat_map(longer).collect()
        })
    }

    /// Weights `[in, out / groups, spatial..]` as `[groups, in / groups, out / groups, (taps, residue)..]`, zeros behind
    /// the last.
    fn split_weights(&self, writer: &mut Writer, w: ValueId) -> Result<ValueId> {
        let missing = |a: &Axis| a.n_strides() * a.stride - a.size;
        let high: Vec<usize> = [0, 0]
            .into_iter()
            .chain(self.axes.iter().map(missing))
            .collect();
        let mut whole = w;
        if high.iter().any(|&n| n > 0) {
            let zero = writer.zero(self.w.dtype)?;
            let pad = Op::Pad {
                low: vec![0; high.len()],
                high,
                mode: PadMode::Constant,
            };
            whole = writer.op(pad, &[w, zero])?;
        }
        let mut shape = self.weight_channels().to_vec();
        for a in &self.axes {
            shape.extend([a.n_strides().into(), a.stride.into()]);
        }
        writer.reshape(whole, shape)
    }

    /// Groups, and channels in and out of each.
    fn weight_channels(&self) -> [Dim; 3] {
        let groups = Dim::from(self.groups);
        let per_group = self.w.shape[0].exact_div(&groups);
        let per_group = per_group.expect("channels were inferred to divide into groups");
        [groups, per_group, self.w.shape[1].clone()]
    }

    /// The phases of one convolution, `[batch, spatial.., (residues.., out)]`.
    fn part(
        &self,
        writer: &mut Writer,
        phases: &[Phase],
        x: ValueId,
        w: ValueId,
    ) -> Result<ValueId> {
        let n_residues: usize = phases.iter().map(|p| p.n_residues).product();
        let n_channels = self.y.shape[1].scale(n_residues as i64);
        if phases.iter().any(|p| p.n_taps == 0) {
            let mut shape = self.channels_last(|a| a.extent.clone(), vec![]);
            shape[1 + phases.len()] = n_channels;
            let zero = writer.zero(self.x.dtype)?;
            return writer.op(Op::Broadcast { shape }, &[zero]);
        }
        let x = self.read_part(writer, phases, x)?;
        let w = self.weights(writer, phases, w, n_channels)?;
        let conv = Op::Conv {
            window: window(phases),
            groups: self.groups,
            layout: Layout::ChannelsLast,
        };
        writer.op(conv, &[x, w])
    }

    /// Channels-last `x` without the elements that no tap of the phases meets.
    fn read_part(&self, writer: &mut Writer, phases: &[Phase], x: ValueId) -> Result<ValueId> {
        let whole = writer.shape(x);
        let (mut starts, mut sizes) = (vec![Dim::constant(0); whole.len()], whole.clone());
        for (i, p) in phases.iter().enumerate() {
            starts[1 + i] = Dim::constant((-p.low).max(0));
            sizes[1 + i] = sizes[1 + i].clone() + Dim::constant(p.low.min(0) + p.high.min(0));
        }
        let steps = vec![1; whole.len()];
        writer.slice(x, starts, sizes, steps)
    }

    /// Split weights `w` as those of the phases, `[taps.., in / groups, n_channels]`.
    fn weights(
        &self,
        writer: &mut Writer,
        phases: &[Phase],
        w: ValueId,
        n_channels: Dim,
    ) -> Result<ValueId> {
        let channels = self.weight_channels();
        let (mut starts, mut steps) = (vec![Dim::constant(0); 3], vec![1; 3]);
        let mut sizes = channels.to_vec();
        for p in phases {
            starts.extend([p.n_taps - 1, p.first].map(Dim::from));
            sizes.extend([p.n_taps, p.n_residues].map(Dim::from));
            steps.extend([-1, 1]);
        }
        let taps = writer.slice(w, starts, sizes, steps)?;
        let axes = |first: usize| (0..phases.len()).map(move |i| first + 2 * i);
        let perm = axes(3).chain([1]).chain(axes(4)).chain([0, 2]).collect();
        let taps = writer.op(Op::Transpose { perm }, &[taps])?;
        let [_, per_group, _] = channels;
        let lead = phases.iter().map(|p| Dim::from(p.n_taps));
        let shape = lead.chain([per_group, n_channels]).collect();
        writer.reshape(taps, shape)
    }

    /// `[batch, spatial.., (residues.., out)]` as `[batch, (spatial, residue).., out]`.
    fn interleaved(&self, writer: &mut Writer, y: ValueId) -> Result<ValueId> {
        let n = self.axes.len();
        let residues = self.axes.iter().map(|a| Dim::from(a.stride));
        let y = writer.reshape(
            y,
            self.channels_last(|a| a.extent.clone(), residues.collect()),
        )?;
        let pairs = (1..=n).flat_map(|i| [i, n + i]);
        let perm = [0].into_iter().chain(pairs).chain([2 * n + 1]).collect();
        let y = writer.op(Op::Transpose { perm }, &[y])?;
        let joined = |a: &Axis| a.extent.scale(a.stride as i64);
        writer.reshape(y, self.channels_last(joined, vec![]))
    }

    /// `[batch, spatial.., others.., out]`.
    fn channels_last(&self, extent: impl Fn(&Axis) -> Dim, others: Vec<Dim>) -> Vec<Dim> {
        let batch = [self.y.shape[0].clone()].into_iter();
        let spatial = batch.chain(self.axes.iter().map(extent));
        spatial
            .chain(others)
            .chain([self.y.shape[1].clone()])
            .collect()
    }

    /// The result channels first, without what is behind its last elements.
    fn finished(&self, writer: &mut Writer, y: ValueId) -> Result<ValueId> {
        let n = self.axes.len();
        let (lead, spatial) = self.y.shape.split_at(2);
        let sizes = [&lead[..1], spatial, &lead[1..]].concat();
        let starts = vec![Dim::constant(0); n + 2];
        let y = writer.slice(y, starts, sizes, vec![1; n + 2])?;
        let perm = [0, n + 1].into_iter().chain(1..=n).collect();
        writer.op(Op::Transpose { perm }, &[y])
    }
}

fn window(phases: &[Phase]) -> Window {
    let pads = |pad: fn(&Phase) -> i64| phases.iter().map(|p| pad(p).max(0) as usize).collect();
    Window {
        strides: vec![1; phases.len()],
        dilations: vec![1; phases.len()],
        pads_low: pads(|p| p.low),
        pads_high: pads(|p| p.high),
    }
}

/// Adds nodes in the place of `node`.
struct Writer<'a> {
    r: &'a mut Rebuild,
    node: &'a Node,
}

impl Writer<'_> {
    fn op(&mut self, op: Op, inputs: &[ValueId]) -> Result<ValueId> {
        self.r.add_like(self.node, op, inputs, &self.node.origin)
    }

    fn reshape(&mut self, x: ValueId, shape: Vec<Dim>) -> Result<ValueId> {
        self.op(Op::Reshape { shape }, &[x])
    }

    fn zero(&mut self, dtype: DType) -> Result<ValueId> {
        let zero = Tensor::zeros(dtype, &[])?;
        Ok(self.r.graph.add_constant(zero, &self.node.origin))
    }

    fn shape(&self, v: ValueId) -> Vec<Dim> {
        self.r.graph.ty(v).shape.0.clone()
    }

    /// A part of `x`; `x` itself when that is all of it.
    fn slice(
        &mut self,
        x: ValueId,
        starts: Vec<Dim>,
        sizes: Vec<Dim>,
        steps: Vec<i64>,
    ) -> Result<ValueId> {
        if sizes == self.shape(x) && steps.iter().all(|&s| s == 1) {
            return Ok(x);
        }
        let op = Op::Slice {
            starts,
            sizes,
            steps,
        };
        self.op(op, &[x])
    }
}

#[cfg(test)]
mod tests;
