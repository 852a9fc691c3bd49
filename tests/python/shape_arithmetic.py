"""Random arithmetic on shapes beside onnxruntime: models whose extents are computed from sizes of inputs, half of them with an extent that the data decides.

usage: shape_arithmetic.py GRISTMILL N_MODELS [FIRST_SEED]
needs: pip install onnx onnxruntime

Each model runs at several sizes, 0, 1 and large ones among them. Prints each difference and each refusal with its seed, and counts; exits 1 when there was a
difference. `KEEP=DIR` in the environment writes the models and inputs of these to DIR.
"""
import collections, os, re, subprocess, sys, tempfile
from concurrent.futures import ThreadPoolExecutor
import numpy as np, onnx, onnxruntime
from onnx import TensorProto, helper, numpy_helper

OPSET = 18
SIZES = [0, 1, 2, 3, 4, 5, 7, 8, 13, 33]


class Model:
    """A random graph: `scalars` are names of int64 tensors of shape [1], `outputs` pairs of a name and an element type."""

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)
        self.nodes, self.constants, self.outputs, self.n = [], [], [], 0
        self.largest = set()
        self.inputs = [("x", ["N", "M"]), ("z", [self.pick(["N", "P", 3, 1]), self.pick(["M", 4])])]
        self.is_open = self.rng.random() < 0.5
        self.scalars = []
        self.build()

    def pick(self, values):
        return values[self.rng.integers(len(values))]

    def name(self):
        self.n += 1
        return f"v{self.n}"

    def add(self, op, inputs, n_outputs=1, **attributes):
        outputs = [self.name() for _ in range(n_outputs)]
        self.nodes.append(helper.make_node(op, inputs, outputs, **attributes))
        return outputs[0] if n_outputs == 1 else outputs

    def constant(self, value, dtype=np.int64):
        name = self.name()
        self.constants.append(numpy_helper.from_array(np.array(value, dtype), name))
        return name

    def number(self):
        """A constant: small, of any sign, sometimes large."""
        r = self.rng.random()
        if r < 0.8:
            return self.constant([int(self.rng.integers(-6, 7))])
        value = self.pick([100, -100, 2**31 - 1, 2**63 - 1, -(2**63) + 1])
        name = self.constant([value])
        if value > 1000:
            self.largest.add(name)
        return name

    def divisor(self):
        return self.constant([self.pick([1, 2, 3, 4, 7])])

    def scalar(self):
        return self.pick(self.scalars) if self.rng.random() < 0.8 else self.constant([int(self.rng.integers(-6, 7))])

    def first_scalars(self):
        for name, _ in self.inputs:
            shape = self.add("Shape", [name])
            for axis in range(2):
                kind = self.rng.integers(3)
                if kind == 0:
                    self.scalars.append(self.add("Gather", [shape, self.constant([axis])]))
                elif kind == 1:
                    self.scalars.append(self.add("Slice", [shape, self.constant([axis]), self.constant([axis + 1])]))
                else:
                    self.scalars.append(self.add("Shape", [name], start=axis, end=axis + 1))
        size = self.add("Size", ["x"])
        self.scalars.append(self.add("Reshape", [size, self.constant([1])]))
        if self.is_open:
            self.open_scalars()

    def open_scalars(self):
        kind = self.rng.integers(3)
        zero = self.constant(0.0, np.float32)
        if kind == 0:
            found = self.add("NonZero", [self.add("Greater", ["x", zero])])
            count = self.add("Shape", [found], start=1, end=2)
        elif kind == 1:
            mask = self.add("Greater", [self.add("ReduceSum", ["x", self.constant([1])], keepdims=0), zero])
            found = self.add("Compress", ["x", mask], axis=0)
            count = self.add("Shape", [found], start=0, end=1)
        else:
            found = self.add("Unique", [self.add("Round", ["x"])])
            if isinstance(found, list):
                found = found[0]
            count = self.add("Shape", [found])
        if self.rng.random() < 0.5:
            self.outputs.append((found, TensorProto.INT64 if kind == 0 else TensorProto.FLOAT))
        if self.rng.random() < 0.7:
            self.scalars.append(count)

    def arithmetic(self):
        kind = self.rng.integers(14)
        a, b = self.scalar(), self.scalar()
        if kind < 6:
            return self.add(["Add", "Sub", "Mul", "Min", "Max", "Add"][kind], [a, b])
        if kind == 6:
            return self.add("Div", [a, self.divisor()])
        if kind == 7:
            return self.add("Mod", [a, self.divisor()])
        if kind == 8:
            return self.add("Neg", [a])
        if kind == 9:
            order = self.pick(["Less", "Greater", "Equal", "LessOrEqual", "GreaterOrEqual"])
            return self.add("Where", [self.add(order, [a, b]), self.scalar(), self.scalar()])
        if kind == 10:
            d = self.divisor()
            up = self.add("Sub", [self.add("Add", [a, d]), self.constant([1])])
            return self.add("Div", [up, d])
        if kind == 11:
            real = self.add("Cast", [a], to=TensorProto.FLOAT)
            op = self.pick(["Sqrt", "Ceil", "Floor"])
            if op == "Sqrt":
                real = self.add("Sqrt", [self.add("Abs", [real])])
            else:
                real = self.add(op, [self.add("Div", [real, self.constant([2.0], np.float32)])])
            return self.add("Cast", [real], to=TensorProto.INT64)
        if kind == 12:
            return self.add("ReduceMax" if self.rng.random() < 0.5 else "ReduceProd",
                            [self.add("Concat", [a, b], axis=0)], keepdims=1)
        return self.add("Abs", [a])

    def bounded(self, low, high):
        """A scalar between two numbers."""
        s = self.scalar()
        if self.rng.random() < 0.5:
            return self.add("Min", [self.add("Max", [s, self.constant([low])]), self.constant([high])])
        return self.add("Add", [self.add("Mod", [s, self.constant([high - low + 1])]), self.constant([low])])

    def consumer(self, x):
        kind = self.rng.integers(13)
        axis = int(self.rng.integers(2))
        if kind < 3:
            bounds = [self.scalar() if self.rng.random() < 0.7 else self.number() for _ in range(2)]
            # onnxruntime takes the largest integers for the beginning of an axis where the step is negative; the standard does not.
            is_endless = bounds[1] in self.largest
            steps = [1, 1, 1, 2, 3] if is_endless else [1, 1, 1, 2, 3, -1, -2]
            return self.add("Slice", [x, *bounds, self.constant([axis - 2 * int(self.rng.integers(2))]), self.constant([self.pick(steps)])])
        if kind == 3:
            return self.add("Tile", [x, self.add("Concat", [self.bounded(0, 3), self.bounded(1, 2)], axis=0)])
        if kind == 4:
            low, high = (-1, 3) if self.rng.random() < 0.3 else (0, 3)
            pads = self.add("Concat", [self.bounded(low, high) for _ in range(4)], axis=0)
            return self.add("Pad", [x, pads], mode=self.pick(["constant", "constant", "edge"]))
        if kind == 5:
            scalar = lambda s: self.add("Squeeze", [s, self.constant([0])])
            step = self.constant(self.pick([1, 1, 2, -1]))
            return self.add("Cast", [self.add("Range", [scalar(self.bounded(-3, 9)), scalar(self.bounded(-3, 20)), step])], to=TensorProto.FLOAT)
        if kind == 6:
            shape = self.add("Concat", [self.bounded(0, 9), self.bounded(0, 5)], axis=0)
            return self.add("ConstantOfShape", [shape], value=numpy_helper.from_array(np.array([2], np.float32)))
        if kind == 7:
            return self.add("Reshape", [x, self.constant([-1])])
        if kind == 8:
            rows = self.add("Shape", [x], start=0, end=1)
            split = self.pick([[rows, self.constant([-1])], [self.constant([-1]), self.constant([1])],
                               [self.constant([0]), self.constant([1]), self.constant([-1])]])
            return self.add("Reshape", [x, self.add("Concat", split, axis=0)])
        if kind == 9:
            column = self.add("Slice", [x, self.constant([0]), self.constant([1]), self.constant([1])])
            rows = self.add("Shape", [column], start=0, end=1)
            return self.add("Expand", [column, self.add("Concat", [self.bounded(1, 2), rows, self.bounded(1, 6)], axis=0)])
        if kind == 10:
            parts = self.add("Split", [x], 2, axis=axis, num_outputs=2)
            if self.rng.random() < 0.5:
                self.outputs.append((parts[0], TensorProto.FLOAT))
            return parts[1]
        if kind == 11:
            return self.add("Concat", [x, self.pick([x, self.add("Neg", [x])])], axis=axis)
        image = self.add("Unsqueeze", [x, self.constant([0, 1])])
        sizes = self.add("Concat", [self.constant([1, 1]), self.bounded(1, 9), self.bounded(1, 9)], axis=0)
        return self.add("Resize", [image, "", "", sizes], mode=self.pick(["nearest", "linear"]))

    def in_branch(self, x):
        """A consumer in one branch of an If on the data."""
        condition = self.add("Greater", [self.add("ReduceSum", ["x"], keepdims=0), self.constant(0.0, np.float32)])
        outer, self.nodes = self.nodes, []
        first = self.consumer(x)
        then, self.nodes = self.nodes, []
        out = self.name()
        orelse = [helper.make_node("Reshape", [x, self.constant([-1])], [out])]
        flat = self.name()
        then.append(helper.make_node("Reshape", [first, self.constant([-1])], [flat]))
        self.nodes = outer
        value = lambda name: helper.make_tensor_value_info(name, TensorProto.FLOAT, None)
        return self.add("If", [condition], then_branch=helper.make_graph(then, "then", [], [value(flat)]),
                        else_branch=helper.make_graph(orelse, "else", [], [value(out)]))

    def build(self):
        self.first_scalars()
        for _ in range(self.rng.integers(1, 7)):
            self.scalars.append(self.arithmetic())
        for _ in range(self.rng.integers(1, 4)):
            x = self.pick(["x", "x", "z"])
            y = self.in_branch(x) if self.rng.random() < 0.1 else self.consumer(x)
            kind = self.rng.integers(4)
            if kind != 0:
                self.outputs.append((y, TensorProto.FLOAT))
            if kind < 2:
                self.outputs.append((self.add("Shape", [y]), TensorProto.INT64))
            if kind == 2:
                self.outputs.append((self.add("Size", [y]), TensorProto.INT64))
        if self.rng.random() < 0.5:
            self.outputs.append((self.pick(self.scalars), TensorProto.INT64))

    def proto(self):
        seen, outputs = set(), []
        for name, dtype in self.outputs:
            if name not in seen and name not in dict(self.inputs):
                outputs.append(helper.make_tensor_value_info(name, dtype, None))
                seen.add(name)
        inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, dims) for name, dims in self.inputs]
        graph = helper.make_graph(self.nodes, "g", inputs, outputs, self.constants)
        return helper.make_model(graph, ir_version=9, opset_imports=[helper.make_opsetid("", OPSET)])

    def data(self):
        sizes = {s: int(self.pick(SIZES)) for s in "NMP"}
        shape = lambda dims: [sizes.get(d, d) for d in dims]
        return {name: np.round(self.rng.standard_normal(shape(dims)) * 2).astype(np.float32) for name, dims in self.inputs}


def options():
    o = onnxruntime.SessionOptions()
    o.log_severity_level, o.intra_op_num_threads = 4, 1
    o.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return o


def run(gristmill, seed, folder):
    """Outcomes of one model at several sizes: pairs of a kind and a text."""
    model = Model(seed)
    proto = model.proto()
    if not proto.graph.output:
        return []
    try:
        session = onnxruntime.InferenceSession(proto.SerializeToString(), options())
    except Exception as e:
        return [("no model", str(e)[:120])]
    path = os.path.join(folder, f"{seed}.onnx")
    onnx.save(proto, path)
    found = []
    for i in range(3):
        inputs = model.data()
        try:
            expected = session.run(None, inputs)
        except Exception:
            continue
        if sum(e.size for e in expected) > 1 << 22:
            continue
        given, results = os.path.join(folder, f"{seed}.{i}.npz"), os.path.join(folder, f"{seed}.{i}.out.npz")
        np.savez(given, **inputs)
        flags = ["--opt-level", "0"] if seed % 4 == 3 else []
        try:
            ended = subprocess.run([gristmill, "run", path, "--inputs", given, "--outputs", results, *flags], capture_output=True, text=True, timeout=60)
        except subprocess.TimeoutExpired:
            found.append(("hang", f"seed {seed} {shapes(inputs)}"))
            continue
        kind, text = judged(ended, results, [o.name for o in proto.graph.output], expected)
        found.append((kind, f"seed {seed} {shapes(inputs)} {text}"))
        if kind != "same" and "KEEP" in os.environ:
            os.makedirs(os.environ["KEEP"], exist_ok=True)
            onnx.save(proto, os.path.join(os.environ["KEEP"], f"{seed}.onnx"))
            np.savez(os.path.join(os.environ["KEEP"], f"{seed}.{i}.npz"), **inputs)
        for file in (given, results):
            if os.path.exists(file):
                os.remove(file)
    os.remove(path)
    return found


def shapes(inputs):
    return ", ".join(f"{n}{list(v.shape)}" for n, v in inputs.items())


def judged(ended, results, names, expected):
    if ended.returncode != 0:
        kind = {2: "refused", 3: "refused"}.get(ended.returncode, "failed")
        return kind, f"exit {ended.returncode}: {ended.stderr.strip()[:300]}"
    found = np.load(results)
    for name, e in zip(names, expected):
        f = found[name]
        if f.shape != e.shape or f.dtype != e.dtype or not np.allclose(f, e, 1e-4, 1e-4, equal_nan=True):
            return "wrong", f"{name}: {f.shape} {f.ravel()[:6]}, expected {e.shape} {e.ravel()[:6]}"
    return "same", ""


def main(gristmill, n, first=0):
    counts, kinds = collections.Counter(), collections.Counter()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
        for outcomes in pool.map(lambda seed: run(gristmill, seed, folder), range(first, first + n)):
            for kind, text in outcomes:
                counts[kind] += 1
                if kind not in ("same", "no model"):
                    kinds[re.sub(r"[0-9]+|\"[^\"]*\"", "_", text.split(": ", 1)[-1])[:120]] += 1
                    print(kind, text, flush=True)
    for text, number in kinds.most_common(40):
        print(f"{number:6} {text}")
    print(dict(counts))
    return counts["wrong"] + counts["failed"] + counts["hang"] > 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), *map(int, sys.argv[3:4])))
