"""Quantise exported models to 8-bit integers, with onnxruntime's own results as references.

usage: quantize.py OUT_DIR MODEL_DIR ...
needs: pip install onnxruntime onnx numpy

For each MODEL_DIR (model.onnx and test_data_set_0/input_N.pb) writes OUT_DIR/NAME_qdq (static: u8 activations calibrated on that input, i8
weights per output channel) and OUT_DIR/NAME_dyn (dynamic; left out where onnxruntime cannot), in the same layout, for compare.py and `gristmill run --test-data`.
"""

import os
import shutil
import sys

import onnx
import onnxruntime
from compare import inputs_of
from onnx import numpy_helper
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_dynamic, quantize_static


class OneInput(CalibrationDataReader):
    def __init__(self, feeds):
        self.feeds = iter([feeds])

    def get_next(self):
        return next(self.feeds, None)


def static(source, target, feeds):
    quantize_static(source, target, OneInput(feeds), quant_format=QuantFormat.QDQ, activation_type=QuantType.QUInt8,
                    weight_type=QuantType.QInt8, per_channel=True)


def dynamic(source, target, feeds):
    quantize_dynamic(source, target, weight_type=QuantType.QInt8)


def write(directory, out, quantize):
    data = os.path.join(out, "test_data_set_0")
    shutil.copytree(os.path.join(directory, "test_data_set_0"), data, ignore=shutil.ignore_patterns("output_*"))
    feeds = inputs_of(directory)
    target = os.path.join(out, "model.onnx")
    quantize(os.path.join(directory, "model.onnx"), target, feeds)
    session = onnxruntime.InferenceSession(target, providers=["CPUExecutionProvider"])
    for i, (spec, value) in enumerate(zip(session.get_outputs(), session.run(None, feeds))):
        with open(os.path.join(data, f"output_{i}.pb"), "wb") as f:
            f.write(numpy_helper.from_array(value, spec.name).SerializeToString())


def main():
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    for directory in sys.argv[2:]:
        name = os.path.basename(directory.rstrip("/"))
        for kind, quantize in (("qdq", static), ("dyn", dynamic)):
            out = os.path.join(sys.argv[1], f"{name}_{kind}")
            if os.path.exists(out):
                sys.exit(f"{out} is there already")
            try:
                write(directory, out, quantize)
                print(out)
            except Exception as e:  # What onnxruntime cannot quantise is said, and the rest goes on.
                shutil.rmtree(out, ignore_errors=True)
                print(f"{out}: {type(e).__name__}: {str(e)[:200]}", file=sys.stderr)


if __name__ == "__main__":
    main()
