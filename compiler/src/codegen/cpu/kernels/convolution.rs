//! Channels-last convolutions of `f32`, or of 8-bit integers by constants, through the packed micro-kernels.

use super::bytes::BytesProduct;
use super::epilogue::{Chain, Entries, contraction_ns, epilogue_ops};
use super::pack::{Packed, pack_conv_weights};
use super::rejected::Rejected;
use super::strided::{Strided, collapse};
use super::task::{Call, Context, Place, Ptr, Task, pointers, read};
use super::windows::{kernel_window, window_input_fits};
use super::winograd;
use crate::ir::{Node, NodeId, Op, Window};
use gristmill_kernels::calls;
use gristmill_kernels::conv::ConvDesc;
use gristmill_kernels::depthwise::DepthwiseDesc;
use gristmill_kernels::epilogue::MAX_BATCH;
use gristmill_kernels::window::Window as KernelWindow;
use gristmill_runtime::DType;

/// The task of a convolution and the element-wise ops on its tiles.
pub(super) fn task(cx: &Context, id: NodeId, node: &Node) -> Result<Task, Rejected> {
    let conv = Convolution::find(cx, node)?;
    if conv.is_depthwise(cx, node) {
        return conv.depthwise(cx, id, node);
    }
    match conv.filtered(cx, id, node)? {
        Some(task) => Ok(task),
        None => conv.packed(cx, id, node),
    }
}

/// A convolution of `[batch, spatial.., in]` by `[taps.., in / groups, out]`.
struct Convolution<'n> {
    window: &'n Window,
    groups: usize,
    /// Of the result.
    shape: Vec<usize>,
    /// Of the weights.
    weights: Vec<usize>,
    integers: Option<BytesProduct>,
    x: Strided,
}

impl<'n> Convolution<'n> {
    fn find(cx: &Context, node: &'n Node) -> Result<Convolution<'n>, Rejected> {
        let Op::Conv { window, groups, .. } = &node.op else {
            return Err(Rejected::Empty);
        };
        let shape = cx.body.shape(node.outputs[0]).to_vec();
        let weights = cx.body.shape(node.inputs[1]).to_vec();
        let image = cx.body.shape(node.inputs[0]);
        if [image, &shape, &weights].iter().any(|s| s.contains(&0)) {
            return Err(Rejected::Empty);
        }
        let integers = BytesProduct::find(cx, node)?;
        let x = match &integers {
            Some(b) => b.left.clone(),
            None => cx.view(node.inputs[0], window_input_fits),
        };
        Ok(Convolution {
            window,
            groups: *groups,
            shape,
            weights,
            integers,
            x,
        })
    }

    fn rank(&self) -> usize {
        self.shape.len()
    }

    fn channels_in(&self) -> usize {
        self.weights[self.rank() - 2]
    }

    fn channels_out(&self) -> usize {
        self.weights[self.rank() - 1]
    }

    fn taps(&self) -> &[usize] {
        &self.weights[..self.rank() - 2]
    }

    fn n_taps(&self) -> usize {
        self.taps().iter().product()
    }

    /// Output positions: a row of the kernel is one.
    fn pixels(&self) -> &[usize] {
        &self.shape[..self.rank() - 1]
    }

    fn geometry(&self) -> KernelWindow {
        kernel_window(&self.x, &self.shape, self.taps(), self.window)
    }

    fn is_depthwise(&self, cx: &Context, node: &Node) -> bool {
        let channels = cx.body.shape(node.inputs[0]).last();
        self.channels_in() == 1
            && self.groups == self.channels_out()
            && channels == Some(&self.groups)
    }

    /// The step of an epilogue operand from pixel to pixel; `None` when it is not even.
    fn row_stride(&self, v: &Strided) -> Option<i64> {
        let pixels = self.pixels();
        match &collapse(pixels, &[&v.strides[..pixels.len()]])[..] {
            [] => Some(0),
            [axis] => Some(axis.strides[0]),
            _ => None,
        }
    }

    fn chain(&self, cx: &Context, node: &Node) -> Chain {
        Chain::of(cx, node, &|v| self.row_stride(v).is_some())
    }

    fn epilogue(&self, chain: &Chain) -> Result<(Entries, Vec<Ptr>), Rejected> {
        let tensors = chain.tensors();
        let row_stride = |i: usize| self.row_stride(tensors[i]).unwrap_or(0);
        epilogue_ops(&chain.terms, &|i| (row_stride(i), [0; MAX_BATCH]))
    }

    fn cost_ns(&self, chain: &Chain) -> f64 {
        let n_elements = self.pixels().iter().product::<usize>() * self.channels_out();
        let multiply_adds = n_elements * self.n_taps() * self.channels_in();
        contraction_ns(multiply_adds, n_elements, chain)
    }

    fn depthwise(&self, cx: &Context, id: NodeId, node: &Node) -> Result<Task, Rejected> {
        let chain = match &self.integers {
            Some(_) => self.chain(cx, node).quantized(cx),
            None => self.chain(cx, node),
        };
        let (epilogue, mut operands) = self.epilogue(&chain)?;
        let mut desc = DepthwiseDesc::new(cx.isa, self.geometry(), self.channels_out());
        (desc.epilogue, desc.n_epilogue) = epilogue;
        desc.quantize = chain.quantize;
        if let Some(b) = &self.integers {
            let keeps_sums = cx.body.dtype(chain.result) == DType::I32;
            desc.integers = b.describe(&mut operands, keeps_sums);
        }
        let weights = match &self.integers {
            Some(b) => b.right.clone(),
            None => depthwise_weights(cx, node)?,
        };
        let workspace_bytes = desc.workspace_bytes();
        let out = Ptr::Write(Place::Value(chain.result), 0);
        let ptrs = pointers(
            self.read_input(),
            weights,
            out,
            workspace_bytes > 0,
            operands,
        );
        // Bound by memory: about a quarter of the products per time of dense convolutions.
        let ns = self.cost_ns(&chain) * 4.0;
        let call = Call {
            workspace_bytes,
            ..Call::new(calls::gm_depthwise_f32(&desc), ptrs, desc.n_items(), ns)
        };
        Ok(chain.into_task(cx, self.nodes_before(), id, vec![call], vec![]))
    }

    fn read_input(&self) -> Ptr {
        match &self.integers {
            Some(b) => b.read_left(),
            None => read(&self.x),
        }
    }

    /// Nodes that the product computes before itself.
    fn nodes_before(&self) -> Vec<NodeId> {
        self.integers.as_ref().map_or(vec![], |b| b.nodes.clone())
    }

    /// The task by minimal filtering, where that is possible and faster.
    fn filtered(&self, cx: &Context, id: NodeId, node: &Node) -> Result<Option<Task>, Rejected> {
        let chain = self.chain(cx, node);
        if self.groups != 1 || self.integers.is_some() || self.taps().len() != 2 {
            return Ok(None);
        }
        let channels = [self.channels_in(), self.channels_out()];
        let chosen = winograd::choose(cx, node, self.geometry(), channels)?;
        let Some((mut desc, weights)) = chosen else {
            return Ok(None);
        };
        let (epilogue, operands) = self.epilogue(&chain)?;
        (desc.epilogue, desc.n_epilogue) = epilogue;
        desc.plan(1);
        let out = Ptr::Write(Place::Value(chain.result), 0);
        let ptrs = pointers(read(&self.x), weights, out, true, operands);
        let ns = self.cost_ns(&chain) / 2.0;
        let call = Call {
            workspace_bytes: desc.workspace_bytes(),
            ..Call::new(desc.call(), ptrs, desc.n_items(), ns)
        };
        Ok(Some(chain.into_task(cx, vec![], id, vec![call], vec![])))
    }

    fn packed(&self, cx: &Context, id: NodeId, node: &Node) -> Result<Task, Rejected> {
        let chain = self.chain(cx, node).quantized(cx);
        let (epilogue, mut operands) = self.epilogue(&chain)?;
        let weights = self.packed_weights(cx, node)?;
        let mut desc = self.descriptor(cx, &chain);
        if let Some(b) = &self.integers {
            let keeps_sums = cx.body.dtype(chain.result) == DType::I32;
            desc.integers = b.describe(&mut operands, keeps_sums);
        }
        (desc.epilogue, desc.n_epilogue) = epilogue;
        desc.plan(1);
        let call = self.call(&desc, &chain, weights.ptr, operands);
        let (mut calls, mut temps) = (vec![call], vec![]);
        if let Some((pack, bytes)) = weights.at_run_time {
            calls.insert(0, pack);
            temps.push(bytes);
        }
        Ok(chain.into_task(cx, self.nodes_before(), id, calls, temps))
    }

    fn packed_weights(&self, cx: &Context, node: &Node) -> Result<Packed, Rejected> {
        if let Some(b) = &self.integers {
            return Ok(Packed {
                ptr: b.right.clone(),
                strides: vec![],
                at_run_time: None,
            });
        }
        let rows = self.n_taps() * self.channels_in();
        pack_conv_weights(cx, node, [rows, self.channels_out()], self.groups)
    }

    fn descriptor(&self, cx: &Context, chain: &Chain) -> ConvDesc {
        let span = match &self.integers {
            Some(b) => b.n_words,
            None => self.channels_in(),
        };
        let per_group = self.channels_out() / self.groups;
        let mut desc = ConvDesc::new(cx.isa, self.geometry(), self.groups, span, per_group);
        desc.quantize = chain.quantize;
        desc
    }

    fn call(&self, desc: &ConvDesc, chain: &Chain, weights: Ptr, operands: Vec<Ptr>) -> Call {
        let workspace_bytes = desc.workspace_bytes();
        let out = Ptr::Write(Place::Value(chain.result), 0);
        let ptrs = pointers(
            self.read_input(),
            weights,
            out,
            workspace_bytes > 0,
            operands,
        );
        let (items, ns) = (desc.n_items(), self.cost_ns(chain));
        Call {
            workspace_bytes,
            ..Call::new(calls::gm_conv_f32(desc), ptrs, items, ns)
        }
    }
}

fn depthwise_weights(cx: &Context, node: &Node) -> Result<Ptr, Rejected> {
    let resolved = Strided::resolve(cx.body, node.inputs[1], cx.in_memory);
    match cx.source(&resolved, DType::F32) {
        Some(source) => {
            let copy = cx.constant_copy(&source)?;
            Ok(Ptr::Read(Place::Packed(copy), 0))
        }
        None => Ok(read(&cx.view(node.inputs[1], Strided::is_contiguous))),
    }
}
