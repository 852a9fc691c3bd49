"""Tokens per second of a decoder whose cache has a fixed capacity, here and in onnxruntime, in turn.

usage: decoder.py OUTDIR DECODER [--threads N] [--capacity N] [--tokens N] [--rounds N]
needs: pip install onnxruntime numpy onnx; DECODER is target/release/examples/decoder (cargo build --release -p gristmill-benches --example decoder)

Six layers of width 384 as the kind decoder_small of kinds.py, one token per run: it is written at its position into the caches of keys and
values, [1, 6, CAPACITY, 64] each, by ScatterND, and a mask hides what is behind it. onnxruntime runs with IO binding, each cache bound as input
and as output at one address, so that its ScatterND copies nothing either. Greedy tokens of both must be the same.
"""

import argparse
import os
import subprocess
import sys
import time

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper

from kinds import LOWEST, Net


def decoder(capacity, width=384, heads=6, inner=1024, vocabulary=8192, layers=6):
    g = Net()
    head = width // heads
    angles = np.outer(np.arange(capacity), 10000.0**(-np.arange(0, head, 2) / head))
    token = g.input("token", np.zeros((1, 1), np.int64))
    at = g.input("position", np.zeros(1, np.int64))
    cos, sin = [g.op("Gather", np.concatenate([f(angles)] * 2, -1).astype(np.float32), at, axis=0) for f in (np.cos, np.sin)]
    mask = g.op("Where", g.op("LessOrEqual", np.arange(capacity), at), 0.0, LOWEST)
    # Rows [0, h, position] of the caches.
    places = np.zeros((1, heads, 1, 3), np.int64)
    places[0, :, 0, 1] = np.arange(heads)
    last = np.zeros((1, heads, 1, 3), np.int64)
    last[..., 2] = 1
    places = g.op("Add", places, g.op("Mul", last, at))

    def rotate(x):
        turned = g.op("Concat", g.op("Neg", g.slice(x, head // 2, 2**63 - 1, 3)), g.slice(x, 0, head // 2, 3), axis=-1)
        return g.op("Add", g.op("Mul", x, cos), g.op("Mul", turned, sin))

    def kept(name, rows):
        cache = g.input("past_" + name, np.zeros((1, heads, capacity, head), np.float32))
        new = g.op("ScatterND", cache, places, rows)
        g.nodes[-1].output[0] = "present_" + name
        g.output("present_" + name, 1, heads, capacity, head)
        return "present_" + name

    x = g.op("Gather", g.normal(vocabulary, width), token, axis=0)
    for i in range(layers):
        y = g.rmsnorm(x, width)
        q, k, v = [g.heads(g.linear(y, width, width, bias=False), 1, heads, head) for _ in range(3)]
        k, v = kept(f"key_{i}", rotate(k)), kept(f"value_{i}", v)
        scores = g.op("MatMul", g.op("Mul", rotate(q), head**-0.5), g.transpose(k, 0, 1, 3, 2))
        y = g.joined(g.op("MatMul", g.op("Softmax", g.op("Add", scores, mask), axis=-1), v), 1, width)
        x = g.op("Add", x, g.linear(y, width, width, bias=False))
        y = g.rmsnorm(x, width)
        y = g.op("Mul", g.silu(g.linear(y, width, inner, bias=False)), g.linear(y, width, inner, bias=False))
        x = g.op("Add", x, g.linear(y, inner, width, bias=False))
    logits = g.linear(g.rmsnorm(x, width), width, vocabulary, bias=False)
    g.outputs.append(helper.make_tensor_value_info(logits, TensorProto.FLOAT, (1, 1, vocabulary)))
    best = g.op("ArgMax", logits, axis=-1, keepdims=0)
    g.outputs[-1] = helper.make_tensor_value_info(best, TensorProto.INT64, (1, 1))
    return g


def peer(path, threads, tokens):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    caches = [i for i in session.get_inputs() if i.name.startswith("past_")]
    values = {i.name: onnxruntime.OrtValue.ortvalue_from_numpy(np.zeros(i.shape, np.float32)) for i in caches}
    best = [o.name for o in session.get_outputs() if not o.name.startswith("present_")]
    token, at = np.zeros((1, 1), np.int64), np.zeros(1, np.int64)

    def run():
        for value in values.values(): value.update_inplace(np.zeros(value.shape(), np.float32))
        binding = session.io_binding()
        for name, value in values.items():
            binding.bind_ortvalue_input(name, value)
            binding.bind_ortvalue_output(name.replace("past_", "present_"), value)
        binding.bind_output(best[0])
        token[:], seen = 1, []
        start = time.perf_counter()
        for i in range(tokens):
            at[0] = i
            binding.bind_cpu_input("token", token)
            binding.bind_cpu_input("position", at)
            session.run_with_iobinding(binding)
            token[0, 0] = binding.get_outputs()[-1].numpy()[0, 0]
            seen.append(int(token[0, 0]))
        return tokens / (time.perf_counter() - start), seen

    run()
    return run


def main():
    words = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    words.add_argument("outdir")
    words.add_argument("decoder")
    for name, default in [("threads", 1), ("capacity", 1024), ("tokens", 128), ("rounds", 7)]:
        words.add_argument("--" + name, type=int, default=default)
    args = words.parse_args()
    os.makedirs(args.outdir, exist_ok=True)
    path = os.path.join(args.outdir, f"decoder_{args.capacity}.onnx")
    onnx.save(decoder(args.capacity).model("decoder"), path)
    onnx.checker.check_model(path)
    run = peer(path, args.threads, args.tokens)
    ours, theirs = [], []
    for _ in range(args.rounds):
        rate, want = run()
        theirs.append(rate)
        command = [args.decoder, path, "--threads", str(args.threads), "--tokens", str(args.tokens)]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
        ours.append(float(said[0]))
        if [int(t) for t in said[1:]] != want: sys.exit("the tokens differ")
    ours, theirs = np.median(ours), np.median(theirs)
    print(f"capacity {args.capacity}, {args.threads} threads: {ours:.0f} tokens/s, onnxruntime {theirs:.0f}: {ours / theirs:.2f}")


if __name__ == "__main__":
    main()
