"""Adam's step over 10 million parameters, here and in PyTorch (fused), in turn.

usage: optimiser.py STATE [--threads N] [--rounds N]
needs: pip install torch; STATE is target/release/examples/state (cargo build --release -p gristmill-benches --example state)

Each round is a process of STATE, whose row `adam` is the median of 15 steps, and 15 steps here; the figures are medians of rounds.
"""

import argparse
import statistics
import subprocess
import time

import torch


def step(n=10_000_000):
    weights = torch.nn.Parameter(torch.zeros(n))
    weights.grad = torch.full((n,), 0.25)
    optimiser = torch.optim.Adam([weights], lr=1e-3, fused=True)
    for _ in range(3): optimiser.step()
    return optimiser.step


def main():
    words = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    words.add_argument("state")
    words.add_argument("--threads", type=int, default=1)
    words.add_argument("--rounds", type=int, default=7)
    args = words.parse_args()
    torch.set_num_threads(args.threads)
    ours, theirs, run = [], [], step()
    for _ in range(args.rounds):
        times = []
        for _ in range(15):
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
        theirs.append(statistics.median(times) * 1e3)
        said = subprocess.run([args.state, "--threads", str(args.threads)], check=True, capture_output=True, text=True).stdout
        ours += [float(line.split()[1]) for line in said.splitlines() if line.startswith("adam")]
    ours, theirs = statistics.median(ours), statistics.median(theirs)
    print(f"{args.threads} threads: {ours:.2f} ms, PyTorch {torch.__version__} {theirs:.2f}: {ours / theirs:.2f}")


if __name__ == "__main__":
    main()
