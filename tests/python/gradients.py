"""Gradients by torch.autograd in f64: the table that the rules of `compiler/src/ir/gradient` are held against.

usage: gradients.py TABLE.npz
needs: pip install torch numpy

A case is a function of operands `x0`, `x1`, ...; the table has them as `CASE.x0`, a cotangent of the result as `CASE.g`, and the gradients of
`sum(result * g)` as `CASE.d0`, .... An operand without one is a constant. Random numbers depend on the case's name only: they are multiples of 1/256,
which compress well. `compiler/src/autodiff/tests/pytorch.rs` has a graph for each case and reads `tests/data/gradients/table.npz`.

Left out, since PyTorch differs on purpose:
- `scatter` and `index_put` with an index that comes twice: PyTorch gives every update a gradient, ours only the one that is kept;
- `max(dim)`, `min(dim)` and `median`: PyTorch gives one of equal elements all, our reductions are `amax` and `amin`, where they share;
- `clamp` at its borders, `hardtanh` and `relu6` among them: PyTorch 2.15 gives 0 where the borders are numbers and shares by halves where they are
  tensors, ours gives all to the operand: it is a value of the range like those inside, and at a border the clamp changes nothing;
- the positions of `topk` among equal elements, of which PyTorch promises nothing;
- the derivative of `pow` by its exponent at a negative base, which is NaN in both.
"""
import sys, zlib
import numpy as np, torch
import torch.nn.functional as F

F64 = torch.float64
TABLE = {}


class Fixed:
    """An operand that gets no gradient."""

    def __init__(self, value):
        self.value = value


def reals(values):
    return torch.tensor(values, dtype=F64)


def random_reals(rng, shape):
    return torch.from_numpy(np.asarray(np.round(rng.standard_normal(shape) * 256) / 256))


def operand(rng, given):
    """A shape means random numbers, a list these ones."""
    if isinstance(given, Fixed):
        return operand(rng, given.value)[0], False
    if isinstance(given, tuple):
        return random_reals(rng, given), True
    value = given if isinstance(given, torch.Tensor) else reals(given)
    return value, value.is_floating_point()


def case(name, function, *operands):
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    drawn = [operand(rng, given) for given in operands]
    values = [value.detach().clone().requires_grad_(wanted) for value, wanted in drawn]
    result = function(*values)
    g = random_reals(rng, tuple(result.shape))
    wanted = [value for value in values if value.requires_grad]
    gradients = iter(torch.autograd.grad(result, wanted, g))
    assert result.dtype == F64 and f"{name}.g" not in TABLE, name
    TABLE[f"{name}.g"] = g
    for i, value in enumerate(values):
        TABLE[f"{name}.x{i}"] = value.detach()
        if value.requires_grad:
            TABLE[f"{name}.d{i}"] = next(gradients)


POINTS = [-30.0, -7.5, -3.0, -2.25, -1.0, -0.75, -0.5, -0.25, 0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.25, 3.0, 7.5, 25.0]
UNIT = [-0.96875, -0.5, -0.125, 0.0, 0.25, 0.5, 0.9375]
POSITIVE = [0.0, 0.0625, 0.25, 1.0, 2.5, 40.0]

# Kinks, borders of domains and far tails are among the points of each op.
UNARY = {
    "neg": (torch.neg, POINTS), "abs": (torch.abs, POINTS), "sign": (torch.sign, POINTS),
    "floor": (torch.floor, POINTS), "ceil": (torch.ceil, POINTS), "round": (torch.round, POINTS), "trunc": (torch.trunc, POINTS),
    "sqrt": (torch.sqrt, POSITIVE), "rsqrt": (torch.rsqrt, POSITIVE), "recip": (torch.reciprocal, [-7.5, -0.25, 0.0, 0.5, 3.0]),
    "exp": (torch.exp, POINTS), "expm1": (torch.expm1, POINTS), "log": (torch.log, POSITIVE), "log1p": (torch.log1p, POSITIVE + [-0.5, -1.0]),
    "sin": (torch.sin, POINTS), "cos": (torch.cos, POINTS), "tan": (torch.tan, POINTS),
    "asin": (torch.asin, UNIT + [-1.0, 1.0]), "acos": (torch.acos, UNIT + [-1.0, 1.0]), "atan": (torch.atan, POINTS),
    "sinh": (torch.sinh, POINTS), "cosh": (torch.cosh, POINTS), "tanh": (torch.tanh, POINTS),
    "asinh": (torch.asinh, POINTS), "acosh": (torch.acosh, [1.0, 1.0625, 2.5, 40.0]), "atanh": (torch.atanh, UNIT + [-1.0, 1.0]),
    "erf": (torch.erf, POINTS), "relu": (F.relu, POINTS), "sigmoid": (torch.sigmoid, POINTS), "softplus": (F.softplus, POINTS),
    "softsign": (F.softsign, POINTS), "silu": (F.silu, POINTS), "mish": (F.mish, POINTS), "gelu": (F.gelu, POINTS),
    "gelu_tanh": (lambda x: F.gelu(x, approximate="tanh"), POINTS), "hard_swish": (F.hardswish, POINTS),
    "hard_sigmoid": (F.hardsigmoid, POINTS), "leaky_relu": (lambda x: F.leaky_relu(x, 0.25), POINTS),
    "elu": (lambda x: F.elu(x, 0.75), POINTS), "selu": (F.selu, POINTS), "celu": (lambda x: F.celu(x, 0.75), POINTS),
    "thresholded_relu": (lambda x: F.threshold(x, 0.75, 0.0), POINTS), "hard_shrink": (lambda x: F.hardshrink(x, 0.75), POINTS),
    "soft_shrink": (lambda x: F.softshrink(x, 0.75), POINTS), "clamp_to": (lambda x: x.clamp(-0.8125, 1.625), POINTS),
}


def element_wise():
    for name, (function, points) in UNARY.items():
        case(name, function, points)
    column, row = [[-2.0], [-0.75], [0.5], [1.5]], [-1.25, 0.5, 1.5]
    for name, function in [("add", torch.add), ("sub", torch.sub), ("mul", torch.mul), ("div", torch.div), ("max", torch.maximum), ("min", torch.minimum),
                           ("atan2", torch.atan2), ("rem", torch.fmod), ("mod", torch.remainder)]:
        case(name, function, column, row)
    case("mul_of_itself", lambda x: x * x, (3, 2))
    case("atan2_on_axes", torch.atan2, [0.0, 0.0, 0.0, 2.0, -2.0, 0.5], [0.0, 2.0, -2.0, 0.0, 0.0, -0.25])
    case("pow", torch.pow, [[0.25], [1.0], [2.5]], [-1.5, 0.0, 0.5, 3.0])
    case("pow_of_zero", torch.pow, [0.0] * 6, [0.0, 0.5, 1.0, 2.0, 3.0, -1.0])
    case("pow_of_negative", torch.pow, [[-2.5], [-1.0], [0.0], [0.75]], Fixed([0.0, 1.0, 2.0, 3.0, 4.0]))
    case("prelu", lambda x, w: F.prelu(x, w[:, 0]), [[[-2.0, 0.0, 1.5], [0.5, -0.25, 0.0]]], [[0.25], [-0.5]])
    case("select", torch.where, torch.tensor([[True], [False]]), (2, 3), (3,))
    low, high = [-1.0] * 3 + [1.0, 1.0, 2.5, 2.5, 2.5], [1.0] * 5 + [1.5, 1.5, 1.5]
    case("clamp", torch.clamp, [-2.0, 0.5, 1.5, 0.5, 1.5, 0.0, 2.0, 3.0], low, high)


def reductions():
    ties = [[1.5, 2.0, 2.0, -0.5], [3.0, 3.0, 3.0, 1.0], [-1.0, 0.0, 2.0, -1.0]]
    zeros = [[1.5, -2.0, 0.5, 3.0], [2.0, 0.0, -1.5, 0.25], [0.0, 2.5, 0.0, -3.0], [0.0, 0.0, 0.0, 1.0]]
    case("sum", lambda x: x.sum((0, 2)), (2, 3, 4))
    case("mean", lambda x: x.mean(1, keepdim=True), (2, 3, 4))
    case("amax", lambda x: x.amax(1), ties)
    case("amin", lambda x: x.amin((0, 1), keepdim=True), ties)
    case("prod", lambda x: x.prod(1), zeros)
    case("prod_of_all", lambda x: x.prod(), (2, 3))
    case("cum_sum", lambda x: x.cumsum(1), (2, 4))
    case("cum_sum_reverse", lambda x: x.flip(0).cumsum(0).flip(0), (4, 2))
    case("cum_sum_exclusive", lambda x: x.cumsum(1) - x, (2, 4))
    case("log_sum_exp", lambda x: x.logsumexp(1), (3, 4))
    case("variance", lambda x: x.var(1, unbiased=False), (3, 5))


def norms():
    case("softmax", lambda x: x.softmax(1), (2, 5, 3))
    case("log_softmax", lambda x: x.log_softmax(0), (4, 3))
    case("softmax_of_large", lambda x: x.softmax(1), [[800.0, 801.0, 799.5], [-900.0, -900.0, 0.0]])
    case("layer_norm", lambda x, w, b: F.layer_norm(x, (5,), w, b, 1e-5), (2, 3, 5), (5,), (5,))
    case("layer_norm_of_two_axes", lambda x, w, b: F.layer_norm(x, (3, 4), w, b, 1e-3), (2, 3, 4), (3, 4), (3, 4))
    case("rms_norm", lambda x, w: F.rms_norm(x, (5,), w, 1e-6), (2, 3, 5), (5,))


def products():
    for name, a, b in [("matrices", (2, 3), (3, 4)), ("batch_by_matrix", (2, 3, 4), (4, 2)), ("matrix_by_batch", (3, 4), (2, 4, 2)), ("broadcast", (2, 1, 3, 4), (3, 4, 2))]:
        case(f"matmul_{name}", torch.matmul, a, b)
    for name, function in [("", {}), ("_causal", {"is_causal": True}), ("_scaled", {"scale": 0.75})]:
        attention = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **function)
        case(f"attention{name}", attention, (2, 2, 4, 3), (2, 2, 5, 3), (2, 2, 5, 2))
    case("attention_masked", F.scaled_dot_product_attention, (2, 4, 3), (2, 5, 3), (2, 5, 2), (4, 5))


def padded(x, low, high):
    """Zeros on both sides of each spatial axis, as many as are named."""
    return F.pad(x, [n for pair in zip(reversed(low), reversed(high)) for n in pair])


def convolutions():
    def conv(name, x, w, strides=(1, 1), dilations=(1, 1), low=(0, 0), high=(0, 0), groups=1):
        case(f"conv2d_{name}", lambda x, w: F.conv2d(padded(x, low, high), w, None, strides, 0, dilations, groups), x, w)

    conv("plain", (2, 2, 5, 4), (3, 2, 3, 2))
    conv("padded", (1, 2, 4, 5), (2, 2, 3, 3), low=(1, 1), high=(1, 1))
    conv("strided", (2, 2, 7, 6), (2, 2, 3, 3), strides=(2, 3), low=(1, 0), high=(0, 2))
    conv("dilated", (1, 2, 7, 8), (3, 2, 2, 3), dilations=(3, 2), low=(1, 2), high=(2, 1))
    conv("strided_dilated", (1, 2, 9, 8), (2, 2, 3, 2), strides=(2, 2), dilations=(2, 3), low=(2, 1), high=(1, 0))
    conv("grouped", (2, 4, 5, 5), (6, 2, 3, 3), strides=(2, 1), low=(1, 1), high=(1, 1), groups=2)
    conv("depthwise", (2, 3, 6, 5), (3, 1, 3, 3), strides=(1, 2), low=(1, 1), high=(1, 1), groups=3)
    conv("depthwise_twofold", (1, 2, 5, 5), (4, 1, 2, 3), dilations=(2, 1), groups=2)
    conv("pointwise_strided", (2, 3, 5, 4), (4, 3, 1, 1), strides=(2, 2))
    last = lambda x, w: F.conv2d(x.permute(0, 3, 1, 2), w.permute(3, 2, 0, 1), None, 2, 1).permute(0, 2, 3, 1)
    case("conv2d_channels_last", last, (2, 5, 6, 2), (3, 3, 2, 4))
    case("conv1d", lambda x, w: F.conv1d(x, w, None, 2, 2, 2), (2, 3, 9), (2, 3, 3))
    case("conv3d", lambda x, w: F.conv3d(x, w, None, (1, 2, 1), 1), (1, 2, 3, 4, 3), (2, 2, 2, 3, 2))
    for name, shape, w, stride, pad, extra, groups, dilation in [
        ("plain", (2, 2, 3, 4), (2, 3, 3, 2), 1, 0, 0, 1, 1), ("strided", (1, 3, 3, 4), (3, 2, 3, 3), (2, 3), 1, 0, 1, 1),
        ("output_padded", (2, 2, 3, 3), (2, 2, 3, 3), 2, 1, 1, 1, 1), ("grouped", (1, 4, 3, 4), (4, 2, 3, 3), (2, 1), 1, (1, 0), 2, 1),
        ("dilated", (1, 2, 4, 3), (2, 2, 2, 3), (1, 2), (1, 2), 0, 1, (3, 2))]:
        function = lambda x, w: F.conv_transpose2d(x, w, None, stride, pad, extra, groups, dilation)
        case(f"conv_transpose2d_{name}", function, shape, w)


def volumes():
    def conv(name, x, w, strides=1, pads=0, dilations=1, groups=1):
        case(f"conv3d_{name}", lambda x, w: F.conv3d(x, w, None, strides, pads, dilations, groups), x, w)

    conv("padded", (2, 2, 3, 4, 3), (3, 2, 3, 3, 3), pads=1)
    conv("strided_dilated", (1, 2, 5, 6, 7), (2, 2, 2, 3, 2), (2, 1, 3), (1, 2, 1), (2, 1, 3))
    conv("grouped", (1, 4, 3, 3, 4), (4, 2, 2, 3, 1), groups=2, pads=(1, 0, 1))
    conv("depthwise", (1, 3, 4, 4, 3), (3, 1, 3, 3, 3), (1, 2, 1), 1, groups=3)
    function = lambda x, w: F.conv_transpose3d(x, w, None, (2, 1, 3), 1, (1, 0, 2), 2, (1, 2, 1))
    case("conv_transpose3d", function, (1, 2, 2, 3, 2), (2, 2, 3, 2, 3))
    case("max_pool3d", lambda x: F.max_pool3d(x, (3, 2, 2), (2, 1, 2), (1, 0, 1)), (1, 2, 4, 4, 5))
    for name, counts in [("", False), ("_with_pads", True)]:
        case(f"avg_pool3d{name}", lambda x: F.avg_pool3d(x, 3, 2, 1, True, counts), (1, 2, 4, 5, 6))


def samples():
    sample = lambda x, grid: F.grid_sample(x, grid, "bilinear", "zeros", True)
    case("grid_sample", sample, (1, 2, 4, 5), (1, 3, 4, 2))


def pools():
    case("max_pool2d", lambda x: F.max_pool2d(x, 2), (2, 2, 4, 6))
    case("max_pool2d_padded", lambda x: F.max_pool2d(x, 3, 2, 1), (2, 2, 6, 5))
    case("max_pool2d_overlapping", lambda x: F.max_pool2d(x, (3, 2), 1), (1, 2, 5, 4))
    case("max_pool2d_dilated", lambda x: F.max_pool2d(x, (2, 3), (1, 2), (1, 1), (2, 2)), (1, 2, 6, 7))
    case("max_pool2d_ceil", lambda x: F.max_pool2d(x, 3, 2, 0, 1, True), (1, 2, 6, 8))
    ties = [[[[1.0, 1.0, 0.5, 2.0], [1.0, 0.0, 2.0, 2.0], [-1.0, 1.0, 2.0, 0.0]]]]
    case("max_pool2d_ties", lambda x: F.max_pool2d(x, 2, 1), ties)
    case("max_pool1d", lambda x: F.max_pool1d(x, 3, 2, 1), (2, 2, 7))
    for name, counts in [("", False), ("_with_pads", True)]:
        case(f"avg_pool2d{name}", lambda x: F.avg_pool2d(x, 3, 2, 1, False, counts), (2, 2, 6, 5))
        case(f"avg_pool2d_overlapping{name}", lambda x: F.avg_pool2d(x, (3, 2), 1, (1, 1), False, counts), (1, 2, 5, 4))
        case(f"avg_pool2d_ceil{name}", lambda x: F.avg_pool2d(x, (2, 3), (2, 2), (0, 1), True, counts), (1, 2, 5, 6))


def index(values):
    return torch.tensor(values, dtype=torch.int64)


def reads_and_writes():
    at, twice = index([[0, 2, 1], [1, 1, 0]]), index([2, 0, 2])
    case("gather", lambda x, i: x.gather(1, i), (2, 4), index([[0, 3, 3], [1, 0, 1]]))
    case("index_select", lambda x, i: x.index_select(1, i), (2, 4, 3), twice)
    case("embedding", lambda w, i: F.embedding(i, w), (5, 3), index([[0, 4, 4], [2, 0, 4]]))
    case("index_tuples", lambda x, i: x[i[:, 0], i[:, 1]], (3, 4, 2), index([[0, 3], [2, 1], [0, 3]]))
    case("scatter_unique", lambda x, i, u: x.scatter(1, i, u), (2, 4), index([[0, 3], [2, 1]]), (2, 2))
    case("scatter_add", lambda x, i, u: x.scatter_add(0, i, u), (3, 4), at, (2, 3))
    case("index_add", lambda x, i, u: x.index_add(0, i, u), (4, 2), twice, (3, 2))
    case("scatter_amax", lambda x, i, u: x.scatter_reduce(0, i, u, "amax"), (3, 3), at, (2, 3))
    ties = ([1.0, 2.0, 0.5], index([0, 0, 1, 1, 2]), [1.0, 1.0, 2.5, 2.5, 0.25])
    case("scatter_amax_ties", lambda x, i, u: x.scatter_reduce(0, i, u, "amax"), *ties)
    case("scatter_amin_ties", lambda x, i, u: x.scatter_reduce(0, i, u, "amin"), *ties)
    case("scatter_prod", lambda x, i, u: x.scatter_reduce(0, i, u, "prod"), (3, 3), at, (2, 3))
    zeros = ([3.0, 0.0, 2.0], index([0, 0, 1, 2]), [0.0, 5.0, 2.0, 4.0])
    case("scatter_prod_zeros", lambda x, i, u: x.scatter_reduce(0, i, u, "prod"), *zeros)
    distinct = [[3.0, -1.0, 2.0, 0.5, 7.0], [-2.0, 6.0, 1.0, 4.0, 0.0]]
    case("topk", lambda x: x.topk(3, 1).values, distinct)
    case("topk_smallest", lambda x: x.topk(2, 0, largest=False).values, [list(row) for row in zip(*distinct)])
    case("sort", lambda x: x.sort(dim=1, descending=True, stable=True).values, distinct)


def views():
    for mode in ["reflect", "replicate", "circular"]:
        case(f"pad_{mode}", lambda x: F.pad(x, (2, 1, 0, 2), mode), (1, 2, 3, 4))
    case("pad_constant", lambda x: F.pad(x, (2, 1, 0, 3), value=0.5), (2, 3, 4))
    case("slice_with_steps", lambda x: x[1:7:2, ::3], (8, 5))
    case("slice_backwards", lambda x: x.flip(1)[:, ::2], (2, 5))
    case("concat", lambda x, y, z: torch.cat([x, y, z, x], 1), (2, 3), (2, 1), (2, 2))
    case("broadcast", lambda x: x.expand(2, 4, 3), (4, 1))
    case("transpose", lambda x: x.permute(2, 0, 1), (2, 3, 4))
    case("reshape", lambda x: x.reshape(4, 6), (2, 3, 4))
    case("lower_triangle", lambda x: x.tril(), (3, 4))


def mlp(x, w1, b1, w2, b2, w3, b3, labels):
    h = torch.tanh(F.linear(F.relu(F.linear(x, w1, b1)), w2, b2))
    return F.cross_entropy(F.linear(h, w3, b3), labels)


def lenet(x, w1, b1, w2, b2, w3, b3, labels):
    x = F.max_pool2d(F.relu(F.conv2d(x, w1, b1, padding=1)), 2)
    x = F.avg_pool2d(torch.tanh(F.conv2d(x, w2, b2)), 2)
    return F.cross_entropy(F.linear(x.flatten(1), w3, b3), labels)


def residual(x, w1, s1, b1, m1, v1, w2, s2, b2, m2, v2, w3):
    y = F.relu(F.batch_norm(F.conv2d(x, w1, stride=2, padding=1), m1, v1, s1, b1, eps=1e-5))
    y = F.batch_norm(F.conv2d(y, w2, padding=1), m2, v2, s2, b2, eps=1e-5)
    return F.relu(y + F.conv2d(x, w3, stride=2))


def transformer(x, s1, b1, w1, c1, w2, c2, s2, b2, w3, c3, w4, c4):
    n, length, width = x.shape
    heads = lambda t: t.reshape(n, length, 2, width // 2).transpose(1, 2)
    q, k, v = (heads(t) for t in F.linear(F.layer_norm(x, (width,), s1, b1), w1, c1).chunk(3, -1))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    x = x + F.linear(y.transpose(1, 2).reshape(n, length, width), w2, c2)
    return x + F.linear(F.gelu(F.linear(F.layer_norm(x, (width,), s2, b2), w3, c3)), w4, c4)


def gated(ids, table, s, w1, w2, w3):
    """RMS norm, a gated layer, and logits by the embedding table itself."""
    x = F.embedding(ids, table)
    y = F.rms_norm(x, (x.shape[-1],), s, 1e-6)
    x = x + F.linear(F.silu(F.linear(y, w1)) * F.linear(y, w2), w3)
    return F.linear(x, table)


def lstm(x, h, c, wx, wh, bx, bh):
    for step in x:
        h, c = torch.lstm_cell(step, (h, c), wx, wh, bx, bh)
    return torch.cat([h, c], 1)


def nets():
    labels = index([2, 0, 3, 3, 1])
    case("net_mlp", mlp, (5, 6), (7, 6), (7,), (5, 7), (5,), (4, 5), (4,), labels)
    case("net_lenet", lenet, (2, 1, 10, 10), (3, 1, 3, 3), (3,), (4, 3, 2, 2), (4,), (5, 16), (5,), index([4, 1]))
    norm = lambda: [(4,), (4,), Fixed((4,)), Fixed([0.5, 1.0, 1.5, 2.25])]
    case("net_residual", residual, (2, 3, 6, 6), (4, 3, 3, 3), *norm(), (4, 4, 3, 3), *norm(), (4, 3, 1, 1))
    case("net_transformer", transformer, (2, 5, 8), (8,), (8,), (24, 8), (24,), (8, 8), (8,), (8,), (8,), (12, 8), (12,), (8, 12), (8,))
    case("net_gated", gated, index([[1, 0, 5], [3, 1, 1]]), (6, 4), (4,), (7, 4), (7, 4), (4, 7))
    case("net_lstm", lstm, (3, 2, 3), (2, 4), (2, 4), (16, 3), (16, 4), (16,), (16,))
    batch_norm = lambda x, s, b: F.batch_norm(x, None, None, s, b, True, eps=1e-5)
    case("net_batch_norm", batch_norm, (3, 2, 2, 3), (2,), (2,))
    case("net_group_norm", lambda x, s, b: F.group_norm(x, 2, s, b, 1e-5), (2, 4, 2, 3), (4,), (4,))


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    for group in [element_wise, reductions, norms, products, convolutions, pools, volumes, samples, reads_and_writes, views, nets]:
        group()
    np.savez_compressed(sys.argv[1], **{name: value.numpy() for name, value in TABLE.items()})
    n_cases = sum(name.endswith(".g") for name in TABLE)
    print(f"{n_cases} cases by PyTorch {torch.__version__}")
    for name, value in TABLE.items():
        if torch.isnan(value).any() if value.is_floating_point() else False:
            print("NaN:", name)


main()
