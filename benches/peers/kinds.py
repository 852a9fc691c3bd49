"""Write ONNX models of ordinary architectures, of random weights, with an input and onnxruntime's results.

usage: kinds.py OUTDIR [KIND ...]
needs: pip install onnxruntime numpy onnx
Each kind lands as OUTDIR/KIND/model.onnx with test_data_set_0/{input,output}_i.pb, for compare.py and `gristmill run --test-data`. The nodes
are those that PyTorch's exporters write of models in evaluation mode: batch normalisation is folded into convolutions where it can be, GELU
is made of Erf, SiLU of Sigmoid. Batch 1, fixed shapes, f32; weights are scaled so that activations stay near 1. The seed is fixed.
"""

import math
import os
import sys
import time

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

KINDS = {}
LOWEST = np.finfo(np.float32).min


def kind(f):
    KINDS[f.__name__] = f
    return f


class Net:
    """A graph under construction; values go by their names."""

    def __init__(self):
        self.rng = np.random.default_rng(0)
        self.nodes, self.constants, self.inputs, self.outputs, self.feeds, self.known = [], [], [], [], {}, {}

    # Values

    def normal(self, *shape, std=1.0, mean=0.0):
        return self.rng.standard_normal(shape, np.float32) * np.float32(std) + np.float32(mean)

    def uniform(self, *shape, low=0.5, high=1.5):
        return self.rng.uniform(low, high, shape).astype(np.float32)

    def const(self, array):
        """The name of a constant. Python's integers are i64, its floats f32; small ones are kept once."""
        array = np.asarray(array)
        array = array.astype({"f": np.float32, "i": np.int64}.get(array.dtype.kind, array.dtype), copy=False)
        key = (array.dtype.str, array.shape, array.tobytes()) if array.size < 16 else None
        if key not in self.known:
            name = f"c{len(self.constants)}"
            self.constants.append(numpy_helper.from_array(array, name))
            if key is None: return name
            self.known[key] = name
        return self.known[key]

    def input(self, name, array):
        self.feeds[name] = array
        self.inputs.append(helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape))
        return name

    def output(self, value, *shape):
        self.outputs.append(helper.make_tensor_value_info(value, TensorProto.FLOAT, shape))

    def op(self, op, *inputs, outputs=1, **attributes):
        """The result of a node, or the list of several; inputs that are no names are constants."""
        names = [v if isinstance(v, str) else self.const(v) for v in inputs]
        made = [f"v{len(self.nodes)}" + (f"_{i}" if i else "") for i in range(outputs)]
        self.nodes.append(helper.make_node(op, names, made, name=f"{op}_{len(self.nodes)}", **attributes))
        return made[0] if outputs == 1 else made

    def reshape(self, x, *shape): return self.op("Reshape", x, list(shape))
    def transpose(self, x, *perm): return self.op("Transpose", x, perm=perm)
    def slice(self, x, start, end, axis, step=1): return self.op("Slice", x, [start], [end], [axis], [step])

    def split(self, x, parts, size, axis):
        return self.op("Split", x, [size // parts] * parts, outputs=parts, axis=axis)

    # Activations

    def gelu(self, x):
        return self.op("Mul", self.op("Mul", x, self.op("Add", self.op("Erf", self.op("Div", x, math.sqrt(2))), 1.0)), 0.5)

    def gelu_tanh(self, x):
        inner = self.op("Add", x, self.op("Mul", self.op("Pow", x, 3.0), 0.044715))
        return self.op("Mul", self.op("Mul", x, 0.5), self.op("Add", self.op("Tanh", self.op("Mul", inner, math.sqrt(2 / math.pi))), 1.0))

    def silu(self, x): return self.op("Mul", x, self.op("Sigmoid", x))
    def relu(self, x): return self.op("Relu", x)
    def relu6(self, x): return self.op("Clip", x, 0.0, 6.0)
    def leaky(self, x): return self.op("LeakyRelu", x, alpha=0.01)

    # Layers

    def conv(self, x, ins, outs, k=1, stride=1, groups=1, dilation=1, pad=None, bias=True, gain=2.0, axes=2):
        pad = dilation * (k // 2) if pad is None else pad
        weight = self.normal(outs, ins // groups, *[k] * axes, std=math.sqrt(gain * groups / (ins * k**axes)))
        return self.op("Conv", x, weight, *[self.normal(outs, std=0.1)] * bias, kernel_shape=[k] * axes, strides=[stride] * axes,
                       pads=[pad] * 2 * axes, dilations=[dilation] * axes, group=groups)

    def pool(self, x, k=3, stride=2, pad=1, op="MaxPool"):
        return self.op(op, x, kernel_shape=[k, k], strides=[stride, stride], pads=[pad] * 4)

    def batchnorm(self, x, width):
        mean, var = self.normal(width, std=0.1), self.uniform(width)
        return self.op("BatchNormalization", x, self.uniform(width), self.normal(width, std=0.1), mean, var, epsilon=1e-5)

    def layernorm(self, x, width, epsilon=1e-5):
        return self.op("LayerNormalization", x, self.uniform(width), self.normal(width, std=0.1), axis=-1, epsilon=epsilon)

    def rmsnorm(self, x, width):
        mean = self.op("ReduceMean", self.op("Pow", x, 2.0), [-1], keepdims=1)
        return self.op("Mul", self.uniform(width), self.op("Mul", x, self.op("Div", 1.0, self.op("Sqrt", self.op("Add", mean, 1e-6)))))

    def linear(self, x, ins, outs, bias=True, gain=1.0):
        """Of any rank, by a product and a sum."""
        y = self.op("MatMul", x, self.normal(ins, outs, std=math.sqrt(gain / ins)))
        return self.op("Add", self.normal(outs, std=0.1), y) if bias else y

    def gemm(self, x, ins, outs, gain=1.0):
        """Of rank 2."""
        return self.op("Gemm", x, self.normal(outs, ins, std=math.sqrt(gain / ins)), self.normal(outs, std=0.1), transB=1)

    def mlp(self, x, width, inner, act): return self.linear(act(self.linear(x, width, inner)), inner, width)

    def classify(self, x, width, classes=1000):
        self.output(self.gemm(self.op("Flatten", self.op("GlobalAveragePool", x), axis=1), width, classes), 1, classes)

    # Attention

    def heads(self, x, tokens, heads, head, batch=1): return self.transpose(self.reshape(x, batch, tokens, heads, head), 0, 2, 1, 3)

    def joined(self, x, tokens, width, batch=1): return self.reshape(self.transpose(x, 0, 2, 1, 3), batch, tokens, width)

    def packed(self, x, tokens, width, heads, batch=1):
        """Queries, keys and values by heads, of one product."""
        qkv = self.reshape(self.linear(x, width, 3 * width), batch, tokens, 3, heads, width // heads)
        qkv = self.transpose(qkv, 2, 0, 3, 1, 4)
        return [self.op("Gather", qkv, i, axis=0) for i in range(3)]

    def scaled(self, q, k, v, head, mask=None):
        """Attention as scaled_dot_product_attention is exported: the scale's square root on both sides."""
        root = head**-0.25
        scores = self.op("MatMul", self.op("Mul", q, root), self.op("Mul", self.transpose(k, 0, 1, 3, 2), root))
        if mask is not None: scores = self.op("Add", scores, mask)
        return self.op("MatMul", self.op("Softmax", scores, axis=-1), v)

    def model(self, name):
        graph = helper.make_graph(self.nodes, name, self.inputs, self.outputs, self.constants)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9, producer_name="kinds")


def image(g, size=224): return g.input("input", g.normal(1, 3, size, size))
def tokens(g, count, vocabulary): return g.input("input_ids", g.rng.integers(0, vocabulary, (1, count)))
def causal(n): return np.triu(np.full((1, 1, n, n), LOWEST, np.float32), 1)


# Convolutional nets


@kind
def squeeze_excite(g):
    """EfficientNet-B0."""
    x = g.silu(g.conv(image(g), 3, 32, 3, 2))
    for expand, k, stride, ins, outs, repeats in [(1, 3, 1, 32, 16, 1), (6, 3, 2, 16, 24, 2), (6, 5, 2, 24, 40, 2), (6, 3, 2, 40, 80, 3),
                                                  (6, 5, 1, 80, 112, 3), (6, 5, 2, 112, 192, 4), (6, 3, 1, 192, 320, 1)]:
        for i in range(repeats):
            ins, stride = (outs, 1) if i else (ins, stride)
            inner, y = ins * expand, x
            if expand > 1: y = g.silu(g.conv(y, ins, inner))
            y = g.silu(g.conv(y, inner, inner, k, stride, groups=inner))
            s = g.op("ReduceMean", y, [2, 3], keepdims=1)
            s = g.op("Sigmoid", g.conv(g.silu(g.conv(s, inner, ins // 4)), ins // 4, inner))
            y = g.conv(g.op("Mul", y, s), inner, outs, gain=4.0)
            x = g.op("Add", y, x) if i else y
    g.classify(g.silu(g.conv(x, 320, 1280)), 1280)


@kind
def channel_shuffle(g):
    """ShuffleNetV2 1.0x."""
    x = g.pool(g.relu(g.conv(image(g), 3, 24, 3, 2)))
    ins, size = 24, 56
    for outs, repeats in [(116, 4), (232, 8), (464, 4)]:
        half, size = outs // 2, size // 2
        for i in range(repeats):
            if i:
                left, y = g.split(x, 2, outs, 1)
                wide, stride = half, 1
            else:
                left, y, wide, stride = g.relu(g.conv(g.conv(x, ins, ins, 3, 2, groups=ins, gain=1.0), ins, half)), x, ins, 2
            y = g.conv(g.relu(g.conv(y, wide, half)), half, half, 3, stride, groups=half, gain=1.0)
            x = g.op("Concat", left, g.relu(g.conv(y, half, half)), axis=1)
            x = g.reshape(g.transpose(g.reshape(x, 1, 2, half, size, size), 0, 2, 1, 3, 4), 1, outs, size, size)
        ins = outs
    x = g.op("ReduceMean", g.relu(g.conv(x, 464, 1024)), [2, 3], keepdims=0)
    g.output(g.gemm(x, 1024, 1000), 1, 1000)


@kind
def mobilenet_v2(g):
    x = g.relu6(g.conv(image(g), 3, 32, 3, 2))
    ins = 32
    for expand, outs, repeats, stride in [(1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1)]:
        for i in range(repeats):
            inner, y = ins * expand, x
            if expand > 1: y = g.relu6(g.conv(y, ins, inner))
            y = g.relu6(g.conv(y, inner, inner, 3, 1 if i else stride, groups=inner))
            y = g.conv(y, inner, outs, gain=1.0)
            x = g.op("Add", x, y) if i else y
            ins = outs
    g.classify(g.relu6(g.conv(x, 320, 1280)), 1280)


def resnet50_body(g, x, dilations=(1, 1, 1, 1)):
    x, ins, before = g.pool(g.relu(g.conv(x, 3, 64, 7, 2))), 64, 1
    for width, repeats, stride, dilation in zip([64, 128, 256, 512], [3, 4, 6, 3], [1, 2, 2, 2], dilations):
        if dilation > 1: stride = 1
        for i in range(repeats):
            if i: stride, before = 1, dilation
            y = g.relu(g.conv(x, ins, width))
            y = g.relu(g.conv(y, width, width, 3, stride, dilation=before))
            y = g.conv(y, width, 4 * width, gain=0.5)
            x = g.relu(g.op("Add", y, x if i else g.conv(x, ins, 4 * width, 1, stride, gain=1.0)))
            ins = 4 * width
        before = dilation
    return x


@kind
def resnet50(g):
    g.classify(resnet50_body(g, image(g)), 2048)


@kind
def segmentation(g, size=160):
    """A fully convolutional net on a ResNet-50 whose last two stages are dilated."""
    x = resnet50_body(g, image(g, size), (1, 1, 2, 4))
    x = g.conv(g.relu(g.conv(x, 2048, 512, 3)), 512, 21, gain=1.0)
    x = g.op("Resize", x, "", "", [1, 21, size, size], mode="linear", coordinate_transformation_mode="half_pixel")
    g.output(x, 1, 21, size, size)


@kind
def dense_concat(g):
    """DenseNet-121: the normalisation before a convolution stays a node."""
    x, width = g.pool(g.relu(g.conv(image(g), 3, 64, 7, 2))), 64
    for stage, repeats in enumerate([6, 12, 24, 16]):
        if stage:
            x = g.conv(g.relu(g.batchnorm(x, width)), width, width // 2, bias=False)
            x, width = g.pool(x, 2, 2, 0, "AveragePool"), width // 2
        parts = [x]
        for _ in range(repeats):
            y = g.op("Concat", *parts, axis=1) if len(parts) > 1 else x
            y = g.relu(g.conv(g.relu(g.batchnorm(y, width)), width, 128))
            parts.append(g.conv(y, 128, 32, 3, bias=False))
            width += 32
        x = g.op("Concat", *parts, axis=1)
    g.classify(g.relu(g.batchnorm(x, width)), width)


@kind
def unet(g, size=128, widths=(32, 64, 128, 256)):
    def double(x, ins, outs, stride=1):
        for i, s in [(ins, stride), (outs, 1)]:
            x = g.conv(x, i, outs, 3, s)
            x = g.leaky(g.op("InstanceNormalization", x, g.uniform(outs), g.normal(outs, std=0.1), epsilon=1e-5))
        return x
    x, ins, skips = g.input("input", g.normal(1, 1, size, size)), 1, []
    for i, width in enumerate(widths):
        x = double(x, ins, width, 2 if i else 1)
        skips.append(x)
        ins = width
    for width, skip in zip(widths[-2::-1], skips[-2::-1]):
        x = g.op("ConvTranspose", x, g.normal(ins, width, 2, 2, std=ins**-0.5), g.normal(width, std=0.1), kernel_shape=[2, 2], strides=[2, 2])
        x, ins = double(g.op("Concat", x, skip, axis=1), 2 * width, width), width
    g.output(g.conv(x, ins, 2, gain=1.0), 1, 2, size, size)


@kind
def large_kernel(g):
    """ConvNeXt-T."""
    def norm(x, width): return g.transpose(g.layernorm(g.transpose(x, 0, 2, 3, 1), width, 1e-6), 0, 3, 1, 2)
    x, ins = image(g), 3
    for stage, (width, repeats) in enumerate(zip([96, 192, 384, 768], [3, 3, 9, 3])):
        x = g.conv(norm(x, ins), ins, width, 2, 2, pad=0, gain=1.0) if stage else norm(g.conv(x, 3, width, 4, 4, pad=0), width)
        for _ in range(repeats):
            y = g.transpose(g.conv(x, width, width, 7, groups=width), 0, 2, 3, 1)
            y = g.mlp(g.layernorm(y, width, 1e-6), width, 4 * width, g.gelu)
            x = g.op("Add", g.op("Mul", g.uniform(width, 1, 1, low=0.2, high=0.8), g.transpose(y, 0, 3, 1, 2)), x)
        ins = width
    x = g.op("Flatten", norm(g.op("GlobalAveragePool", x), ins), axis=1)
    g.output(g.gemm(x, ins, 1000), 1, 1000)


# Transformers


@kind
def vit(g, width=768, count=197, heads=12):
    """ViT-B/16."""
    x = g.transpose(g.reshape(g.conv(image(g), 3, width, 16, 16, pad=0, gain=1.0), 1, width, 196), 0, 2, 1)
    x = g.op("Add", g.op("Concat", g.normal(1, 1, width), x, axis=1), g.normal(1, count, width, std=0.2))
    for _ in range(12):
        q, k, v = g.packed(g.layernorm(x, width, 1e-6), count, width, heads)
        x = g.op("Add", x, g.linear(g.joined(g.scaled(q, k, v, 64), count, width), width, width))
        x = g.op("Add", x, g.mlp(g.layernorm(x, width, 1e-6), width, 4 * width, g.gelu))
    g.output(g.gemm(g.op("Gather", g.layernorm(x, width, 1e-6), 0, axis=1), width, 1000), 1, 1000)


@kind
def windowed_transformer(g, window=7):
    """Swin-T. Windows are shifted by rolls, which are exported as two slices and a concatenation."""
    def roll(x, by):
        for axis in (1, 2):
            x = g.op("Concat", g.slice(x, by, 2**63 - 1, axis), g.slice(x, 0, by, axis), axis=axis)
        return x
    def shift_mask(size, shift):
        """Zero within a region of the unrolled image, else -100, for each window."""
        part = np.zeros(size, np.int64)
        part[size - window:size - shift], part[size - shift:] = 1, 2
        region = (3 * part[:, None] + part).reshape(size // window, window, size // window, window).swapaxes(1, 2).reshape(-1, window**2)
        return np.where(region[:, None] == region[:, :, None], 0, -100).astype(np.float32)[None, :, None]
    def attention(x, size, width, heads, shift):
        n, count, area = size // window, (size // window)**2, window**2
        if shift: x = roll(x, shift)
        x = g.reshape(g.transpose(g.reshape(x, 1, n, window, n, window, width), 0, 1, 3, 2, 4, 5), count, area, width)
        q, k, v = g.packed(x, area, width, heads, count)
        scores = g.op("MatMul", g.op("Mul", q, 32**-0.5), g.transpose(k, 0, 1, 3, 2))
        scores = g.op("Add", scores, g.normal(1, heads, area, area, std=0.5))
        if shift:
            scores = g.op("Add", g.reshape(scores, 1, count, heads, area, area), shift_mask(size, shift))
            scores = g.reshape(scores, count, heads, area, area)
        x = g.linear(g.joined(g.op("MatMul", g.op("Softmax", scores, axis=-1), v), area, width, count), width, width)
        x = g.transpose(g.reshape(x, 1, n, n, window, window, width), 0, 1, 3, 2, 4, 5)
        x = g.reshape(x, 1, size, size, width)
        return roll(x, size - shift) if shift else x
    x = g.layernorm(g.transpose(g.conv(image(g), 3, 96, 4, 4, pad=0, gain=1.0), 0, 2, 3, 1), 96)
    width, size = 96, 56
    for stage, repeats in enumerate([2, 2, 6, 2]):
        if stage:
            quarter = lambda i, j: g.slice(g.slice(x, i, 2**63 - 1, 1, 2), j, 2**63 - 1, 2, 2)
            x = g.op("Concat", quarter(0, 0), quarter(1, 0), quarter(0, 1), quarter(1, 1), axis=-1)
            x, width, size = g.linear(g.layernorm(x, 4 * width), 4 * width, 2 * width, bias=False), 2 * width, size // 2
        for i in range(repeats):
            shift = window // 2 if i % 2 and size > window else 0
            x = g.op("Add", x, attention(g.layernorm(x, width), size, width, width // 32, shift))
            x = g.op("Add", x, g.mlp(g.layernorm(x, width), width, 4 * width, g.gelu))
    g.classify(g.transpose(g.layernorm(x, width), 0, 3, 1, 2), width)


@kind
def audio_encoder(g, width=384, heads=6, count=1500):
    """Whisper-tiny's encoder, of 30 s."""
    x = g.gelu(g.conv(g.input("input_features", g.normal(1, 80, 2 * count)), 80, width, 3, axes=1))
    x = g.transpose(g.gelu(g.conv(x, width, width, 3, 2, axes=1)), 0, 2, 1)
    x = g.op("Add", x, g.normal(count, width, std=0.5))
    for _ in range(4):
        y = g.layernorm(x, width)
        q, k, v = [g.heads(g.linear(y, width, width, bias), count, heads, width // heads) for bias in (True, False, True)]
        x = g.op("Add", x, g.linear(g.joined(g.scaled(q, k, v, width // heads), count, width), width, width))
        x = g.op("Add", x, g.mlp(g.layernorm(x, width), width, 4 * width, g.gelu))
    g.output(g.layernorm(x, width), 1, count, width)


@kind
def bert(g, width=768, heads=12, count=128):
    """BERT-base, normalised after each sum; the scale divides the scores."""
    ids, mask = tokens(g, count, 30522), g.input("attention_mask", np.ones((1, count), np.int64))
    mask = g.op("Cast", g.op("Unsqueeze", g.op("Unsqueeze", mask, [1]), [2]), to=TensorProto.FLOAT)
    mask = g.op("Mul", g.op("Sub", 1.0, mask), LOWEST)
    x = g.op("Add", g.op("Gather", g.normal(30522, width), ids, axis=0), g.normal(1, 1, width, std=0.1))
    x = g.layernorm(g.op("Add", x, g.normal(1, count, width, std=0.5)), width, 1e-12)
    for _ in range(12):
        q, k, v = [g.heads(g.linear(x, width, width), count, heads, 64) for _ in range(3)]
        scores = g.op("Add", g.op("Div", g.op("MatMul", q, g.transpose(k, 0, 1, 3, 2)), 8.0), mask)
        y = g.joined(g.op("MatMul", g.op("Softmax", scores, axis=-1), v), count, width)
        x = g.layernorm(g.op("Add", g.linear(y, width, width), x), width, 1e-12)
        x = g.layernorm(g.op("Add", g.mlp(x, width, 4 * width, g.gelu), x), width, 1e-12)
    g.output(x, 1, count, width)
    g.output(g.op("Tanh", g.gemm(g.op("Gather", x, 0, axis=1), width, width)), 1, width)


@kind
def gpt2(g, width=768, heads=12, count=64, vocabulary=50257):
    """GPT-2 small; its layers are products of rank 2 between reshapes, as in transformers."""
    def flat(x, ins, outs): return g.reshape(g.gemm(g.reshape(x, count, ins), ins, outs), 1, count, outs)
    words = g.normal(vocabulary, width, std=width**-0.5)
    x = g.op("Add", g.op("Gather", words, tokens(g, count, vocabulary), axis=0), g.normal(1, count, width, std=0.1))
    past = np.tril(np.ones((1, 1, count, count), bool))
    for _ in range(12):
        parts = g.op("Split", flat(g.layernorm(x, width), width, 3 * width), [width] * 3, outputs=3, axis=2)
        q, k, v = [g.heads(part, count, heads, 64) for part in parts]
        scores = g.op("Where", past, g.op("Div", g.op("MatMul", q, g.transpose(k, 0, 1, 3, 2)), 8.0), LOWEST)
        y = g.joined(g.op("MatMul", g.op("Softmax", scores, axis=-1), v), count, width)
        x = g.op("Add", flat(y, width, width), x)
        x = g.op("Add", x, flat(g.gelu_tanh(flat(g.layernorm(x, width), width, 4 * width)), 4 * width, width))
    g.output(g.op("MatMul", g.layernorm(x, width), np.ascontiguousarray(words.T)), 1, count, vocabulary)


@kind
def decoder_small(g, width=384, heads=6, count=64, inner=1024, vocabulary=8192):
    """A decoder of six layers as Llama's: root mean squares, rotary positions, a gated linear unit."""
    head = width // heads
    angles = np.outer(np.arange(count), 10000.0**(-np.arange(0, head, 2) / head))
    cos, sin = [np.concatenate([f(angles)] * 2, -1)[None, None].astype(np.float32) for f in (np.cos, np.sin)]
    cos, sin, mask = g.const(cos), g.const(sin), g.const(causal(count))
    def rotate(x):
        turned = g.op("Concat", g.op("Neg", g.slice(x, head // 2, 2**63 - 1, 3)), g.slice(x, 0, head // 2, 3), axis=-1)
        return g.op("Add", g.op("Mul", x, cos), g.op("Mul", turned, sin))
    x = g.op("Gather", g.normal(vocabulary, width), tokens(g, count, vocabulary), axis=0)
    for _ in range(6):
        y = g.rmsnorm(x, width)
        q, k, v = [g.heads(g.linear(y, width, width, bias=False), count, heads, head) for _ in range(3)]
        y = g.joined(g.scaled(rotate(q), rotate(k), v, head, mask), count, width)
        x = g.op("Add", x, g.linear(y, width, width, bias=False))
        y = g.rmsnorm(x, width)
        y = g.op("Mul", g.silu(g.linear(y, width, inner, bias=False)), g.linear(y, width, inner, bias=False))
        x = g.op("Add", x, g.linear(y, inner, width, bias=False))
    g.output(g.linear(g.rmsnorm(x, width), width, vocabulary, bias=False), 1, count, vocabulary)


# Others


def recurrent(g, op, gates, states, steps=128, width=256, **attributes):
    x = g.transpose(g.input("input", g.normal(1, steps, width)), 1, 0, 2)
    for _ in range(2):
        w, r, b = [g.normal(*shape, std=width**-0.5) for shape in [(1, gates * width, width)] * 2 + [(1, 2 * gates * width)]]
        y = g.op(op, x, w, r, b, "", *[np.zeros((1, 1, width), np.float32)] * states, outputs=1 + states, hidden_size=width, **attributes)
        x = g.op("Squeeze", y[0], [1])
    g.output(g.transpose(x, 1, 0, 2), 1, steps, width)


@kind
def lstm(g):
    recurrent(g, "LSTM", 4, 2)


@kind
def gru(g):
    recurrent(g, "GRU", 3, 1, linear_before_reset=1)


@kind
def perceptron(g, batch=32):
    x = g.relu(g.gemm(g.input("input", g.normal(batch, 784)), 784, 1024, 2.0))
    x = g.gemm(g.gelu(g.gemm(x, 1024, 1024)), 1024, 10)
    g.output(g.op("Softmax", x, axis=-1), batch, 10)


def write(name, directory):
    net = Net()
    KINDS[name](net)
    data = os.path.join(directory, "test_data_set_0")
    os.makedirs(data, exist_ok=True)
    path = os.path.join(directory, "model.onnx")
    onnx.save(net.model(name), path)
    onnx.checker.check_model(path)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    results = dict(zip([o.name for o in session.get_outputs()], session.run(None, net.feeds)))
    for prefix, values in [("input", net.feeds), ("output", results)]:
        for i, (value, array) in enumerate(values.items()):
            with open(os.path.join(data, f"{prefix}_{i}.pb"), "wb") as f:
                f.write(numpy_helper.from_array(array, value).SerializeToString())
    if not all(np.isfinite(r).all() for r in results.values()): raise ValueError(f"{name}: results are not finite")
    return net, results


def main():
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"): sys.exit(__doc__)
    unknown = [name for name in sys.argv[2:] if name not in KINDS]
    if unknown: sys.exit(f"no such kinds: {', '.join(unknown)}; there are {', '.join(KINDS)}")
    for name in sys.argv[2:] or KINDS:
        started = time.time()
        net, results = write(name, os.path.join(sys.argv[1], name))
        shown = ", ".join(f"{list(r.shape)} deviation {r.std():.3g}" for r in results.values())
        print(f"{name:<22} {len(net.nodes):>5} nodes  {shown}  {time.time() - started:.1f} s", flush=True)


if __name__ == "__main__":
    main()
