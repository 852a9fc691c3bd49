"""Train the digit classifier of this folder and write `model.onnx`, `batch.npz` and `labels.npy` beside this file.

usage: train.py
needs: pip install torch==2.11.0 onnx==1.23.2 onnxscript onnxruntime scikit-learn numpy

Data: scikit-learn's bundled 8x8 digits (1,797 images of ten classes). 1,437 train, 360 are held out (20 %, stratified). A few
seconds on one CPU core. Seeded: the same versions on the same machine give the same files.
"""

import os

import numpy as np
import onnx
import onnxruntime
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn import functional as F

HERE = os.path.dirname(os.path.abspath(__file__))
SEED, EPOCHS, BATCH = 0, 60, 64


def main():
    torch.manual_seed(SEED)
    torch.set_num_threads(1)
    train_x, test_x, train_y, test_y = load_data()
    net = train(network(), train_x, train_y)
    path = os.path.join(HERE, "model.onnx")
    export(net, path)
    np.savez(os.path.join(HERE, "batch.npz"), image=test_x)
    np.save(os.path.join(HERE, "labels.npy"), test_y)
    report(path, net, test_x, test_y)


def load_data():
    digits = load_digits()
    images = digits.images.astype(np.float32)[:, None]  # [N, 1, 8, 8], 0..16; the model scales them itself
    return train_test_split(images, digits.target.astype(np.int64), test_size=360, stratify=digits.target, random_state=SEED)


class Scale(nn.Module):
    """Raw counts 0..16 to -1..1, so that the exported model takes the data as it is."""

    def forward(self, x):
        return x / 8.0 - 1.0


def network():
    def conv(cin, cout):
        return [nn.Conv2d(cin, cout, 3, padding=1, bias=False), nn.BatchNorm2d(cout), nn.ReLU()]

    return nn.Sequential(
        Scale(), *conv(1, 16), *conv(16, 16), nn.MaxPool2d(2), *conv(16, 24), nn.MaxPool2d(2),
        nn.Flatten(), nn.Dropout(0.25), nn.Linear(96, 32), nn.GELU(), nn.Linear(32, 10), nn.Softmax(-1),
    )


def train(net, images, labels):
    logits = net[:-1]
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3, weight_decay=1e-2)
    steps = EPOCHS * (len(images) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 6e-3, total_steps=steps)
    x, y = torch.from_numpy(images), torch.from_numpy(labels)
    for _ in range(EPOCHS):
        for picked in torch.randperm(len(x))[: steps // EPOCHS * BATCH].split(BATCH):
            loss = F.cross_entropy(logits(shifted(x[picked])), y[picked], label_smoothing=0.05)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return net.eval()


def shifted(x):
    """Each batch moved by at most one pixel, the only augmentation."""
    dy, dx = torch.randint(0, 3, (2,)).tolist()
    return F.pad(x, (1, 1, 1, 1))[:, :, dy : dy + 8, dx : dx + 8]


def export(net, path):
    # Two images in the example, not one: the exporter would fix a dimension of 1.
    program = torch.onnx.export(
        net, (torch.zeros(2, 1, 8, 8),), opset_version=20, dynamo=True, verbose=False,
        input_names=["image"], output_names=["probabilities"], dynamic_shapes=({0: torch.export.Dim("batch")},),
    )
    model = strip(program.model_proto)
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, path)


def strip(model):
    """Drop the exporter's notes (stack traces with this machine's paths); names and values stay."""
    for holder in [model, model.graph, *model.graph.node, *model.graph.input, *model.graph.output, *model.graph.value_info, *model.graph.initializer]:
        del holder.metadata_props[:]
    for item in [*model.graph.node, *model.graph.value_info]:
        item.doc_string = ""
    return model


def report(path, net, images, labels):
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (got,) = session.run(None, {"image": images})
    with torch.no_grad():
        want = net(torch.from_numpy(images)).numpy()
    right = int((got.argmax(1) == labels).sum())
    print(f"{os.path.getsize(path)} bytes, {sum(p.numel() for p in net.parameters())} parameters")
    print(f"held out: {right} of {len(labels)} right = {100 * right / len(labels):.1f} % (onnxruntime)")
    print(f"largest difference to PyTorch {np.abs(got - want).max():.1e}")


if __name__ == "__main__":
    main()
