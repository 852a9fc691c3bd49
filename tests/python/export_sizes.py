"""Export small models whose extents follow from sizes of inputs by way of tables, strides and paddings, with onnxruntime's results.

usage: export_sizes.py OUTDIR [NAME ...]
needs: pip install torch==2.15.0 transformers==5.24.0 onnx onnxruntime (never part of CI)

OUTDIR/NAME/model.onnx comes with test_data_set_N/{input,output}_i.pb (ONNX backend-test layout), one set for each size. Weights are random.
"""
import os, shutil, sys, warnings

warnings.filterwarnings("ignore")
import numpy as np, onnxruntime, torch, transformers
from onnx import numpy_helper

TOKENS = [(2, 12), (1, 7), (3, 20)]
SAMPLES = [(1, 400), (2, 500), (1, 333)]
TEXT = dict(vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, max_position_embeddings=64)
SOUND = dict(vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, conv_dim=(8, 8, 8),
             conv_stride=(5, 2, 2), conv_kernel=(10, 3, 3), num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4)


class Of(torch.nn.Module):
    """A function of a model."""

    def __init__(self, f, model=None):
        super().__init__()
        self.f, self.model = f, model

    def forward(self, *inputs):
        return self.f(self.model, *inputs)


def text(model):
    f = Of(lambda m, ids, mask: m(input_ids=ids, attention_mask=mask).last_hidden_state, model)
    axes = {0: "batch", 1: "seq"}
    inputs = lambda size: (torch.randint(0, 50, size), torch.ones(size, dtype=torch.int64))
    return f, TOKENS, inputs, {"input_ids": axes, "attention_mask": axes}


def bert():
    return text(transformers.BertModel(transformers.BertConfig(**TEXT)))


def mobilebert():
    narrow = dict(embedding_size=16, intra_bottleneck_size=8, true_hidden_size=8)
    return text(transformers.MobileBertModel(transformers.MobileBertConfig(**TEXT, **narrow)))


def wav2vec2():
    model = transformers.Wav2Vec2Model(transformers.Wav2Vec2Config(**SOUND))
    f = Of(lambda m, x: m(x).last_hidden_state, model)
    return f, SAMPLES, lambda size: (torch.randn(size),), {"x": {0: "batch", 1: "samples"}}


def hubert():
    model = transformers.HubertModel(transformers.HubertConfig(**SOUND))
    f = Of(lambda m, x: m(x).last_hidden_state, model)
    return f, SAMPLES, lambda size: (torch.randn(size),), {"x": {0: "batch", 1: "samples"}}


def encodec():
    config = transformers.EncodecConfig(num_filters=2, hidden_size=8, codebook_size=32, codebook_dim=8, upsampling_ratios=[4, 2, 2],
                                        num_lstm_layers=1, normalize=False)
    f = Of(lambda m, x: m.decoder(m.encoder(x)), transformers.EncodecModel(config))
    return f, SAMPLES, lambda size: (torch.randn(size[0], 1, size[1]),), {"x": {0: "batch", 2: "samples"}}


class Graph(torch.nn.Module):
    """A graph convolution: messages along edges, scattered to their ends."""

    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(8, 4), torch.nn.Linear(4, 3)

    def spread(self, x, edges):
        sources, ends = edges[0], edges[1]
        degrees = torch.zeros(x.shape[0]).scatter_add(0, ends, torch.ones(ends.shape[0])) + 1
        messages = x[sources] * (degrees[sources] * degrees[ends]).rsqrt()[:, None]
        rows = ends[:, None].expand(-1, x.shape[1])
        return torch.zeros(x.shape[0], x.shape[1]).scatter_add(0, rows, messages) + x / degrees[:, None]

    def forward(self, x, edges):
        return self.last(torch.relu(self.spread(self.first(x), edges)))


def gcn():
    inputs = lambda size: (torch.randn(size[0], 8), torch.randint(0, size[0], (2, size[1])))
    return Graph(), [(6, 14), (9, 20), (4, 5)], inputs, {"x": {0: "nodes"}, "edges": {1: "edges"}}


class Skips(torch.nn.Module):
    """A U-Net: axes are halved twice, doubled twice, and joined with what was there before."""

    def __init__(self):
        super().__init__()
        conv = lambda a, b, stride=1: torch.nn.Conv2d(a, b, 3, stride=stride, padding=1)
        self.a, self.b, self.c = conv(3, 8), conv(8, 8, 2), conv(8, 8, 2)
        self.d, self.e = conv(16, 8), conv(16, 3)

    def forward(self, x):
        double = lambda t: torch.nn.functional.interpolate(t, scale_factor=2.0, mode="nearest")
        a = torch.relu(self.a(x))
        b = torch.relu(self.b(a))
        c = torch.relu(self.c(b))
        d = torch.relu(self.d(torch.cat([double(c), b], 1)))
        return self.e(torch.cat([double(d), a], 1))


def unet():
    return Skips(), [(16, 16), (32, 16), (24, 40)], lambda size: (torch.randn(1, 3, *size),), {"x": {2: "h", 3: "w"}}


MODELS = [bert, mobilebert, wav2vec2, hubert, encodec, gcn, unet]


def main(folder, names):
    for build in MODELS:
        if names and build.__name__ not in names:
            continue
        torch.manual_seed(0)
        model, sizes, inputs, axes = build()
        here = os.path.join(folder, build.__name__)
        shutil.rmtree(here, ignore_errors=True)
        os.makedirs(here)
        path = os.path.join(here, "model.onnx")
        torch.onnx.export(model.eval(), inputs(sizes[0]), path, input_names=list(axes), output_names=["y"], dynamic_axes=axes,
                          opset_version=17, dynamo=False)
        session = onnxruntime.InferenceSession(path)
        for i, size in enumerate(sizes):
            given = dict(zip(axes, [t.numpy() for t in inputs(size)]))
            given = {x.name: given[x.name] for x in session.get_inputs()}
            case = os.path.join(here, f"test_data_set_{i}")
            os.makedirs(case)
            found = dict(y=session.run(None, given)[0])
            for kind, values in [("input", given), ("output", found)]:
                for j, (name, value) in enumerate(values.items()):
                    with open(os.path.join(case, f"{kind}_{j}.pb"), "wb") as f:
                        f.write(numpy_helper.from_array(np.asarray(value), name).SerializeToString())


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
