"""Export a small object detector with torchvision's own post-processing: the data decides how many boxes there are at each step.

usage: export_detector.py OUTDIR
needs: pip install torch==2.11.0 torchvision==0.26.0 onnx onnxruntime

OUTDIR/model.onnx comes with test_data_set_N/{input,output}_i.pb (ONNX backend-test layout) of three images, the last without any box, with PyTorch's results.
"""
import os, sys, warnings
warnings.filterwarnings("ignore")
import onnx, onnxruntime, torch, torchvision
from onnx import numpy_helper
from torch import nn
from torchvision.ops import batched_nms, box_convert, clip_boxes_to_image, remove_small_boxes, roi_align

SIZE, STRIDE, CLASSES = 64, 8, 5


class Detector(nn.Module):
    """One stage of a Faster R-CNN (Ren et al., arXiv:1506.01497) in small."""

    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 8, 4, 4), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 16, 2, 2), nn.Tanh())
        self.objectness = nn.Conv2d(16, 1, 1)
        self.boxes = nn.Conv2d(16, 4, 1)
        self.classes = nn.Linear(16 * 9, CLASSES)

    def proposals(self, x):
        n = SIZE // STRIDE
        ys, xs = torch.meshgrid(torch.arange(n), torch.arange(n), indexing="ij")
        centers = torch.stack([xs, ys], -1).reshape(-1, 2) * STRIDE + STRIDE / 2
        d = self.boxes(x)[0].permute(1, 2, 0).reshape(-1, 4)
        boxes = torch.cat([centers + d[:, :2] * 4, torch.exp(d[:, 2:]) * 12], 1)
        boxes = clip_boxes_to_image(box_convert(boxes, "cxcywh", "xyxy"), (SIZE, SIZE))
        return boxes, torch.sigmoid(self.objectness(x)).reshape(-1)

    def forward(self, image):
        x = self.backbone(image)
        boxes, scores = self.proposals(x)
        keep = torch.where(scores > 0.5)[0]
        boxes, scores = boxes[keep], scores[keep]
        keep = remove_small_boxes(boxes, 4.0)
        boxes, scores = boxes[keep], scores[keep]
        keep = batched_nms(boxes, scores, torch.zeros_like(scores, dtype=torch.int64), 0.4)[:20]
        boxes = boxes[keep]
        pooled = roi_align(x, [boxes], 3, 1.0 / STRIDE, 2)
        best, labels = torch.softmax(self.classes(pooled.flatten(1)), -1)[:, 1:].max(1)
        keep = torch.where(best > 0.3)[0]
        return boxes[keep], best[keep], labels[keep] + 1


def save(folder, kind, tensors):
    os.makedirs(folder, exist_ok=True)
    for i, (name, t) in enumerate(tensors):
        with open(f"{folder}/{kind}_{i}.pb", "wb") as f:
            f.write(numpy_helper.from_array(t.numpy(), name).SerializeToString())


def main(out):
    os.makedirs(out, exist_ok=True)
    torch.manual_seed(3)
    m = Detector()
    m.backbone(torch.randn(16, 3, SIZE, SIZE))
    m.eval()
    for p in [m.objectness, m.boxes, m.classes]:
        nn.init.normal_(p.weight, std=0.6)
    path = f"{out}/model.onnx"
    names = ["boxes", "scores", "labels"]
    torch.onnx.export(m, (torch.randn(1, 3, SIZE, SIZE),), path, opset_version=17, dynamo=False, input_names=["image"], output_names=names)
    session = onnxruntime.InferenceSession(path)
    for i, image in enumerate([torch.randn(1, 3, SIZE, SIZE), torch.randn(1, 3, SIZE, SIZE) * 3, torch.full((1, 3, SIZE, SIZE), 9.0)]):
        with torch.no_grad():
            results = m(image)
        for ours, theirs in zip(results, session.run(None, {"image": image.numpy()})):
            assert torch.allclose(ours.double(), torch.from_numpy(theirs).double(), atol=1e-4), "onnxruntime differs"
        print([tuple(r.shape) for r in results])
        folder = f"{out}/test_data_set_{i}"
        save(folder, "input", [("image", image)])
        save(folder, "output", zip(names, results))


main(sys.argv[1])
