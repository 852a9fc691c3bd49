"""Export PyTorch architectures whose ops once had no kernel, of random weights, with an input and onnxruntime's results.

usage: architectures.py OUTDIR [NAME ...]
needs: pip install torch torchvision transformers onnx onnxruntime numpy
Each lands as OUTDIR/NAME/model.onnx with test_data_set_0/{input,output}_i.pb, for compare.py, quantize.py and `gristmill run --test-data`.
Video and volume nets (convolutions over three axes), nets to quantise (first convolutions of few channels, grouped and one-axis ones), and
nets with sampling and dilation. Batch 1, fixed shapes, f32; weights and running statistics are random, the seed is fixed.
"""

import inspect
import os
import sys
import time
import warnings

import numpy as np
import onnx
import onnxruntime
import torch
from onnx import numpy_helper
from torch import nn

warnings.filterwarnings("ignore")
NAMES = {}


def architecture(f):
    NAMES[f.__name__] = f
    return f


class First(nn.Module):
    """The first result of a model that returns several, by name or not."""

    def __init__(self, model, key=None, argument=None):
        super().__init__()
        self.model, self.key, self.argument = model, key, argument

    def forward(self, x):
        y = self.model(**{self.argument: x}) if self.argument else self.model(x)
        return y[self.key] if self.key else y[0]


# Video and volumes


def clip(frames=8, size=64): return torch.randn(1, 3, frames, size, size)


@architecture
def r3d_18():
    from torchvision.models.video import r3d_18
    return r3d_18(weights=None), clip()


@architecture
def r2plus1d_18():
    from torchvision.models.video import r2plus1d_18
    return r2plus1d_18(weights=None), clip()


@architecture
def swin3d_t():
    from torchvision.models.video import swin3d_t
    return swin3d_t(weights=None), clip()


def video_config(kind, **more):
    import transformers
    return getattr(transformers, kind)(hidden_size=192, num_hidden_layers=4, num_attention_heads=3, intermediate_size=768, image_size=112,
                                       attn_implementation="eager", **more)


@architecture
def videomae():
    from transformers import VideoMAEModel
    return First(VideoMAEModel(video_config("VideoMAEConfig", num_frames=8))), torch.randn(1, 8, 3, 112, 112)


@architecture
def vivit():
    from transformers import VivitModel
    model = VivitModel(video_config("VivitConfig", num_frames=8), add_pooling_layer=False)
    return First(model), torch.randn(1, 8, 3, 112, 112)


class Unet3d(nn.Module):
    """The U-Net of volumes (Cicek and others, arXiv:1606.06650) with a quarter of its channels."""

    def __init__(self, widths=(16, 32, 64)):
        super().__init__()
        def block(n_in, n):
            layers = []
            for a, b in [(n_in, n), (n, n)]:
                layers += [nn.Conv3d(a, b, 3, padding=1), nn.BatchNorm3d(b), nn.ReLU()]
            return nn.Sequential(*layers)
        before = (1, *widths)
        self.down = nn.ModuleList(block(a, b) for a, b in zip(before, widths))
        self.up = nn.ModuleList(nn.ConvTranspose3d(b, a, 2, 2) for a, b in zip(widths, widths[1:]))
        self.join = nn.ModuleList(block(2 * a, a) for a in widths[:-1])
        self.last = nn.Conv3d(widths[0], 3, 1)

    def forward(self, x):
        skips = []
        for i, block in enumerate(self.down):
            x = block(nn.functional.max_pool3d(x, 2) if i else x)
            skips.append(x)
        for i in reversed(range(len(self.up))):
            x = self.join[i](torch.cat([skips[i], self.up[i](x)], 1))
        return self.last(x)


@architecture
def unet3d():
    return Unet3d(), torch.randn(1, 1, 32, 64, 64)


# To be quantised


@architecture
def vit():
    from transformers import ViTConfig, ViTModel
    config = ViTConfig(hidden_size=384, num_hidden_layers=6, num_attention_heads=6, intermediate_size=1536, attn_implementation="eager")
    return First(ViTModel(config, add_pooling_layer=False)), torch.randn(1, 3, 224, 224)


@architecture
def whisper_encoder():
    from transformers import WhisperConfig, WhisperModel
    config = WhisperConfig(d_model=256, encoder_layers=4, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=1024, decoder_layers=1,
                           max_source_positions=500, attn_implementation="eager")
    return First(WhisperModel(config).encoder), torch.randn(1, 80, 1000)


@architecture
def segformer():
    from transformers import SegformerConfig, SegformerForSemanticSegmentation
    return First(SegformerForSemanticSegmentation(SegformerConfig(attn_implementation="eager"))), torch.randn(1, 3, 256, 256)


class Crnn(nn.Module):
    """Text recognition (Shi and others, arXiv:1507.05717): convolutions over a line of text, then two bidirectional LSTMs."""

    def __init__(self, width=256):
        super().__init__()
        def conv(a, b, *after): return [nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(), *after]
        self.features = nn.Sequential(*conv(1, 64, nn.MaxPool2d(2)), *conv(64, 128, nn.MaxPool2d(2)), *conv(128, 256),
                                      *conv(256, 256, nn.MaxPool2d((2, 1))), *conv(256, width, nn.MaxPool2d((4, 1))))
        self.lstm = nn.LSTM(width, width, num_layers=2, bidirectional=True)
        self.last = nn.Linear(2 * width, 96)

    def forward(self, x):
        x = self.features(x).squeeze(2).permute(2, 0, 1)
        return self.last(self.lstm(x)[0])


@architecture
def crnn():
    return Crnn(), torch.randn(1, 1, 32, 256)


@architecture
def swin():
    from torchvision.models import swin_t
    return swin_t(weights=None), torch.randn(1, 3, 224, 224)


@architecture
def mobilenet_v2():
    from torchvision.models import mobilenet_v2
    return mobilenet_v2(weights=None), torch.randn(1, 3, 224, 224)


@architecture
def resnet50():
    from torchvision.models import resnet50
    return resnet50(weights=None), torch.randn(1, 3, 224, 224)


@architecture
def bert():
    from transformers import BertConfig, BertModel
    config = BertConfig(hidden_size=384, num_hidden_layers=6, num_attention_heads=6, intermediate_size=1536, attn_implementation="eager")
    return First(BertModel(config, add_pooling_layer=False)), torch.randint(0, 30000, (1, 128))


# Sampling and dilation


def sampled_in_f32():
    """The exporter makes doubles of sampling positions, for which onnxruntime has no kernel."""
    sample = nn.functional.grid_sample
    nn.functional.grid_sample = lambda x, grid, **more: sample(x, grid.to(x.dtype), **more)


@architecture
def deformable_detr():
    sampled_in_f32()
    from transformers import DeformableDetrConfig, DeformableDetrModel, ResNetConfig
    config = DeformableDetrConfig(use_timm_backbone=False, use_pretrained_backbone=False, backbone=None,
                                  backbone_config=ResNetConfig(out_features=["stage2", "stage3", "stage4"]), encoder_layers=2, decoder_layers=2,
                                  attn_implementation="eager", disable_custom_kernels=True)
    return First(DeformableDetrModel(config), "last_hidden_state"), torch.randn(1, 3, 256, 256)


@architecture
def deeplabv3():
    from torchvision.models.segmentation import deeplabv3_resnet50
    return First(deeplabv3_resnet50(weights=None, weights_backbone=None), "out"), torch.randn(1, 3, 256, 256)


def randomise(model):
    """Random statistics and small offsets, so that a wrong fusion shows."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.running_mean.normal_(0, 0.2)
            module.running_var.uniform_(0.6, 1.6)
            nn.init.uniform_(module.weight, 0.7, 1.3)
            nn.init.normal_(module.bias, 0, 0.1)


def export(model, x, path):
    torch.onnx.export(model, (x,), path, input_names=["input"], output_names=["output"], opset_version=20, dynamo=False)


def write(name, directory):
    torch.manual_seed(0)
    model, x = NAMES[name]()
    randomise(model)
    data = os.path.join(directory, "test_data_set_0")
    os.makedirs(data, exist_ok=True)
    path = os.path.join(directory, "model.onnx")
    with torch.no_grad():
        export(model.eval(), x, path)
    feeds = {"input": x.numpy()}
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    results = dict(zip([o.name for o in session.get_outputs()], session.run(None, feeds)))
    for prefix, values in [("input", feeds), ("output", results)]:
        for i, (value, array) in enumerate(values.items()):
            with open(os.path.join(data, f"{prefix}_{i}.pb"), "wb") as f:
                f.write(numpy_helper.from_array(array, value).SerializeToString())
    if not all(np.isfinite(r).all() for r in results.values()): raise ValueError(f"{name}: results are not finite")
    return results


def main():
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"): sys.exit(inspect.cleandoc(__doc__))
    unknown = [name for name in sys.argv[2:] if name not in NAMES]
    if unknown: sys.exit(f"no such architectures: {', '.join(unknown)}; there are {', '.join(NAMES)}")
    for name in sys.argv[2:] or NAMES:
        started = time.time()
        try:
            results = write(name, os.path.join(sys.argv[1], name))
        except Exception as e:
            print(f"{name:<18} not exported: {type(e).__name__}: {str(e)[:300]}", flush=True)
            continue
        shown = ", ".join(f"{list(r.shape)} deviation {r.std():.3g}" for r in results.values())
        print(f"{name:<18} {shown}  {time.time() - started:.1f} s", flush=True)


if __name__ == "__main__":
    main()
