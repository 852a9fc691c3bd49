"""The input pipeline of CIFAR-10, and the training of the tutorial's network with it, here and in PyTorch, in turn.

usage: pipeline.py FIT [--threads N] [--rounds N]
needs: pip install torch torchvision; FIT is target/release/examples/fit (cargo build --release -p gristmill-benches --example fit)

PyTorch's is a DataLoader with as many workers as threads, on images in memory, with torchvision's transforms: random crop to 24 x 24, flip,
brightness, contrast, and standardisation. Bind both to the same cores: taskset -c 0 python pipeline.py FIT. Figures are images per second,
medians of rounds, each an epoch of 12,800 images after a first one.
"""

import argparse
import statistics
import subprocess
import time

import torch
from torch import nn
from torchvision import transforms

import training

IMAGES = 12_800


class Images(torch.utils.data.Dataset):
    def __init__(self):
        self.images = torch.randint(0, 256, (IMAGES, 3, 32, 32), dtype=torch.uint8)
        self.labels = torch.arange(IMAGES) % 10
        self.changes = transforms.Compose([
            transforms.RandomCrop(24),
            transforms.RandomHorizontalFlip(),
            transforms.ConvertImageDtype(torch.float32),
            transforms.ColorJitter(brightness=0.25, contrast=(0.2, 1.8)),
        ])

    def __len__(self):
        return IMAGES

    def __getitem__(self, i):
        image = self.changes(self.images[i])
        return (image - image.mean()) / image.std().clamp(min=1 / 24), self.labels[i]


def epoch(loader, step):
    n, start = 0, time.perf_counter()
    for images, labels in loader:
        step(images, labels)
        n += len(labels)
    return n / (time.perf_counter() - start)


def stepper(is_compiled):
    net = training.CifarLrn()
    optimiser = torch.optim.SGD(net.parameters(), lr=0.1)
    decayed = [net.dense[1].weight, net.dense[3].weight]

    def loss(images, labels):
        decay = sum(0.002 * (w * w).sum() for w in decayed)
        return nn.functional.cross_entropy(net(images), labels) + decay

    forward = torch.compile(loss) if is_compiled else loss

    def step(images, labels):
        optimiser.zero_grad()
        forward(images, labels).backward()
        optimiser.step()

    return step


def main():
    words = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    words.add_argument("fit")
    words.add_argument("--threads", type=int, default=1)
    words.add_argument("--rounds", type=int, default=3)
    args = words.parse_args()
    torch.set_num_threads(args.threads)
    loader = torch.utils.data.DataLoader(
        Images(), batch_size=128, shuffle=True, drop_last=True, num_workers=args.threads, persistent_workers=True
    )
    kinds = {
        "pipeline": {"DataLoader": lambda *_: None},
        "cifar": {"eager": stepper(False), "compile": stepper(True)},
    }
    for name, peers in kinds.items():
        ours, theirs = [], {kind: [] for kind in peers}
        for step in peers.values():
            epoch(loader, step)
        for _ in range(args.rounds):
            said = subprocess.run([args.fit, name, str(args.threads)], check=True, capture_output=True, text=True)
            ours.append(float(said.stdout.split()[0]))
            for kind, step in peers.items():
                theirs[kind].append(epoch(loader, step))
        others = {kind: statistics.median(speeds) for kind, speeds in theirs.items()}
        own, best = statistics.median(ours), max(others.values())
        beside = ", ".join(f"{kind} {speed:.0f}" for kind, speed in others.items())
        print(f"{name}\t{own:.0f} images/s\t{beside}\tratio to the best {own / best:.2f}", flush=True)


if __name__ == "__main__":
    main()
