"""Random convolutions over one to three axes beside onnxruntime: of f32, of 8-bit integers, of dequantised tensors, and transposed ones.

usage: all_convolutions.py GRISTMILL N_MODELS [FIRST_SEED]
needs: pip install onnx onnxruntime

Groups, depthwise filters, strides, dilations, uneven pads and automatic ones, zero points per tensor and per channel. ConvInteger must be equal
to the bit; f32 may differ by 2e-5 of the largest magnitude; a requantised result by one step, where it is a tie but for rounding, which is
counted. Seeds take turns between one thread, two, and CPUs with AVX2 and with SSE. Prints each difference and refusal, and counts; exits 1 when
there was one.
"""
import os, subprocess, sys, tempfile
import numpy as np, onnx, onnxruntime
from onnx import helper, numpy_helper

BOUND = 2e-5
VARIANTS = [["--threads", "1"], ["--threads", "2"], ["--threads", "1", "--target-cpu", "x86-64-v3"], ["--threads", "1", "--target-cpu", "x86-64-v2"]]
KINDS = ["Conv", "ConvTranspose", "ConvInteger", "QDQ"]


class Case:
    """A random model with input `x` and result `y`."""

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)
        pick = self.pick
        self.kind, self.n = KINDS[seed % len(KINDS)], pick([1, 2, 2, 3])
        limit = [40, 14, 8][self.n - 1]
        self.groups = pick([1, 1, 1, 2, 4])
        of_group, filters = pick([1, 2, 3, 4, 7, 8, 16, 20, 33]), pick([1, 2, 3, 5, 8, 16, 17, 32, 70])
        if pick(range(4)) == 0:
            self.groups, of_group, filters = pick([3, 8, 16, 19, 40]), 1, pick([1, 1, 1, 2])
        self.channels, self.filters = self.groups * of_group, self.groups * filters
        axes = range(self.n)
        self.size = [pick(range(1, limit)) for _ in axes]
        self.window = [pick([1, 1, 2, 3, 3, 4, 5, 7]) for _ in axes]
        self.strides, self.dilations = [pick([1, 1, 1, 2, 3]) for _ in axes], [pick([1, 1, 1, 2, 3]) for _ in axes]
        if pick(range(6)) == 0: self.strides = list(self.window)
        self.pads = [pick([0, 0, 1, 2, 3]) for _ in range(2 * self.n)]
        for a in axes:  # The window must fit; a transposed result must not vanish.
            reach = (self.window[a] - 1) * self.dilations[a] + 1
            self.size[a] = max(self.size[a], reach - self.pads[a] - self.pads[a + self.n], 1)
            if self.kind == "ConvTranspose" and (self.size[a] - 1) * self.strides[a] + reach <= self.pads[a] + self.pads[a + self.n]:
                self.pads[a] = self.pads[a + self.n] = 0
        self.attributes = {"group": self.groups, "strides": self.strides, "dilations": self.dilations, "pads": self.pads}
        if self.kind != "ConvTranspose" and pick(range(5)) == 0:
            del self.attributes["pads"]
            self.attributes["auto_pad"] = ["SAME_UPPER", "SAME_LOWER", "VALID"][pick(range(3))]
            if self.attributes["auto_pad"] != "VALID": self.dilations[:] = [1] * self.n
            self.size = [max(s, (k - 1) * d + 1) for s, k, d in zip(self.size, self.window, self.dilations)]
        self.constants, self.nodes = [], []
        getattr(self, "of_" + self.kind.lower())()

    def pick(self, values):
        return int(self.rng.choice(list(values)))

    def constant(self, name, array):
        self.constants.append(numpy_helper.from_array(np.asarray(array), name))
        return name

    def node(self, op, inputs, output, **attributes):
        self.nodes.append(helper.make_node(op, inputs, [output], **attributes))
        return output

    def normal(self, *shape):
        return self.rng.standard_normal(shape).astype(np.float32)

    def bytes(self, dtype, shape):
        info = np.iinfo(dtype)
        return self.rng.integers(info.min, info.max, shape, dtype, endpoint=True)

    def images(self):
        return (self.pick([1, 1, 2]), self.channels, *self.size)

    def of_conv(self):
        self.x = self.normal(*self.images())
        w = self.constant("w", self.normal(self.filters, self.channels // self.groups, *self.window))
        bias = [self.constant("b", self.normal(self.filters))] if self.pick([0, 1]) else []
        self.node("Conv", ["x", w, *bias], "y", **self.attributes)

    def of_convtranspose(self):
        self.x = self.normal(*self.images())
        w = self.constant("w", self.normal(self.channels, self.filters // self.groups, *self.window))
        most = [max(s, d) - 1 for s, d in zip(self.strides, self.dilations)]
        self.attributes["output_padding"] = [self.pick(range(m + 1)) if self.pick([0, 0, 1]) else 0 for m in most]
        self.node("ConvTranspose", ["x", w], "y", **self.attributes)

    def weights(self, dtype):
        """Bytes and their zero points, one or one for each filter."""
        w = self.bytes(dtype, (self.filters, self.channels // self.groups, *self.window))
        shape = [(), (self.filters,)][self.pick([0, 1])]
        zero = self.bytes(dtype, shape) if self.pick([0, 1]) else np.zeros(shape, dtype)
        return w, zero

    def of_convinteger(self):
        self.x = self.bytes(np.uint8, self.images())
        w, zero = self.weights([np.uint8, np.int8][self.pick([0, 1])])
        operands = ["x", self.constant("w", w), self.constant("xz", self.bytes(np.uint8, ())), self.constant("wz", zero)]
        operands = operands[:self.pick([2, 3, 4, 4])]
        self.node("ConvInteger", operands, "y", **self.attributes)
        self.by_filter = len(operands) == 4 and zero.ndim == 1

    def sums(self):
        """Of ConvInteger with a zero point for each filter, which onnxruntime lacks: by its Conv of f32, where that is exact."""
        known = {c.name: numpy_helper.to_array(c).astype(np.float32) for c in self.constants}
        w = known["w"] - known["wz"].reshape(-1, *[1] * (self.n + 1))
        if w[0].size * 255 * 255 > 2**24: raise OverflowError("sums beyond 2^24")
        node = helper.make_node("Conv", ["x", "w"], ["y"], **self.attributes)
        of = lambda name, shape: helper.make_tensor_value_info(name, 1, shape)
        graph = helper.make_graph([node], "sums", [of("x", self.x.shape), of("w", w.shape)], [of("y", [None] * self.x.ndim)])
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
        session = onnxruntime.InferenceSession(model.SerializeToString())
        return session.run(None, {"x": self.x - known["xz"], "w": w})[0].astype(np.int32)

    def dequantized(self, name, zero, scale, **axis):
        operands = [name, self.constant(name + "_scale", scale), self.constant(name + "_zero", zero)]
        return self.node("DequantizeLinear", operands, name + "_real", **axis)

    def of_qdq(self):
        dtype = [np.uint8, np.int8][self.pick([0, 1])]
        self.x = self.bytes(dtype, self.images())
        w, _ = self.weights(np.int8)
        self.constant("w", w)
        per_channel = self.pick([0, 1])
        scale = self.rng.uniform(0.002, 0.02, self.filters if per_channel else ()).astype(np.float32)
        x = self.dequantized("x", self.bytes(dtype, ()), np.float32(0.031))
        w = self.dequantized("w", np.zeros(scale.shape, np.int8), scale, axis=0)
        y = self.node("Conv", [x, w], "sums", **self.attributes)
        if self.pick([0, 1]): y = self.node("Relu", [y], "positive")
        n_terms = self.channels // self.groups * int(np.prod(self.window))
        step = np.float32(0.02 * n_terms**0.5)
        self.node("QuantizeLinear", [y, self.constant("step", step), self.constant("point", self.bytes(dtype, ()))], "y")

    def model(self):
        of = lambda name, dtype, shape: helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), shape)
        result = {"ConvInteger": np.int32, "QDQ": self.x.dtype}.get(self.kind, np.float32)
        inputs, results = [of("x", self.x.dtype, self.x.shape)], [of("y", result, [None] * self.x.ndim)]
        graph = helper.make_graph(self.nodes, "convolution", inputs, results, self.constants)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)

    def expected(self):
        if self.kind == "ConvInteger" and self.by_filter: return self.sums()
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        return onnxruntime.InferenceSession(self.model().SerializeToString(), options).run(None, {"x": self.x})[0]

    def difference(self, got, want):
        """What is wrong with a result, and how many of its elements differ by one step."""
        if got.shape != want.shape or got.dtype != want.dtype: return f"{got.dtype}{list(got.shape)} instead of {want.dtype}{list(want.shape)}", 0
        if self.kind == "ConvInteger": return ("" if np.array_equal(got, want) else "differs"), 0
        if self.kind == "QDQ":
            steps = np.abs(got.astype(int) - want.astype(int))
            return (f"differs by {steps.max()} steps" if steps.size and steps.max() > 1 else ""), int((steps == 1).sum())
        if not want.size: return "", 0
        error = np.abs(got - want).max() / max(np.abs(want).max(), 1e-30)
        return ("" if error <= BOUND else f"differs by {error:.1e} of the scale"), 0


def main():
    gristmill, n = os.path.abspath(sys.argv[1]), int(sys.argv[2])
    first = int(sys.argv[3]) if len(sys.argv) > 3 else 1
    onnxruntime.set_default_logger_severity(4)
    n_problems, n_steps, n_requantized, refused_there = 0, 0, 0, 0
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(first, first + n):
            case, flags = Case(seed), VARIANTS[seed // len(KINDS) % len(VARIANTS)]
            try:
                want = case.expected()
            except Exception as e:  # onnxruntime has no kernel, or refuses the attributes.
                refused_there += 1
                if os.environ.get("VERBOSE"): print(seed, case.kind, str(e)[:200])
                continue
            onnx.save(case.model(), os.path.join(folder, "m.onnx"))
            np.savez(os.path.join(folder, "in.npz"), x=case.x)
            command = [gristmill, "run", "m.onnx", "--inputs", "in.npz", "--outputs", "out.npz", *flags]
            done = subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=60)
            if done.returncode == 0:
                problem, steps = case.difference(np.load(os.path.join(folder, "out.npz"))["y"], want)
                n_steps, n_requantized = n_steps + steps, n_requantized + (want.size if case.kind == "QDQ" else 0)
            else:
                problem = done.stderr.strip()[-300:]
            slow = [line for line in done.stderr.splitlines() if "generated loops" in line]
            if slow and not problem: problem = slow[0][:300]
            if problem:
                n_problems += 1
                print(f"{seed} {case.kind} {flags} {case.x.shape} {case.attributes}: {problem}", flush=True)
    print(f"{n} models ({refused_there} refused by onnxruntime): {n_problems} problems; {n_steps} of {n_requantized} requantised elements differ by one step")
    sys.exit(n_problems > 0)


if __name__ == "__main__":
    main()
