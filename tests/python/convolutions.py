"""Random convolutions of 3x3 windows beside onnxruntime: dilated, padded unevenly, with element-wise ops behind them.

usage: convolutions.py GRISTMILL N_MODELS [FIRST_SEED]
needs: pip install onnx onnxruntime

Each model runs on one thread and on two, on two logical devices, and for a CPU with AVX2. The difference may be 2e-5 of the largest magnitude
that the results and the convolution's own output have. Prints each difference and each refusal with its seed, and counts; exits 1 when there was one.
"""
import os, subprocess, sys, tempfile
import numpy as np, onnx, onnxruntime
from onnx import helper, numpy_helper

BOUND = 2e-5
VARIANTS = [["--threads", "1"], ["--threads", "2"], ["--devices", "cpu:2"], ["--threads", "1", "--target-cpu", "x86-64-v3"]]
EPILOGUES = ["Relu", "Sigmoid", "HardSwish", "Clip", "Residual", "Scale"]


class Case:
    """A random model; `c` is the output of its convolution, `y` the result."""

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)
        pick = lambda values: int(self.rng.choice(values))
        self.channels, self.filters = pick([16, 17, 24, 32, 48, 64, 96]), pick([8, 16, 20, 32, 33, 64, 80])
        self.batch, self.size = pick([1, 1, 2]), [pick(range(7, 30)), pick(range(7, 30))]
        self.dilations, self.strides = [pick([1, 1, 1, 2, 3]), pick([1, 1, 2])], [1, 1] if pick(range(8)) else [2, 1]
        self.pads = [pick(range(4)) for _ in range(4)]
        self.feeds = {"x": np.maximum(self.normal(self.batch, self.channels, *self.size), 0)}
        weights = self.normal(self.filters, self.channels, 3, 3) / np.sqrt(9 * self.channels).astype(np.float32)
        self.constants = [numpy_helper.from_array(weights, "w"), numpy_helper.from_array(self.normal(self.filters), "b")]
        operands = ["x", "w", "b"][: 2 + pick([0, 1])]
        self.nodes = [helper.make_node("Conv", operands, ["c"], dilations=self.dilations, pads=self.pads, strides=self.strides)]
        value = "c"
        for i in range(pick(range(4))):
            value = self.epilogue(EPILOGUES[pick(range(len(EPILOGUES)))], value, i)
        self.nodes.append(helper.make_node("Identity", [value], ["y"]))

    def normal(self, *shape):
        return self.rng.standard_normal(shape).astype(np.float32)

    def extent(self, axis):
        reach = 2 * self.dilations[axis] + 1
        return (self.size[axis] + self.pads[axis] + self.pads[axis + 2] - reach) // self.strides[axis] + 1

    def epilogue(self, kind, value, i):
        operands, result = [value], f"v{i}"
        if kind in ("Residual", "Scale"):
            shape = [self.batch, self.filters, self.extent(0), self.extent(1)] if kind == "Residual" else [self.filters, 1, 1]
            operands.append(f"r{i}")
            self.feeds[f"r{i}"] = self.normal(*shape)
        if kind == "Clip":
            for bound, v in (("low", -0.5), ("high", 0.75)):
                operands.append(f"{bound}{i}")
                self.constants.append(numpy_helper.from_array(np.float32(v), f"{bound}{i}"))
        op = {"Residual": "Add", "Scale": "Mul"}.get(kind, kind)
        self.nodes.append(helper.make_node(op, operands, [result]))
        return result

    def model(self, outputs):
        inputs = [helper.make_tensor_value_info(name, 1, x.shape) for name, x in self.feeds.items()]
        results = [helper.make_tensor_value_info(name, 1, [None] * 4) for name in outputs]
        graph = helper.make_graph(self.nodes, "convolution", inputs, results, self.constants)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)

    def expected(self):
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        return onnxruntime.InferenceSession(self.model(["y", "c"]).SerializeToString(), options).run(None, self.feeds)


def check(gristmill, seed, folder):
    """Problems of a case, and the number of runs in which minimal filtering summed it."""
    case = Case(seed)
    onnx.save(case.model(["y"]), os.path.join(folder, "m.onnx"))
    np.savez(os.path.join(folder, "in.npz"), **case.feeds)
    want, sums = case.expected()
    scale = max(np.abs(want).max(), np.abs(sums).max())
    problems, n_filtered = [], 0
    for flags in VARIANTS:
        command = [gristmill, "run", "m.onnx", "--inputs", "in.npz", "--outputs", "out.npz", "-v", *flags]
        done = subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=60)
        if done.returncode != 0:
            problems.append(f"{seed} {flags}: {done.stderr.strip()[-300:]}")
            continue
        n_filtered += "filtering" in done.stderr
        got = np.load(os.path.join(folder, "out.npz"))["y"]
        error = np.abs(got - want).max() / scale if got.shape == want.shape else np.inf
        if not error <= BOUND:
            problems.append(f"{seed} {flags}: differs by {error:.1e} of the scale")
    return problems, n_filtered


def main():
    gristmill, n = os.path.abspath(sys.argv[1]), int(sys.argv[2])
    first = int(sys.argv[3]) if len(sys.argv) > 3 else 1
    onnxruntime.set_default_logger_severity(4)
    n_problems = n_filtered = 0
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(first, first + n):
            problems, filtered = check(gristmill, seed, folder)
            n_problems, n_filtered = n_problems + len(problems), n_filtered + filtered
            print("\n".join(problems), end="\n" if problems else "", flush=True)
    print(f"{n} models, {n * len(VARIANTS)} runs, {n_filtered} by minimal filtering: {n_problems} problems")
    sys.exit(n_problems > 0)


if __name__ == "__main__":
    main()
