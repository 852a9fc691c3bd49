"""Time gristmill against onnxruntime, side by side on the same machine.

usage: compare.py [--gristmill PATH] [--threads 1,2] [--rounds N] [--seconds S] MODEL_DIR ...
needs: pip install onnxruntime numpy onnx

Each MODEL_DIR holds model.onnx and test_data_set_0/input_N.pb. In every round each program times the model for S seconds, in
turn, so that drift of the machine falls on both; the table gives the median over rounds of each p50, and the median of the ratios
gristmill / onnxruntime, round by round. Below 1.0 gristmill is faster.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

import numpy as np
import onnx
import onnxruntime
from onnx import numpy_helper


def inputs_of(directory):
    found = {}
    data = os.path.join(directory, "test_data_set_0")
    for i in range(len([f for f in os.listdir(data) if f.startswith("input_")])):
        t = onnx.TensorProto()
        with open(os.path.join(data, f"input_{i}.pb"), "rb") as f:
            t.ParseFromString(f.read())
        found[t.name] = numpy_helper.to_array(t)
    return found


def session(directory, threads):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    return onnxruntime.InferenceSession(os.path.join(directory, "model.onnx"), options, providers=["CPUExecutionProvider"])


def peer_p50(run, seconds):
    for _ in range(3):
        run()
    times, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 3:
        t = time.perf_counter_ns()
        run()
        times.append(time.perf_counter_ns() - t)
    return statistics.median(times)


def ours(binary, directory, threads, seconds, callers=None):
    command = [binary, "bench", os.path.join(directory, "model.onnx"), "--test-data", os.path.join(directory, "test_data_set_0"),
               "--threads", str(threads), "--duration", str(seconds), "--json"]
    if callers is not None:
        command += ["--streams", str(callers)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(done.stderr.strip()[-400:])
    return json.loads(done.stdout)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--gristmill", default="target/release/gristmill")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.0)
    args = parser.parse_args()
    print(f"onnxruntime {onnxruntime.__version__}; p50 in ms, median of {args.rounds} rounds of {args.seconds} s each")
    print(f"{'model':<28} {'threads':>7} {'gristmill':>10} {'ort':>10} {'ratio':>6} {'compile ms':>10} {'peak MiB':>9}")
    for directory in args.models:
        name = os.path.basename(directory.rstrip("/"))
        feeds = inputs_of(directory)
        for threads in map(int, args.threads.split(",")):
            peer = session(directory, threads)
            run = lambda: peer.run(None, feeds)
            rounds = []
            try:
                for _ in range(args.rounds):
                    mine = ours(args.gristmill, directory, threads, args.seconds)
                    rounds.append((mine["p50_ns"], peer_p50(run, args.seconds), mine))
            except RuntimeError as e:
                print(f"{name:<28} {threads:>7} failed: {e}")
                continue
            median = statistics.median
            ratio = median(a / b for a, b, _ in rounds)
            last = rounds[-1][2]
            print(f"{name:<28} {threads:>7} {median(r[0] for r in rounds) / 1e6:>10.3f} {median(r[1] for r in rounds) / 1e6:>10.3f} "
                  f"{ratio:>6.2f} {last['compile_ns'] / 1e6:>10.1f} {last['peak_rss_bytes'] / 2**20:>9.1f}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
