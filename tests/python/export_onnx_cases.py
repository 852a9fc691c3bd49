"""Write the ONNX package's own backend test cases to disk, for the conformance runner in `tests/tests/`.

usage: export_onnx_cases.py OUTDIR
needs: tests/python/requirements.txt

Every case becomes

    OUTDIR/KIND/NAME/model.onnx
    OUTDIR/KIND/NAME/case.json
    OUTDIR/KIND/NAME/test_data_set_K/{input,output}_N.pb

KIND is `node` (all of `onnx.backend.test.case.node.collect_testcases`), `light`, `pytorch-converted`, `pytorch-operator` or
`simple` (the data files in the package). `case.json` holds `rtol`, `atol`, `opset` and, for every `input_N` and `output_N`, the
value's name and what the file holds: a `tensor` (TensorProto), `sequence` (SequenceProto), `optional` (OptionalProto) or `map`
(MapProto). OUTDIR/index.json counts the cases of each kind and names the onnx release. Two runs write the same bytes. OUTDIR
is replaced.
"""

import json
import os
import shutil
import sys
import warnings

import numpy as np
import onnx
from onnx import numpy_helper
from onnx.backend.test.case import node
from onnx.backend.test.loader import DATA_DIR

# What the package's runner uses where a case does not say otherwise.
RTOL, ATOL = 1e-3, 1e-7
DATA_KINDS = ("pytorch-converted", "pytorch-operator", "simple")


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    out = sys.argv[1]
    shutil.rmtree(out, ignore_errors=True)
    warnings.filterwarnings("ignore")
    np.random.seed(0)
    counts = {"node": export_node_cases(out), "light": export_light_cases(out)}
    for kind in DATA_KINDS:
        counts[kind] = export_data_cases(out, kind)
    write_json(os.path.join(out, "index.json"), {"onnx": onnx.__version__, "cases": counts})
    print(", ".join(f"{kind}: {n}" for kind, n in counts.items()))


def export_node_cases(out):
    cases = node.collect_testcases()
    for case in cases:
        root = os.path.join(out, "node", case.name)
        write(os.path.join(root, "model.onnx"), serialize(case.model))
        for k, (inputs, outputs) in enumerate(case.data_sets):
            data = os.path.join(root, f"test_data_set_{k}")
            write_values(data, "input", inputs, case.model.graph.input)
            write_values(data, "output", outputs, case.model.graph.output)
        describe(root, case.model, case.rtol, case.atol)
    return len(cases)


def export_light_cases(out):
    """Real architectures whose weights are ConstantOfShape nodes; the input is the ramp that the package's runner feeds them."""
    cases = sorted(os.listdir(os.path.join(DATA_DIR, "real")))
    for name in cases:
        data = read_json(os.path.join(DATA_DIR, "real", name, "data.json"))
        source = os.path.join(DATA_DIR, "light", os.path.basename(data["url"]))
        stem = os.path.splitext(os.path.basename(source))[0]
        root = os.path.join(out, "light", stem)
        copy(source, os.path.join(root, "model.onnx"))
        model = onnx.load(source)
        inputs = graph_inputs(model)
        write_values(os.path.join(root, "test_data_set_0"), "input", [ramp(i) for i in inputs], inputs)
        for k in range(len(model.graph.output)):
            copy(f"{os.path.splitext(source)[0]}_output_{k}.pb", os.path.join(root, "test_data_set_0", f"output_{k}.pb"))
        describe(root, model, data["rtol"], data["atol"])
    return len(cases)


def export_data_cases(out, kind):
    names = sorted(n for n in os.listdir(os.path.join(DATA_DIR, kind)) if os.path.isfile(os.path.join(DATA_DIR, kind, n, "model.onnx")))
    for name in names:
        source, root = os.path.join(DATA_DIR, kind, name), os.path.join(out, kind, name)
        copy(os.path.join(source, "model.onnx"), os.path.join(root, "model.onnx"))
        for data in sorted(d for d in os.listdir(source) if d.startswith("test_data_set_")):
            for file in sorted(f for f in os.listdir(os.path.join(source, data)) if f.endswith(".pb")):
                copy(os.path.join(source, data, file), os.path.join(root, data, file))
        given = read_json(os.path.join(source, "data.json")) if os.path.exists(os.path.join(source, "data.json")) else {}
        describe(root, onnx.load(os.path.join(root, "model.onnx")), given.get("rtol", RTOL), given.get("atol", ATOL))
    return len(names)


def describe(root, model, rtol, atol):
    def values(infos):
        return [{"name": i.name, "kind": kind_of(i)} for i in infos]

    opset = {o.domain: o.version for o in model.opset_import}
    case = {"rtol": rtol, "atol": atol, "opset": opset, "inputs": values(graph_inputs(model)), "outputs": values(model.graph.output)}
    write_json(os.path.join(root, "case.json"), case)


def kind_of(info):
    which = info.type.WhichOneof("value")
    return {"tensor_type": "tensor", "sequence_type": "sequence", "optional_type": "optional", "map_type": "map"}.get(which, str(which))


def graph_inputs(model):
    """The inputs a caller feeds: old models list their initializers among the graph's inputs as well."""
    initializers = {i.name for i in model.graph.initializer}
    return [i for i in model.graph.input if i.name not in initializers]


def ramp(info):
    shape = [d.dim_value if d.HasField("dim_value") else 1 for d in info.type.tensor_type.shape.dim]
    n = int(np.prod(shape))
    return (np.arange(n).reshape(shape) / n).astype(np.float32)


def write_values(folder, stem, values, infos):
    for k, (value, info) in enumerate(zip(values, infos, strict=True)):
        write(os.path.join(folder, f"{stem}_{k}.pb"), serialize(to_proto(value, info)))


def to_proto(value, info):
    if isinstance(value, onnx.TensorProto):
        return value
    make = {"tensor": numpy_helper.from_array, "sequence": numpy_helper.from_list, "optional": numpy_helper.from_optional, "map": numpy_helper.from_dict}
    return make[kind_of(info)](value if kind_of(info) != "tensor" else np.asarray(value), info.name)


def serialize(proto):
    return proto.SerializeToString(deterministic=True)


def write(path, data):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as f:
        f.write(data)


def copy(source, target):
    os.makedirs(os.path.dirname(target), exist_ok=True)
    shutil.copyfile(source, target)


def write_json(path, value):
    write(path, (json.dumps(value, sort_keys=True) + "\n").encode())


def read_json(path):
    with open(path, encoding="utf-8") as f:
        return json.load(f)


if __name__ == "__main__":
    main()
