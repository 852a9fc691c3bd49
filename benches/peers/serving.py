"""Many callers, and many shapes: gristmill against onnxruntime, in turn on the same machine.

usage: serving.py streams [--gristmill PATH] [--threads T] [--callers 1,2,4] [--rounds N] [--seconds S] MODEL_DIR ...
       serving.py shapes [--shapes PATH] [--threads T] MODEL batch=1,seq=128 ...
needs: pip install onnxruntime numpy onnx

`streams`: each number of callers runs the model at once, all on one session of onnxruntime, or one compiled model of gristmill; inferences
per second, p50 and p99 in ms. A ratio of onnxruntime's rate to ours below 1.0: gristmill is faster.
`shapes`: first, least and median time in ms of each shape, in the given order, by one session of a model with symbolic dims;
gristmill's by target/release/examples/shapes.
"""

import argparse
import os
import statistics
import subprocess
import sys
import threading
import time

import numpy as np
import onnxruntime

from compare import inputs_of, ours, session


def quantile(times, q):
    return sorted(times)[round((len(times) - 1) * q)]


def peer_streams(run, callers, seconds):
    """Rate, p50 and p99 of calls by as many threads; onnxruntime lets go of the interpreter's lock while it runs."""
    run()
    times, end = [], time.perf_counter() + seconds
    def call():
        own = []
        while time.perf_counter() < end or not own:
            t = time.perf_counter_ns()
            run()
            own.append(time.perf_counter_ns() - t)
        times.extend(own)
    started = time.perf_counter()
    threads = [threading.Thread(target=call) for _ in range(callers)]
    for t in threads: t.start()
    for t in threads: t.join()
    return len(times) / (time.perf_counter() - started), quantile(times, 0.5), quantile(times, 0.99)


def streams(args):
    print(f"onnxruntime {onnxruntime.__version__}; {args.threads} threads, median of {args.rounds} rounds of {args.seconds} s each")
    print(f"{'model':<20} {'callers':>7} {'gristmill/s':>11} {'p50':>8} {'p99':>8} {'ort/s':>9} {'p50':>8} {'p99':>8} {'ratio':>6}")
    for directory in args.models:
        feeds, peer = inputs_of(directory), session(directory, args.threads)
        for callers in map(int, args.callers.split(",")):
            rows = []
            for _ in range(args.rounds):
                mine = ours(args.gristmill, directory, args.threads, args.seconds, callers)
                theirs = peer_streams(lambda: peer.run(None, feeds), callers, args.seconds)
                rows.append((mine["inferences_per_s"], mine["p50_ns"], mine["p99_ns"], *theirs))
            m = [statistics.median(column) for column in zip(*rows)]
            ratio = statistics.median(r[3] / r[0] for r in rows)
            name = os.path.basename(directory.rstrip("/"))
            print(f"{name:<20} {callers:>7} {m[0]:>11.1f} {m[1] / 1e6:>8.2f} {m[2] / 1e6:>8.2f} "
                  f"{m[3]:>9.1f} {m[4] / 1e6:>8.2f} {m[5] / 1e6:>8.2f} {ratio:>6.2f}", flush=True)


def shapes(args):
    model, *wanted = args.models
    subprocess.run([args.shapes, model, "--threads", str(args.threads), *wanted], check=True)
    peer = session(os.path.dirname(model), args.threads)
    print(f"onnxruntime {onnxruntime.__version__}")
    for shape in wanted:
        dims = {name: int(size) for name, size in (d.split("=") for d in shape.split(","))}
        def tensor(i):
            dtype = {"tensor(int64)": np.int64, "tensor(float)": np.float32}[i.type]
            return np.ones([dims.get(d, d) for d in i.shape], dtype)
        feeds = {i.name: tensor(i) for i in peer.get_inputs()}
        times = []
        for _ in range(16):
            t = time.perf_counter_ns()
            peer.run(None, feeds)
            times.append((time.perf_counter_ns() - t) / 1e6)
        resident = next(int(l.split()[1]) // 1024 for l in open("/proc/self/status") if l.startswith("VmRSS"))
        print(f"{shape:<24}{times[0]:>12.2f}{min(times[1:]):>12.2f}{statistics.median(times[1:]):>12.2f}{'':>12}{resident:>10}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["streams", "shapes"])
    parser.add_argument("models", nargs="+")
    parser.add_argument("--gristmill", default="target/release/gristmill")
    parser.add_argument("--shapes", default="target/release/examples/shapes")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--callers", default="1,2,4")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.0)
    args = parser.parse_args()
    streams(args) if args.what == "streams" else shapes(args)


if __name__ == "__main__":
    sys.exit(main())
