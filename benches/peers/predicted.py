"""Compare predicted with measured times of models, and of the clusters in them, on one thread of this machine.

usage: predicted.py GRISTMILL MODELS [KIND ...]
Calibrates, then runs `bench --profile` on each MODELS/KIND/model.onnx (kinds.py writes them) with a cache folder of its own. A cluster counts
once for each signature; clusters below 20 us are counted for their model only, since steps of their size are measured with the clock's cost.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile

LEAST_NS = 20_000


def gristmill(*words):
    done = subprocess.run([GRISTMILL, *words], env=ENV, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(done.stderr)
    return done.stdout


def clusters():
    """Predicted over measured time of each cluster of at least 20 us, by class."""
    with open(os.path.join(CACHE, "times.json")) as f:
        found = json.load(f)["times"]
    ratios = {}
    for row in found:
        measured = statistics.median(row["recent_ns"])
        if measured >= LEAST_NS:
            ratios.setdefault(row["class"], []).append(row["analytic_ns"] / measured)
    return ratios


def model(path):
    """Predicted and measured milliseconds."""
    placed = json.loads(gristmill("place", path, "--threads", "1", "--json"))
    timed = json.loads(gristmill("bench", path, "--threads", "1", "--json"))
    return placed["makespan_ns"] / 1e6, timed["p50_ns"] / 1e6


def quantile(values, q):
    return sorted(values)[min(int(q * len(values)), len(values) - 1)]


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    GRISTMILL, models = sys.argv[1:3]
    kinds = sys.argv[3:] or sorted(k for k in os.listdir(models) if os.path.isdir(os.path.join(models, k)))
    paths = {kind: os.path.join(models, kind, "model.onnx") for kind in kinds}
    with tempfile.TemporaryDirectory() as CACHE:
        ENV = {**os.environ, "GRISTMILL_CACHE_DIR": CACHE}
        print(gristmill("calibrate").strip())
        print("| model | predicted ms | measured ms | ratio |\n|---|---|---|---|")
        ratios = []
        for kind, path in paths.items():
            predicted, measured = model(path)
            ratios.append(predicted / measured)
            print(f"| {kind} | {predicted:.2f} | {measured:.2f} | {ratios[-1]:.2f} |", flush=True)
        print("within 15 %:", sum(abs(r - 1) <= 0.15 for r in ratios), "of", len(ratios))
        # Measured times correct predictions, so they come last.
        for path in paths.values():
            gristmill("bench", path, "--threads", "1", "--profile", "--json")
        print("\n| clusters | number | p10 | p50 | p90 |\n|---|---|---|---|---|")
        for name, ratios in sorted(clusters().items()):
            p10, p50, p90 = (quantile(ratios, q) for q in (0.1, 0.5, 0.9))
            print(f"| {name} | {len(ratios)} | {p10:.2f} | {p50:.2f} | {p90:.2f} |")
