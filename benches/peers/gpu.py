"""The rows of the `gpu` program for PyTorch on the same GPU: kernels eager and compiled, models eager, compiled and as CUDA graphs.

usage: gpu.py [kernels] [models]; both by default
Needs torch; torchvision and transformers for the models, which are left out without them. Prints tab-separated rows: name, mode, ms, rate;
of models also batch and type. TF32 is off, so that float32 means what it means there. Without PyTorch or a GPU it ends with exit code 3, and
with 2 if it does not understand its arguments, as the program does.
"""

import statistics
import sys

SECTIONS = ("kernels", "models")
WANTED = sys.argv[1:] or SECTIONS
if unknown := [word for word in WANTED if word not in SECTIONS]:
    print(f"unknown argument {unknown[0]!r}; known: {', '.join(SECTIONS)}", file=sys.stderr)
    sys.exit(2)
try:
    import torch
except ImportError:
    print("PyTorch is not installed; nothing was measured")
    sys.exit(3)
if not torch.cuda.is_available():
    print("no GPU for PyTorch; nothing was measured")
    sys.exit(3)

torch.backends.cuda.matmul.allow_tf32 = False
torch.backends.cudnn.allow_tf32 = False
F = torch.nn.functional


def median_ms(run, at_least_s=0.2):
    """Median time of one call by events, after warming up."""
    for _ in range(3):
        run()
    times, total = [], 0.0
    while total < at_least_s * 1e3 or len(times) < 10:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
        total += times[-1]
    return statistics.median(times)


def row(name, mode, ms, n_bytes=None, flops=None):
    rate = f"{n_bytes / ms / 1e6:.0f} GB/s" if n_bytes else f"{flops / ms / 1e9:.1f} TFLOP/s" if flops else ""
    print(f"{name}\t{mode}\t{ms:.3f} ms\t{rate}", flush=True)


def random(*shape, dtype=torch.float32):
    return torch.randn(*shape, device="cuda").to(dtype)


def kernels():
    """Name, function, operands, and bytes or operations, as in the program's families."""
    bf16, n = torch.bfloat16, 1024 << 18
    yield "map_f32", lambda x: x * torch.tanh(x), [random(n)], {"n_bytes": 8 * n}
    yield "map_bf16", lambda x: x * torch.tanh(x), [random(2 * n, dtype=bf16)], {"n_bytes": 8 * n}
    side = 8 * 512 * 4
    yield "reduce_rows_f32", lambda x: x.sum(1), [random(side, side)], {"n_bytes": 4 * side * side}
    yield "reduce_columns_f32", lambda x: x.sum(0), [random(side, side)], {"n_bytes": 4 * side * side}
    rows, columns = 16 * 512, 64 * 512
    yield "softmax_f32", lambda x: x.softmax(1), [random(rows, columns)], {"n_bytes": 8 * rows * columns}
    yield "arg_max_f32", lambda x: x.argmax(1), [random(rows, columns)], {"n_bytes": 4 * rows * columns}
    rows = 1024 * 352
    norm = [random(rows, 768), random(768), random(768)]
    yield "layer_norm_f32", lambda x, g, b: F.layer_norm(x, [768], g, b), norm, {"n_bytes": 8 * rows * 768}
    for name, size, dtype in [("matmul_f32", 4096, torch.float32), ("matmul_bf16_4096", 4096, bf16), ("matmul_bf16_8192", 8192, bf16)]:
        yield name, torch.matmul, [random(size, size, dtype=dtype) for _ in range(2)], {"flops": 2 * size**3}
    few = [random(2, 8192, dtype=bf16), random(8192, 8192, dtype=bf16)]
    yield "matmul_bf16_few_rows", torch.matmul, few, {"flops": 2 * 2 * 8192**2}
    long = [random(64, 4096 * 64, dtype=torch.float16), random(4096 * 64, 72, dtype=torch.float16)]
    yield "matmul_f16_long_sums", torch.matmul, long, {"flops": 2 * 64 * 72 * 4096 * 64}
    yield "matmul_bf16_batched", torch.matmul, [random(32, 1024, 1024, dtype=bf16) for _ in range(2)], {"flops": 2 * 32 * 1024**3}
    for name, length, dtype in [("attention_f32", 64 * 32, torch.float32), ("attention_bf16", 64 * 128, bf16)]:
        qkv = [random(1, 16, length, 128, dtype=dtype) for _ in range(3)]
        yield name, F.scaled_dot_product_attention, qkv, {"flops": 4 * 16 * length * length * 128}
    length = 64 * 128
    qkv = [random(1, 16, length, 128, dtype=bf16) for _ in range(3)]
    causal = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)
    yield "attention_bf16_causal", causal, qkv, {"flops": 2 * 16 * length * length * 128}
    length = 64 * 512
    qkv = [random(1, 32, n, 128, dtype=bf16) for n in (1, length, length)]
    yield "attention_bf16_one_query", F.scaled_dot_product_attention, qkv, {"n_bytes": 4 * 32 * length * 128}
    for name, dtype in [("conv_f32", torch.float32), ("conv_f16", torch.float16)]:
        image = [random(33, 128, 56, 56, dtype=dtype), random(128, 128, 3, 3, dtype=dtype)]
        yield name, lambda x, w: F.conv2d(x, w, padding=1), image, {"flops": 2 * 9 * 33 * 128 * 128 * 56 * 56}
    image, work = random(32, 256, 112, 112), {"n_bytes": 8 * 32 * 256 * 112 * 112}
    depthwise = lambda x, w: F.conv2d(x, w, padding=1, groups=256)
    yield "conv_f32_depthwise", depthwise, [image, random(256, 1, 3, 3)], work
    yield "max_pool_f32", lambda x: F.max_pool2d(x, 3, 1, 1), [image], work


def graphed(run):
    """The same as one launch of a captured graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def models():
    """Name, module and operands at batch 1 and 32, in float32 and bfloat16."""
    types = [("f32", torch.float32), ("bf16", torch.bfloat16)]
    try:
        from torchvision.models import resnet50

        for batch in (1, 32):
            for name, dtype in types:
                image = random(batch, 3, 224, 224, dtype=dtype)
                yield f"resnet50\t{batch}\t{name}", resnet50(weights=None).eval().cuda().to(dtype), [image]
    except ImportError:
        print("resnet50\tleft out: torchvision is not installed")
    try:
        from transformers import BertConfig, BertModel

        for batch in (1, 32):
            for name, dtype in types:
                model = BertModel(BertConfig(), add_pooling_layer=False).eval().cuda().to(dtype)
                tokens = torch.ones(batch, 128, dtype=torch.long, device="cuda")
                yield f"bert_base\t{batch}\t{name}", model, [tokens, torch.ones_like(tokens)]
    except ImportError:
        print("bert_base\tleft out: transformers is not installed")


@torch.inference_mode()
def main():
    print(f"device\t{torch.cuda.get_device_name()}, PyTorch {torch.__version__}")
    x, y = (torch.empty(1 << 30, dtype=torch.uint8, device="cuda") for _ in range(2))
    row("ceiling copy, read and written", "eager", median_ms(lambda: y.copy_(x)), n_bytes=2 << 30)
    del x, y
    for name, function, operands, work in kernels() if "kernels" in WANTED else ():
        row(name, "eager", median_ms(lambda: function(*operands)), **work)
        compiled = torch.compile(function)
        row(name, "compile", median_ms(lambda: compiled(*operands)), **work)
    for name, model, operands in models() if "models" in WANTED else ():
        row(name, "eager", median_ms(lambda: model(*operands), 2))
        row(name, "graph", median_ms(graphed(lambda: model(*operands)), 2))
        compiled = torch.compile(model, mode="reduce-overhead")
        row(name, "compile", median_ms(lambda: compiled(*operands), 2))


if __name__ == "__main__":
    main()
