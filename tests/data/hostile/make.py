"""Write this folder's malformed and hostile models and `expected.json`.

usage: make.py
needs: tests/python/requirements.txt

`expected.json` maps each file to what it tries and to the exit codes that `gristmill check` and `gristmill run` may end with: 2 (bad
file) or 3 (unsupported) for models that are wrong; 0 as well for odd ones that a careful program can still take. A crash, a
hang and unbounded memory are never allowed. A `run` of null marks a model whose run has no end by right: there `check`, `dump` and
`place` end at once. Files are small: what is large in them is a number, or their nesting.
"""

import json
import os

import numpy as np
from onnx import AttributeProto, TensorProto, helper, numpy_helper

HERE = os.path.dirname(os.path.abspath(__file__))
WRONG, ODD = (2, 3), (0, 2, 3)
# Not representable in memory, though each dimension is legal.
HUGE = 1 << 40
F, I = TensorProto.FLOAT, TensorProto.INT64
CASES = {}


def case(name, why, content, check=WRONG, run=WRONG):
    data = content if isinstance(content, bytes) else content.SerializeToString(deterministic=True)
    assert name not in CASES, name
    CASES[name] = (data, {"why": why, "check": list(check), "run": list(run)})


def odd(name, why, content):
    """Legal, or open to reading: any orderly end will do."""
    case(name, why, content, ODD, ODD)


def fails_late(name, why, content):
    """Wrong only once values are looked at."""
    case(name, why, content, ODD, WRONG)


def endless(name, why, content):
    """Right, and `gristmill run` computes it for ever, or for years."""
    case(name, why, content, (0,))
    CASES[name][1]["run"] = None


def value(name, shape, dtype=F):
    return helper.make_tensor_value_info(name, dtype, shape)


def graph(nodes, inputs=None, outputs=None, initializers=()):
    inputs = [value("x", [2, 3])] if inputs is None else inputs
    outputs = [value("y", None)] if outputs is None else outputs
    return helper.make_graph(nodes, "g", inputs, outputs, list(initializers))


def model(nodes, inputs=None, outputs=None, initializers=(), opset=20, **kw):
    opsets = kw.pop("opset_imports", [helper.make_opsetid("", opset)])
    return helper.make_model(graph(nodes, inputs, outputs, initializers), opset_imports=opsets, ir_version=10, **kw)


def node(op, inputs="x", outputs="y", **attributes):
    return helper.make_node(op, inputs.split(), outputs.split(), **attributes)


def ints(name, *values):
    return numpy_helper.from_array(np.array(values, np.int64), name)


def floats(name, shape, fill=1.0):
    return numpy_helper.from_array(np.full(shape, fill, np.float32), name)


def tensor(name="w", dtype=F, dims=(2, 3), **fields):
    t = TensorProto(name=name, data_type=dtype, dims=dims)
    for key, content in fields.items():
        t.raw_data = content if key == "raw_data" else t.raw_data
        if key != "raw_data":
            getattr(t, key).extend(content)
    return t


def external(location, **entries):
    t = tensor()
    t.data_location = TensorProto.EXTERNAL
    for key, text in {"location": location, **entries}.items():
        t.external_data.add(key=key, value=str(text))
    return t


def add_weight(weight):
    return model([node("Add", "x w")], initializers=[weight])


def with_const(op, name, array, **attributes):
    """`op(x, constant)`"""
    return model([node(op, f"x {name}", **attributes)], initializers=[numpy_helper.from_array(np.array(array), name)])


def field(number, payload):
    """One length-delimited protobuf field, for what the official package refuses to write."""
    return bytes([number << 3 | 2]) + varint(len(payload)) + payload


def varint(n):
    out = bytearray()
    while n > 0x7F:
        out.append(n & 0x7F | 0x80)
        n >>= 7
    return bytes(out) + bytes([n])


def files():
    good = model([node("Relu")]).SerializeToString(deterministic=True)
    case("empty", "an empty file", b"")
    case("random_bytes", "noise", np.random.default_rng(0).integers(0, 256, 512, np.uint8).tobytes())
    case("text", "a text file", b"<!doctype html><title>404</title>\n" * 8)
    case("truncated", "a model cut short", good[:-7])
    case("length_past_end", "a field that claims 2^62 bytes", good + b"\x3a" + varint(1 << 62))
    case("no_graph", "a model without a graph", field(8, helper.make_opsetid("", 20).SerializeToString()))
    case("name_not_utf8", "a node name that is not UTF-8", good.replace(b"Relu", b"\xff\xfe\xfd\xfc"))
    odd("no_ir_version", "ir_version missing", good[2:])


def graphs():
    case("cycle", "two nodes feed each other", model([node("Add", "x b", "a"), node("Relu", "a", "b"), node("Relu", "b", "y")]))
    case("self_loop", "a node that reads its own output", model([node("Add", "x y", "y")]))
    odd("unsorted", "nodes out of order, no cycle", model([node("Relu", "a", "y"), node("Relu", "x", "a")]))
    case("missing_initializer", "an operand that nothing defines", model([node("Add", "x w")]))
    case("dangling_output", "a graph output that nothing defines", model([node("Relu", "x", "a")]))
    case("no_outputs", "a graph that computes nothing", model([node("Relu")], outputs=[]))
    case("duplicate_value", "two nodes with one output name", model([node("Relu"), node("Tanh")]))
    odd("duplicate_initializer", "two initializers of one name and different shapes", model([node("Add", "x w")], initializers=[floats("w", [2, 3]), floats("w", [3])]))
    case("duplicate_input", "two inputs of one name and different types", model([node("Relu")], inputs=[value("x", [2]), value("x", [3], I)]))
    odd("duplicate_node_name", "two nodes of one name", model([node("Relu", "x", "a", name="n"), node("Relu", "a", "y", name="n")]))
    case("input_without_type", "an input that says nothing of itself", model([node("Relu")], inputs=[helper.make_empty_tensor_value_info("x")]))
    odd("output_is_input", "no node at all", model([], outputs=[value("x", [2, 3])]))
    case("too_few_inputs", "Add of one operand", model([node("Add", "x")]))
    case("too_many_inputs", "Relu of three operands", model([node("Relu", "x x x")]))
    case("required_input_left_out", "MatMul with an empty name", model([helper.make_node("MatMul", ["x", ""], ["y"])]))
    case("too_many_outputs", "Relu with two results", model([node("Relu", "x", "y z")]))
    odd("long_names", "names of 1,500 characters", model([node("Relu", "x" * 1500, "y" * 1500)], [value("x" * 1500, [2])], [value("y" * 1500, [2])]))
    odd("strange_names", "names with control characters, quotes and percent signs", model([node("Relu", "%0\"\n\t{}\x1b[31m", "; DROP")], [value("%0\"\n\t{}\x1b[31m", [2])], [value("; DROP", [2])]))
    odd("false_value_info", "value_info that contradicts inference", false_value_info())
    odd("false_output_shape", "an output that claims another shape", model([node("Relu")], outputs=[value("y", [7, 7, 7])]))
    case("false_output_rank_used", "a reshape fed by a wrong claim", model([node("Relu", "x", "a"), node("Reshape", "a s")], initializers=[ints("s", 4, 4)]))
    odd("strange_dim_names", "symbolic dims that are no identifiers", model([node("Relu")], [value("x", ["a b((", "", "-1", "x" * 300])]))
    odd("deep_chain", "2,000 nodes in a row", deep_chain(2000))


def false_value_info():
    m = model([node("Relu", "x", "a"), node("Relu", "a", "y")])
    m.graph.value_info.append(value("a", [5, 5, 5], I))
    return m


def deep_chain(n):
    names = ["x"] + [f"{k:x}" for k in range(16, 16 + n - 1)] + ["y"]
    return model([node("Neg", a, b) for a, b in zip(names, names[1:])])


def dims():
    case("huge_input", "an input of 4 TiB", model([node("Relu")], [value("x", [HUGE])]))
    case("huge_initializer", "an initializer of 4 TiB without data", add_weight(tensor(dims=[HUGE])))
    case("overflowing_initializer", "dims whose product overflows 64 bits to zero", add_weight(tensor(dims=[1 << 32, 1 << 32])))
    case("overflowing_input", "dims whose product overflows 64 bits", model([node("Relu")], [value("x", [1 << 62, 1 << 62])]))
    odd("huge_and_empty", "an empty tensor with a huge dim", model([node("Relu")], [value("x", [0, 1 << 62])]))
    case("negative_dim", "an initializer with a negative dim", add_weight(tensor(dims=[-2, -3], raw_data=bytes(24))))
    case("negative_input_dim", "an input with a negative dim", model([node("Relu")], [value("x", [-5, 3])]))
    case("constant_of_huge_shape", "ConstantOfShape of 4 TiB", model([node("ConstantOfShape", "s")], [], initializers=[ints("s", HUGE)]))
    case("constant_of_negative_shape", "ConstantOfShape of a negative size", model([node("ConstantOfShape", "s")], [], initializers=[ints("s", -4)]))
    case("expand_huge", "Expand to 2^80 elements", with_const("Expand", "s", [HUGE, HUGE, 2, 3]))
    case("tile_huge", "Tile a million million times", with_const("Tile", "r", [10**6, 10**6]))
    case("pad_huge", "Pad by 2^40 on each side", with_const("Pad", "p", [HUGE] * 4))
    case("pad_negative", "Pad that cuts more than there is", with_const("Pad", "p", [-9, 0, 0, 0]))
    case("range_huge", "Range of 10^18 numbers", model([node("Range", "a b c")], [], [value("y", None, I)], initializers=[numpy_helper.from_array(np.array(v, np.int64), n) for n, v in [("a", 0), ("b", 10**18), ("c", 1)]]))
    case("range_without_end", "Range with step zero", model([node("Range", "a b c")], [], [value("y", None, I)], initializers=[numpy_helper.from_array(np.array(v, np.int64), n) for n, v in [("a", 0), ("b", 5), ("c", 0)]]))
    case("resize_huge", "Resize by 10^12", resize(1e12))
    case("resize_zero", "Resize by zero and NaN", resize(float("nan")))
    case("one_hot_huge", "OneHot of depth 2^40", model([node("OneHot", "i d v")], [], initializers=[ints("i", 1), ints("d", HUGE), floats("v", [2])]))
    case("concat_doubling", "40 nodes that double a tensor each", model([node("Concat", f"{a} {a}", b, axis=0) for a, b in doubling(40)]))
    odd("reshape_to_rank_200", "a tensor of rank 200", model([node("Reshape", "x s")], initializers=[ints("s", *[1] * 199, 6)]))


def resize(scale):
    return model([helper.make_node("Resize", ["x", "", "s"], ["y"])], [value("x", [1, 1, 2, 3])], initializers=[numpy_helper.from_array(np.array([1, 1, scale, scale], np.float32), "s")])


def doubling(n):
    names = ["x"] + [f"d{k}" for k in range(n - 1)] + ["y"]
    return list(zip(names, names[1:]))


def data():
    case("raw_data_short", "raw_data of 20 bytes for six floats", add_weight(tensor(raw_data=bytes(20))))
    case("raw_data_long", "raw_data of 28 bytes for six floats", add_weight(tensor(raw_data=bytes(28))))
    case("float_data_short", "five values for six floats", add_weight(tensor(float_data=[1.0] * 5)))
    case("data_of_other_dtype", "int64_data in a float tensor", add_weight(tensor(int64_data=[1] * 6)))
    case("dtype_unknown", "data_type 99", add_weight(tensor(dtype=99, raw_data=bytes(24))))
    case("dtype_undefined", "data_type 0", add_weight(tensor(dtype=0, raw_data=bytes(24))))
    case("dtype_mismatch", "f32 + i64", add_weight(tensor(dtype=I, raw_data=bytes(48))))
    case("string_initializer", "an initializer of strings", add_weight(tensor(dtype=TensorProto.STRING, string_data=[b"a"] * 6)))
    case("string_input", "an input of strings", model([node("Identity")], [value("x", [2], TensorProto.STRING)], [value("y", [2], TensorProto.STRING)]))
    odd("bool_not_zero_or_one", "bools of value 7", model([node("Not", "b")], [], [value("y", None, TensorProto.BOOL)], initializers=[tensor("b", TensorProto.BOOL, [4], raw_data=b"\x07\xff\x00\x80")]))
    case("external_escapes", "external data in a parent folder", add_weight(external("../../../../../../../../etc/passwd")))
    case("external_sibling_folder", "external data beside the model's folder, an existing file", add_weight(external("../digits/model.onnx", offset=0, length=24)))
    case("external_absolute", "external data at an absolute path", add_weight(external("/etc/passwd", offset=0, length=24)))
    case("external_missing", "external data in a file that is not there", add_weight(external("weights.bin")))
    case("external_past_end", "external data beyond its file", add_weight(external("make.py", offset=1 << 60, length=24)))
    case("external_wrong_length", "external data of another length", add_weight(external("make.py", offset=0, length=23)))
    case("external_negative", "external data at a negative offset", add_weight(external("make.py", offset=-4096, length=24)))
    case("external_not_a_number", "external data at offset 'zero'", add_weight(external("make.py", offset="zero")))
    case("external_folder", "external data that is a folder", add_weight(external(".")))
    case("external_device", "external data that never ends", add_weight(external("../../../../../../../../dev/zero", length=24)))
    case("external_without_location", "external data nowhere", add_weight(external("")))


def opsets():
    case("unknown_op", "an op that nobody knows", model([node("Frobnicate")]))
    case("unknown_domain", "an op of a domain that nobody knows", model([helper.make_node("Relu", ["x"], ["y"], domain="com.example")], opset_imports=[helper.make_opsetid("", 20), helper.make_opsetid("com.example", 1)]))
    case("domain_not_imported", "a domain that the model does not import", model([helper.make_node("Relu", ["x"], ["y"], domain="ai.onnx.ml")]))
    case("opset_99", "an opset of the future", model([node("Relu")], opset=99))
    case("opset_0", "opset 0", model([node("Relu")], opset=0))
    case("opset_negative", "opset -1", model([node("Relu")], opset=-1))
    case("opset_missing", "no opset at all", model([node("Relu")], opset_imports=[]))
    odd("opset_twice", "two opsets of one domain", model([node("Relu")], opset_imports=[helper.make_opsetid("", 13), helper.make_opsetid("", 20)]))


def attributes():
    image, kernel = [value("x", [1, 2, 5, 5])], [floats("w", [4, 2, 3, 3])]

    def conv(why, name, inputs=None, weights=None, **kw):
        case("conv_" + name, why, model([node("Conv", "x w", **kw)], inputs or image, initializers=weights or kernel))

    conv("strides given as text", "strides_as_text", strides="2,2")
    conv("strides of zero", "stride_zero", strides=[0, 0])
    conv("strides of one number for two axes", "strides_short", strides=[1])
    conv("dilations below zero", "dilation_negative", dilations=[-1, -1])
    conv("pads near the end of 64 bits", "pads_overflow", pads=[(1 << 63) - 1] * 4)
    conv("pads that leave nothing", "pads_negative", pads=[-5] * 4)
    conv("zero groups", "group_zero", group=0)
    conv("-1 groups", "group_negative", group=-1)
    conv("kernel_shape that contradicts the weight", "kernel_shape_false", kernel_shape=[9, 9])
    conv("two channels in, weights for three", "channels", weights=[floats("w", [4, 3, 3, 3])])
    conv("a weight of rank 2", "weight_rank", weights=[floats("w", [4, 2])])
    conv("a kernel larger than the image", "kernel_too_large", weights=[floats("w", [1, 2, 9, 9])])
    conv("auto_pad of an unknown name", "auto_pad_unknown", auto_pad="SOMEHOW")
    case("pool_kernel_zero", "a pooling window of nothing", model([node("MaxPool", kernel_shape=[0, 0])], image))
    case("pool_kernel_missing", "pooling without kernel_shape", model([node("MaxPool")], image))
    case("pool_kernel_huge", "a pooling window of 2^80 elements, padded to fit", model([node("AveragePool", kernel_shape=[HUGE, HUGE], pads=[HUGE] * 4)], image))
    case("perm_repeats", "Transpose with an axis twice", model([node("Transpose", perm=[0, 0])]))
    case("perm_out_of_range", "Transpose with axis 7", model([node("Transpose", perm=[0, 7])]))
    case("perm_as_floats", "Transpose with perm of floats", model([node("Transpose", perm=[0.0, 1.0])]))
    case("axis_out_of_range", "Softmax over axis -9", model([node("Softmax", axis=-9)]))
    case("axis_as_float", "Softmax over axis 0.5", model([node("Softmax", axis=0.5)]))
    case("concat_axis", "Concat along axis 7", model([node("Concat", "x x", axis=7)]))
    case("concat_axis_missing", "Concat along no axis", model([node("Concat", "x x")]))
    case("flatten_axis", "Flatten at axis 99", model([node("Flatten", axis=99)]))
    case("cast_unknown", "Cast to dtype 99", model([node("Cast", to=99)]))
    case("split_into_none", "Split into zero parts", model([node("Split", num_outputs=0)]))
    case("topk_too_many", "TopK of 9 out of 3", model([node("TopK", "x k", "y i")], initializers=[ints("k", 9)]))
    case("topk_negative", "TopK of -1", model([node("TopK", "x k", "y i")], initializers=[ints("k", -1)]))
    case("constant_without_value", "Constant of nothing", model([node("Constant", "")]))
    case("constant_with_two_values", "Constant of two values", model([node("Constant", "", value_int=1, value_float=2.0)]))
    odd("attribute_twice", "an attribute given twice", attribute_twice())
    odd("attribute_unknown", "an attribute that the op does not have", model([node("Relu", zeal=3)]))
    odd("nan_attributes", "NaN and infinity as attributes", model([node("LeakyRelu", "x", "a", alpha=float("nan")), node("Elu", "a", alpha=float("inf"))]))
    odd("nan_epsilon", "LayerNormalization with epsilon -inf", model([node("LayerNormalization", "x w", epsilon=float("-inf"))], initializers=[floats("w", [3])]))
    case("attribute_ref_outside", "an attribute that refers to a function's, outside one", attribute_ref())
    case("einsum_malformed", "an equation that is none", model([node("Einsum", "x x", equation="ij,,jk->->(")]))
    case("einsum_rank", "an equation for another rank", model([node("Einsum", equation="ijkl->i")]))
    case("einsum_new_letter", "a result letter that no operand has", model([node("Einsum", equation="ij->ijz")]))


def attribute_twice():
    m = model([node("Softmax", axis=0)])
    m.graph.node[0].attribute.add(name="axis", i=1, type=AttributeProto.INT)
    return m


def attribute_ref():
    m = model([node("Softmax")])
    m.graph.node[0].attribute.add(name="axis", ref_attr_name="axis", type=AttributeProto.INT)
    return m


def shapes():
    case("reshape_size", "six elements as 4x4", with_const("Reshape", "s", [4, 4]))
    case("reshape_two_unknown", "Reshape with two -1", with_const("Reshape", "s", [-1, -1]))
    case("reshape_negative", "Reshape with -7", with_const("Reshape", "s", [-7, 1]))
    case("reshape_zero_past_rank", "Reshape that copies a dim that is not there", with_const("Reshape", "s", [1, 6, 0]))
    case("reshape_overflow", "Reshape to dims whose product overflows to six", with_const("Reshape", "s", [1 << 62, 4, 6]))
    case("reshape_shape_rank", "Reshape by a matrix", with_const("Reshape", "s", [[2], [3]]))
    case("reshape_shape_dtype", "Reshape by floats", with_const("Reshape", "s", np.array([3, 2], np.float32)))
    case("matmul_inner", "MatMul with k = 3 and k = 4", with_const("MatMul", "w", np.ones((4, 5), np.float32)))
    case("matmul_scalar", "MatMul by a scalar", with_const("MatMul", "w", np.float32(2)))
    case("add_broadcast", "[2, 3] + [2]", with_const("Add", "w", np.ones(2, np.float32)))
    case("gemm_rank", "Gemm of rank 3", with_const("Gemm", "w", np.ones((1, 3, 5), np.float32)))
    case("expand_mismatch", "Expand 3 to 4", with_const("Expand", "s", [2, 4]))
    case("squeeze_not_one", "Squeeze of an axis of size 2", with_const("Squeeze", "a", [0]))
    case("unsqueeze_twice", "Unsqueeze of one axis twice", with_const("Unsqueeze", "a", [0, 0]))
    case("slice_step_zero", "Slice with step 0", model([node("Slice", "x b e a s")], initializers=[ints("b", 0), ints("e", 2), ints("a", 0), ints("s", 0)]))
    odd("slice_extremes", "Slice from and to the ends of 64 bits", model([node("Slice", "x b e a s")], initializers=[ints("b", -(1 << 63)), ints("e", (1 << 63) - 1), ints("a", 0), ints("s", (1 << 63) - 1)]))
    odd("slice_backwards_extremes", "Slice backwards by the least 64-bit number", model([node("Slice", "x b e a s")], initializers=[ints("b", (1 << 63) - 1), ints("e", -(1 << 63)), ints("a", 0), ints("s", -(1 << 63))]))
    case("reduce_axis", "ReduceSum over axis 5", with_const("ReduceSum", "a", [5]))
    case("batch_norm_channels", "BatchNormalization with parameters of another length", model([node("BatchNormalization", "x w w w w")], [value("x", [1, 2, 4, 4])], initializers=[floats("w", [5])]))
    case("lstm_weights", "LSTM whose weights do not fit its hidden size", model([node("LSTM", "x w r", hidden_size=4)], [value("x", [5, 1, 3])], initializers=[floats("w", [1, 16, 3]), floats("r", [1, 12, 9])]))
    case("gather_axis", "Gather along axis 4", with_const("Gather", "i", [0], axis=4))


def values():
    fails_late("gather_out_of_range", "Gather of row 7 out of two", with_const("Gather", "i", [7]))
    fails_late("gather_constant_out_of_range", "Gather of a constant by a constant, out of range", model([node("Gather", "w i")], [], initializers=[floats("w", [2, 3]), ints("i", -(1 << 63))]))
    fails_late("gather_nd_out_of_range", "GatherND out of range", with_const("GatherND", "i", [[0, 99]]))
    fails_late("scatter_nd_out_of_range", "ScatterND out of range", model([node("ScatterND", "x i u")], initializers=[numpy_helper.from_array(np.array([[1, 1 << 40]]), "i"), floats("u", [1])]))
    fails_late("scatter_elements_out_of_range", "ScatterElements out of range", model([node("ScatterElements", "x i u")], initializers=[numpy_helper.from_array(np.array([[-50]]), "i"), floats("u", [1, 1])]))
    two = {"inputs": [], "outputs": [value("y", None, I)], "initializers": [ints("a", 1, -(1 << 63)), ints("b", 0, -1)]}
    odd("divide_by_zero", "1 / 0 and the least number / -1 in i64", model([node("Div", "a b")], **two))
    odd("mod_by_zero", "1 mod 0 and the least number mod -1 in i64", model([node("Mod", "a b")], **two))
    odd("negate_least", "minus and absolute value of the least 64-bit number", model([node("Neg", "a", "n"), node("Abs", "n", "y")], **two))
    odd("power_overflow", "2^63-1 to the power -(2^63)", model([node("Pow", "a b")], [], [value("y", None, I)], initializers=[ints("a", (1 << 63) - 1), ints("b", -(1 << 63))]))
    odd("shift_past_width", "a shift by 200 bits", model([node("BitShift", "a b", direction="LEFT")], [], [value("y", None, TensorProto.UINT8)], initializers=[tensor("a", TensorProto.UINT8, [1], raw_data=b"\x81"), tensor("b", TensorProto.UINT8, [1], raw_data=b"\xc8")]))
    odd("cast_out_of_range", "NaN and infinity to i32", model([node("Cast", "f", to=TensorProto.INT32)], [], [value("y", None, TensorProto.INT32)], initializers=[tensor("f", F, [3], float_data=[float("nan"), float("inf"), -1e30])]))


def control_flow():
    branch = helper.make_graph([node("Relu", "x", "b")], "branch", [], [value("b", [2, 3])])
    other = helper.make_graph([], "other", [], [])
    cond = [value("x", [2, 3]), value("c", [], TensorProto.BOOL)]
    case("if_without_else", "If with one branch", model([node("If", "c", then_branch=branch)], inputs=cond))
    # A run may know the condition and import the taken branch alone.
    case("if_branches_differ", "If whose branches have one and no results", model([node("If", "c", then_branch=branch, else_branch=other)], inputs=cond), WRONG, ODD)
    case("if_on_float", "If on a float", model([node("If", "c", then_branch=branch, else_branch=branch)], initializers=[floats("c", [])]))
    case("if_unknown_outer", "a branch that reads a name from nowhere", unknown_outer(cond))
    case("loop_body_inputs", "Loop whose body takes too little", model([helper.make_node("Loop", ["n", "c", "x"], ["y"], body=branch)], inputs=cond, initializers=[ints("n", 3)]))
    case("scan_too_many_inputs", "Scan over more inputs than it has", model([node("Scan", body=branch, num_scan_inputs=9)]))
    case("if_nested_2000", "2,000 branches within each other", nested_ifs(2000))
    odd("if_nested_24", "24 branches within each other", nested_branches(24))
    go = helper.make_tensor("t", TensorProto.BOOL, [], [True])
    endless("loop_without_end", "Loop without a count on a condition that stays true", counting(["", "t", "z"], go))
    endless("loop_of_10_12", "Loop of 10^12 iterations", counting(["n", "", "z"], ints("n", 10**12)))
    endless("loops_nested", "10^7 iterations of a loop of 10^7", nested_loops())


def loop_body(*nodes):
    """A body that keeps its condition and makes `s1` of `s` by `nodes`."""
    takes = [value("i", [], I), value("c", [], TensorProto.BOOL), value("s", [])]
    return helper.make_graph([node("Identity", "c", "co"), *nodes], "body", takes, [value("co", [], TensorProto.BOOL), value("s1", [])], [floats("one", [])])


def counting(takes, decides):
    """A loop over constants alone that adds one in each iteration."""
    loop = helper.make_node("Loop", takes, ["y"], body=loop_body(node("Add", "s one", "s1")))
    return model([loop], inputs=[], outputs=[value("y", [])], initializers=[decides, floats("z", [])])


def nested_loops():
    inner = helper.make_node("Loop", ["n", "", "s"], ["s1"], body=loop_body(node("Add", "s one", "s1")))
    outer = helper.make_node("Loop", ["n", "", "z"], ["y"], body=loop_body(inner))
    return model([outer], inputs=[], outputs=[value("y", [])], initializers=[ints("n", 10**7), floats("z", [])])


def unknown_outer(cond):
    lost = helper.make_graph([node("Relu", "nowhere", "b")], "lost", [], [value("b", [2, 3])])
    return model([node("If", "c", then_branch=lost, else_branch=lost)], inputs=cond)


def nested_branches(depth):
    inner = helper.make_graph([node("Relu", "x", "b")], "b", [], [value("b", None)])
    for _ in range(depth - 1):
        inner = helper.make_graph([node("If", "c", "b", then_branch=inner, else_branch=helper.make_graph([node("Neg", "x", "b")], "e", [], [value("b", None)]))], "b", [], [value("b", None)])
    return model([node("If", "c", "y", then_branch=inner, else_branch=inner if depth == 1 else helper.make_graph([node("Neg", "x", "b")], "e", [], [value("b", None)]))], inputs=[value("x", [2, 3]), value("c", [], TensorProto.BOOL)])


def nested_ifs(depth):
    inner = b""
    for _ in range(depth):
        attribute = field(6, inner)  # AttributeProto.g
        inner = field(1, field(4, b"If") + field(5, attribute))  # GraphProto.node, .op_type, .attribute
    return field(7, inner) + field(8, helper.make_opsetid("", 20).SerializeToString())


def functions():
    imports = [helper.make_opsetid("", 20), helper.make_opsetid("f", 1)]

    def call(name, *operands, out="y"):
        return helper.make_node(name, list(operands), [out], domain="f")

    def function(name, nodes, inputs=("a",), outputs=("b",)):
        return helper.make_function("f", name, list(inputs), list(outputs), nodes, imports)

    def calling(name, why, functions, emit=case):
        emit(name, why, model([call("f0", "x")], opset_imports=imports, functions=functions))

    calling("function_calls_itself", "a function that calls itself", [function("f0", [call("f0", "a", out="b")])])
    calling("functions_call_each_other", "two functions that call each other", [function("f0", [call("f1", "a", out="b")]), function("f1", [call("f0", "a", out="b")])])
    doubling = [function(f"f{k}", [call(f"f{k + 1}", "a", out="m"), call(f"f{k + 1}", "m", out="b")]) for k in range(40)]
    calling("functions_doubling", "40 functions that call the next twice: 2^40 nodes when expanded", [*doubling, function("f40", [node("Relu", "a", "b")])])
    calling("function_output_missing", "a function whose output nothing defines", [function("f0", [node("Relu", "a", "c")])])
    calling("function_twice", "two functions of one name", [function("f0", [node("Relu", "a", "b")]), function("f0", [node("Neg", "a", "b")])], odd)
    case("function_missing", "a call of a function that is not there", model([call("f9", "x")], opset_imports=imports))
    calling("function_too_few_operands", "a call that leaves out a used operand", [function("f0", [node("Add", "a c", "b")], inputs=("a", "c"))])


def types():
    sequence = helper.make_value_info("x", helper.make_sequence_type_proto(helper.make_tensor_type_proto(F, [2])))
    optional = helper.make_value_info("x", helper.make_optional_type_proto(helper.make_tensor_type_proto(F, [2])))
    case("sequence_input", "an input that is a sequence", model([node("Identity")], [sequence]))
    case("optional_input", "an input that is an optional", model([node("Identity")], [optional]))
    case("float4_input", "an input of 4-bit floats", model([node("Identity")], [value("x", [2], TensorProto.FLOAT4E2M1)], [value("y", [2], TensorProto.FLOAT4E2M1)]))
    case("complex_input", "an input of complex numbers", model([node("Identity")], [value("x", [2], TensorProto.COMPLEX64)], [value("y", [2], TensorProto.COMPLEX64)]))
    case("relu_of_bool", "Relu of bools", model([node("Relu")], [value("x", [2], TensorProto.BOOL)], [value("y", [2], TensorProto.BOOL)]))
    case("and_of_float", "And of floats", model([node("And", "x x")], outputs=[value("y", None, TensorProto.BOOL)]))
    case("sparse_initializer", "a sparse initializer out of range", sparse())


def sparse():
    m = model([node("Add", "x w")])
    m.graph.sparse_initializer.append(helper.make_sparse_tensor(floats("w", [2]), ints("i", 0, 1 << 40), [2, 3]))
    return m


def main():
    for family in (files, graphs, dims, data, opsets, attributes, shapes, values, control_flow, functions, types):
        family()
    for old in os.listdir(HERE):
        if old.endswith(".onnx"):
            os.remove(os.path.join(HERE, old))
    for name, (content, _) in CASES.items():
        with open(os.path.join(HERE, name + ".onnx"), "wb") as f:
            f.write(content)
    with open(os.path.join(HERE, "expected.json"), "w", encoding="utf-8") as f:
        rows = (f"  {json.dumps(name + '.onnx')}: {json.dumps(about)}" for name, (_, about) in sorted(CASES.items()))
        f.write("{\n" + ",\n".join(rows) + "\n}\n")
    print(len(CASES), "files,", sum(len(c) for c, _ in CASES.values()), "bytes")


if __name__ == "__main__":
    main()
