"""Steps of training here and in PyTorch (eager, and torch.compile), in turn.

usage: training.py TRAINING [--threads N] [--rounds N] [--no-compile] [MODEL ...]
       training.py --alone MODEL (peak memory of a process with 30 eager steps, MiB)
needs: pip install torch; TRAINING is target/release/examples/training (cargo build --release -p gristmill-benches --example training)

Each round is a process of TRAINING, whose rows are medians of 30 steps, and 30 steps here of each kind; the figures are medians of rounds.
"""

import argparse
import resource
import statistics
import subprocess
import sys
import time

import torch
from torch import nn


def pooled(channels, filters, flat, units):
    layers, before = [], channels
    for n in filters:
        layers += [nn.Conv2d(before, n, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)]
        before = n
    return nn.Sequential(*layers, nn.Flatten(), *dense([flat, *units]))


def dense(units):
    layers = []
    for a, b in zip(units, units[1:]):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return layers[:-1]


class CifarLrn(nn.Module):
    """Overlapping pools padded as TensorFlow does for even extents, and local response normalisation."""

    def __init__(self):
        super().__init__()
        self.conv0, self.conv1 = nn.Conv2d(3, 64, 5, padding=2), nn.Conv2d(64, 64, 5, padding=2)
        self.lrn = nn.LocalResponseNorm(9, alpha=0.001, beta=0.75, k=1.0)
        self.pool = nn.Sequential(nn.ConstantPad2d((0, 1, 0, 1), float("-inf")), nn.MaxPool2d(3, 2))
        self.dense = nn.Sequential(nn.Flatten(), *dense([2304, 384, 192, 10]))

    def forward(self, x):
        x = self.lrn(self.pool(torch.relu(self.conv0(x))))
        return self.dense(self.pool(self.lrn(torch.relu(self.conv1(x)))))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm0, self.norm1 = nn.LayerNorm(128), nn.LayerNorm(128)
        self.qkv, self.output = nn.Linear(128, 3 * 128), nn.Linear(128, 128)
        self.mlp = nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128))

    def forward(self, x):
        batch, length, width = x.shape
        qkv = self.qkv(self.norm0(x)).split(width, 2)
        q, k, v = (t.view(batch, length, 4, 32).transpose(1, 2) for t in qkv)
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.output(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm1(x))


class Lstm(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.dense = nn.LSTM(28, 128, batch_first=True), nn.Linear(128, 10)

    def forward(self, x):
        return self.dense(self.lstm(x)[0][:, -1])


def video():
    layers, before = [], 3
    for filters, stride in [(16, 1), (32, 2), (64, 2)]:
        layers += [nn.Conv3d(before, filters, 3, stride, 1, bias=False), nn.BatchNorm3d(filters), nn.ReLU()]
        layers += [nn.MaxPool3d((1, 2, 2))] if before == 3 else []
        before = filters
    return nn.Sequential(*layers, nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(before, 10))


class Gpt(nn.Module):
    """nanoGPT's net for a CPU (its readme), without tied weights."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(65, 128)
        self.places = nn.Parameter(torch.randn(64, 128) * 0.02)
        self.blocks = nn.Sequential(*(Block() for _ in range(4)))
        self.norm, self.head = nn.LayerNorm(128), nn.Linear(128, 65)

    def forward(self, x):
        return self.head(self.norm(self.blocks(self.tokens(x) + self.places)))


MODELS = {
    "mlp": (lambda: nn.Sequential(*dense([784, 512, 256, 10])), (128, 784)),
    "lenet": (lambda: pooled(1, [6, 16], 784, [120, 84, 10]), (128, 1, 28, 28)),
    "cifar": (lambda: pooled(3, [64, 64], 2304, [384, 192, 10]), (128, 3, 24, 24)),
    "cifar_lrn": (CifarLrn, (128, 3, 24, 24)),
    "lstm": (Lstm, (128, 28, 28)),
    "video": (video, (8, 3, 8, 56, 56)),
    "gpt": (Gpt, (12, 64)),
}


def stepper(name, is_compiled):
    make, shape = MODELS[name]
    net = make()
    optimiser = torch.optim.Adam(net.parameters(), fused=True)
    if name == "gpt":
        x = torch.arange(shape[0] * shape[1]).reshape(shape) % 65
        label = x.flatten()
    else:
        x, label = torch.randn(shape), torch.arange(shape[0]) % 10

    def loss():
        return nn.functional.cross_entropy(net(x).flatten(0, -2), label)

    forward = torch.compile(loss) if is_compiled else loss

    def step():
        optimiser.zero_grad()
        forward().backward()
        optimiser.step()

    return step


def median_ms(step):
    times = []
    for _ in range(30):
        start = time.perf_counter()
        step()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def alone(name):
    """Peak memory with its libraries, and what the steps take of it, MiB."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    median_ms(stepper(name, False))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(peak // 1024, (peak - before) // 1024)


def main():
    words = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    words.add_argument("training")
    words.add_argument("models", nargs="*", default=list(MODELS))
    words.add_argument("--threads", type=int, default=1)
    words.add_argument("--rounds", type=int, default=5)
    words.add_argument("--no-compile", action="store_true")
    args = words.parse_args()
    torch.set_num_threads(args.threads)
    kinds = ["eager"] if args.no_compile else ["eager", "compile"]
    for name in args.models:
        steps = {kind: stepper(name, kind == "compile") for kind in kinds}
        for step in steps.values():
            for _ in range(3):
                step()
        ours, theirs, first = [], {kind: [] for kind in kinds}, []
        for _ in range(args.rounds):
            command = [args.training, name, "--threads", str(args.threads)]
            said = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
            ours.append(float(said[1]))
            first.append(float(said[6]))
            peak = int(said[9])
            for kind, step in steps.items():
                theirs[kind].append(median_ms(step))
        child = [sys.executable, __file__, "--alone", name]
        whole, steps_alone = subprocess.run(child, check=True, capture_output=True, text=True).stdout.split()
        memory = f"peak {peak} MiB, eager {whole} MiB ({steps_alone} above its libraries)"
        own = statistics.median(ours)
        others = {kind: statistics.median(times) for kind, times in theirs.items()}
        beside = ", ".join(f"{kind} {ms:.3f}" for kind, ms in others.items())
        print(f"{name}\t{own:.3f} ms\t{beside}\tratio to the best {own / min(others.values()):.2f}\tfirst step after {statistics.median(first):.2f} s\t{memory}", flush=True)


if __name__ == "__main__":
    alone(sys.argv[2]) if sys.argv[1:2] == ["--alone"] else main()
