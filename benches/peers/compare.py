"""Time gristmill against onnxruntime and OpenVINO, side by side on the same machine.

usage: compare.py [--gristmill PATH] [--threads 1,2] [--rounds N] [--seconds S] [--kinds DIR] [--json FILE] [--without PEER] [MODEL_DIR ...]
needs: pip install onnxruntime numpy onnx; OpenVINO (pip install openvino) is left out where it is not installed

Each MODEL_DIR holds model.onnx and test_data_set_0/input_N.pb; --kinds adds all such directories in DIR (those of kinds.py, say). In every
round each program times the model for S seconds, in turn, so that drift of the machine falls on all; the table gives the median over rounds
of each p50, and the median of the ratios gristmill / fastest peer, round by round. Below 1.0 gristmill is faster than every peer. All run in
f32. The last line has the geometric means of the ratios by number of threads.

Before and after each round a cache line goes to and fro between two cores, which shows where the cores of a virtual machine are at that time:
`same` level-3 cache (some 45 ns a round trip), `diff`erent ones (some 350 ns), `mixed` if it changed in between, `-` if it cannot be
measured (no gcc, or one core). --json keeps every round. A peer that crashes ends the comparison, so --without leaves one out.
"""

import argparse
import collections
import importlib.metadata
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time

import numpy as np
import onnx
import onnxruntime
from onnx import numpy_helper

try:
    import openvino
except ImportError:
    openvino = None

PAUSE = 0.1  # seconds between programs: threads of onnxruntime spin for some 35 ms after a run, those of OpenVINO for 1, and then sleep
APART = 150  # ns of a round trip from which on two cores share no cache

ROUND_TRIP = r"""
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { BATCHES = 20, TRIPS = 1000 };
static _Alignas(128) atomic_int turn;

static void pin(int core) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(core, &set);
    if (sched_setaffinity(0, sizeof set, &set)) exit(1);
}

static void *answer(void *core) {
    pin(*(int *)core);
    for (int i = 0; i <= BATCHES * TRIPS; i++) {
        while (atomic_load_explicit(&turn, memory_order_acquire) != 1);
        atomic_store_explicit(&turn, 0, memory_order_release);
    }
    return 0;
}

static void trip(void) {
    atomic_store_explicit(&turn, 1, memory_order_release);
    while (atomic_load_explicit(&turn, memory_order_acquire) != 0);
}

static int order(const void *a, const void *b) { return (*(double *)a > *(double *)b) - (*(double *)a < *(double *)b); }

int main(int argc, char **argv) {
    int other = atoi(argv[argc - 1]);
    double times[BATCHES];
    pthread_t thread;
    pin(atoi(argv[1]));
    if (pthread_create(&thread, 0, answer, &other)) return 1;
    trip();  /* until the other thread is there */
    for (int b = 0; b < BATCHES; b++) {
        struct timespec s, e;
        clock_gettime(CLOCK_MONOTONIC, &s);
        for (int i = 0; i < TRIPS; i++) trip();
        clock_gettime(CLOCK_MONOTONIC, &e);
        times[b] = ((e.tv_sec - s.tv_sec) * 1e9 + (e.tv_nsec - s.tv_nsec)) / TRIPS;
    }
    pthread_join(thread, 0);
    qsort(times, BATCHES, sizeof *times, order);
    printf("%.1f\n", times[BATCHES / 2]);  /* batches in which another program had a core are far off */
    return 0;
}
"""


class Cores:
    """Measures the round trip of a cache line between the first two cores."""

    def __init__(self, folder):
        self.command, cores = None, sorted(os.sched_getaffinity(0))[:2]
        source, binary = os.path.join(folder, "trip.c"), os.path.join(folder, "trip")
        with open(source, "w") as f:
            f.write(ROUND_TRIP)
        try:
            subprocess.run(["gcc", "-O2", "-pthread", "-o", binary, source], check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            return
        if len(cores) == 2: self.command = [binary, *map(str, cores)]

    def ns(self):
        if self.command is None: return None
        try:
            return float(subprocess.run(self.command, check=True, capture_output=True, text=True, timeout=10).stdout)
        except (OSError, ValueError, subprocess.SubprocessError):
            return None


def tag(before, after):
    if before is None or after is None: return "-"
    if (before < APART) != (after < APART): return "mixed"
    return "same" if before < APART else "diff"


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


def by_onnxruntime(directory, threads, feeds):
    peer = session(directory, threads)
    return lambda: peer.run(None, feeds)


def by_openvino(directory, threads, feeds):
    options = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "f32", "ENABLE_CPU_PINNING": False}
    request = openvino.Core().compile_model(os.path.join(directory, "model.onnx"), "CPU", options).create_infer_request()
    return lambda: request.infer(feeds, share_inputs=True, share_outputs=True)


PEERS = {"onnxruntime": by_onnxruntime} | ({"openvino": by_openvino} if openvino else {})


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


def in_turn(args, cores, directory, threads):
    """The rounds of a model on a number of threads, and notes of peers that cannot run it."""
    feeds, peers, notes, rounds = inputs_of(directory), {}, [], []
    for name, make in PEERS.items():
        try:
            peers[name] = make(directory, threads, feeds)
            peers[name]()
        except Exception as e:
            peers.pop(name, None)
            notes.append(f"{name} failed: {str(e).strip()[-200:]}")
    for _ in range(args.rounds):
        time.sleep(PAUSE)
        before = cores.ns()
        mine = ours(args.gristmill, directory, threads, args.seconds)
        p50 = {"gristmill": mine["p50_ns"]}
        for name, run in peers.items():
            time.sleep(PAUSE)
            p50[name] = peer_p50(run, args.seconds)
        time.sleep(PAUSE)
        after = cores.ns()
        theirs = [p50[name] for name in peers]
        rounds.append({"p50_ns": p50, "ratio": p50["gristmill"] / min(theirs) if theirs else None, "trip_ns": [before, after],
                       "state": tag(before, after), "compile_ns": mine["compile_ns"], "peak_rss_bytes": mine["peak_rss_bytes"]})
    return rounds, notes


def row(rounds):
    middle = lambda values, form: format(statistics.median(values), form) if values else "-"
    times = [middle([r["p50_ns"][name] / 1e6 for r in rounds if name in r["p50_ns"]], ".3f") for name in ["gristmill", "onnxruntime", "openvino"]]
    ratio = middle([r["ratio"] for r in rounds if r["ratio"] is not None], ".2f")
    states = collections.Counter(r["state"] for r in rounds)
    return (" ".join(f"{t:>11}" for t in times) + f" {ratio:>6} {rounds[-1]['compile_ns'] / 1e6:>10.1f} {rounds[-1]['peak_rss_bytes'] / 2**20:>9.1f}  "
            + ", ".join(state if state == "-" else f"{state} {n}" for state, n in states.most_common()))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*")
    parser.add_argument("--gristmill", default="target/release/gristmill")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--kinds", metavar="DIR")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--without", action="append", default=[], choices=sorted(PEERS))
    args = parser.parse_args()
    for name in args.without:
        PEERS.pop(name, None)
    if args.kinds:
        args.models += [path for path in sorted(os.path.join(args.kinds, d) for d in os.listdir(args.kinds))
                        if os.path.exists(os.path.join(path, "model.onnx"))]
    if not args.models: parser.error("no models")
    if not openvino: print("openvino is not installed, and left out")
    versions = {name: importlib.metadata.version(name) for name in PEERS}
    print(f"{', '.join(f'{name} {v}' for name, v in versions.items())}; p50 in ms, median of {args.rounds} rounds of {args.seconds} s each")
    print(f"{'model':<22} {'threads':>7} {'gristmill':>11} {'onnxruntime':>11} {'openvino':>11} {'ratio':>6} {'compile ms':>10} {'peak MiB':>9}  cores")
    kept, ratios = [], collections.defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        cores = Cores(folder)
        for directory in args.models:
            name = os.path.basename(directory.rstrip("/"))
            for threads in map(int, args.threads.split(",")):
                try:
                    rounds, notes = in_turn(args, cores, directory, threads)
                except RuntimeError as e:
                    print(f"{name:<22} {threads:>7} failed: {e}", flush=True)
                    continue
                print(f"{name:<22} {threads:>7} {row(rounds)}", *(f"  {note}" for note in notes), sep="\n", flush=True)
                known = [r["ratio"] for r in rounds if r["ratio"] is not None]
                if known: ratios[threads].append(statistics.median(known))
                kept.append({"model": name, "threads": threads, "rounds": rounds, "notes": notes})
                if args.json:
                    with open(args.json, "w") as f:
                        json.dump({"versions": versions, "seconds": args.seconds, "rows": kept}, f, indent=1)
    if ratios: print("geometric mean of ratios: " + ", ".join(
        f"{math.exp(statistics.fmean(map(math.log, r))):.3f} on {t} thread{'s' * (t > 1)} ({len(r)} models)" for t, r in ratios.items()))


if __name__ == "__main__":
    sys.exit(main())
