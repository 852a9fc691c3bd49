"""Losses of 100 steps of training in PyTorch, which tests/tests/training/curves.rs trains again.

usage: loss_curves.py OUT.npz (tests/data/training/curves.npz)
needs: pip install torch==2.15.0 numpy

Weights, examples and labels come from a formula that both sides compute. Float64, one thread.
"""

import sys

import numpy as np
import torch
from torch import nn

F = nn.functional
STEPS = 100


class Net:
    """Weights in the order of their making: number k has at place i `scale * sin(0.37 i + 1.7 k + 0.5)`."""

    def __init__(self):
        self.weights = []

    def weight(self, *shape, scale, add=0.0):
        i = np.arange(int(np.prod(shape)), dtype=np.float64)
        values = scale * np.sin(0.37 * i + 1.7 * len(self.weights) + 0.5) + add
        w = torch.tensor(values.reshape(shape), requires_grad=True)
        self.weights.append(w)
        return w


def reals(*shape):
    """Place i has `sin(0.61 i) + 0.3 cos(0.017 i^2 mod 1000)`."""
    i = np.arange(int(np.prod(shape)), dtype=np.float64)
    return torch.tensor((np.sin(0.61 * i) + 0.3 * np.cos(np.mod(0.017 * i * i, 1000.0))).reshape(shape))


def labels(n, classes):
    i = np.arange(n)
    return torch.tensor((i * 7 + i // 3) % classes)


def mlp(net):
    w1, b1 = net.weight(12, 20, scale=0.3), net.weight(20, scale=0.1)
    w2, b2 = net.weight(20, 5, scale=0.3), net.weight(5, scale=0.1)
    x, y = reals(16, 12), labels(16, 5)
    return lambda: F.cross_entropy(torch.tanh(x @ w1 + b1) @ w2 + b2, y)


def lenet(net):
    c1, b1 = net.weight(4, 1, 3, 3, scale=0.4), net.weight(4, scale=0.1)
    c2, b2 = net.weight(6, 4, 3, 3, scale=0.3), net.weight(6, scale=0.1)
    w, b = net.weight(54, 5, scale=0.2), net.weight(5, scale=0.1)
    x, y = reals(8, 1, 12, 12), labels(8, 5)

    def loss():
        h = F.max_pool2d(torch.relu(F.conv2d(x, c1, b1, padding=1)), 2)
        h = F.max_pool2d(torch.relu(F.conv2d(h, c2, b2, padding=1)), 2)
        return F.cross_entropy(h.flatten(1) @ w + b, y)

    return loss


def cifar(net):
    """The network of compiler/examples/cifar10.rs with 8 filters: overlapping pools and local response normalisation."""
    c1, b1 = net.weight(8, 3, 5, 5, scale=0.15), net.weight(8, scale=0.1)
    c2, b2 = net.weight(8, 8, 5, 5, scale=0.1), net.weight(8, scale=0.1, add=0.1)
    w3, b3 = net.weight(72, 16, scale=0.2), net.weight(16, scale=0.1, add=0.1)
    w4, b4 = net.weight(16, 5, scale=0.3), net.weight(5, scale=0.1)
    x, y = reals(8, 3, 12, 12), labels(8, 5)

    def pool(h):
        # "same" of an even extent: max_pool2d itself pads both sides alike.
        return F.max_pool2d(F.pad(h, (0, 1, 0, 1), value=-torch.inf), 3, 2)

    def loss():
        h = pool(torch.relu(F.conv2d(x, c1, b1, padding=2)))
        h = F.local_response_norm(h, 9, alpha=0.9, beta=0.75, k=1.0)
        h = torch.relu(F.conv2d(h, c2, b2, padding=2))
        h = pool(F.local_response_norm(h, 4, alpha=0.4, beta=0.6, k=2.0))
        h = torch.relu(h.flatten(1) @ w3 + b3)
        decay = 0.004 * (w3 * w3).sum() / 2
        return F.cross_entropy(h @ w4 + b4, y) + decay

    return loss


def gpt(net):
    """One block before its head: layer norm, causal attention of two heads, layer norm, GELU."""
    table, places = net.weight(11, 16, scale=0.5), net.weight(8, 16, scale=0.3)
    g1, h1 = net.weight(16, scale=0.1, add=1.0), net.weight(16, scale=0.1)
    wq, wk, wv, wo = (net.weight(16, 16, scale=0.3) for _ in range(4))
    g2, h2 = net.weight(16, scale=0.1, add=1.0), net.weight(16, scale=0.1)
    up, down = net.weight(16, 32, scale=0.2), net.weight(32, 16, scale=0.2)
    head = net.weight(16, 11, scale=0.3)
    tokens, y = labels(4 * 8, 11).reshape(4, 8), labels(4 * 8 + 1, 11)[1:]

    def heads(x):
        return x.reshape(4, 8, 2, 8).transpose(1, 2)

    def loss():
        x = table[tokens] + places
        n = F.layer_norm(x, [16], g1, h1)
        a = F.scaled_dot_product_attention(heads(n @ wq), heads(n @ wk), heads(n @ wv), is_causal=True)
        x = x + a.transpose(1, 2).reshape(4, 8, 16) @ wo
        n = F.layer_norm(x, [16], g2, h2)
        x = x + F.gelu(n @ up) @ down
        return F.cross_entropy((x @ head).reshape(32, 11), y)

    return loss


def lstm(net):
    """Six steps of one layer, gates in the order input, forget, cell, output."""
    w, u, b = net.weight(5, 32, scale=0.3), net.weight(8, 32, scale=0.3), net.weight(32, scale=0.1)
    head = net.weight(8, 4, scale=0.4)
    x, y = reals(6, 10, 5), labels(10, 4)

    def loss():
        h, c = torch.zeros(10, 8, dtype=torch.float64), torch.zeros(10, 8, dtype=torch.float64)
        for t in range(6):
            i, f, g, o = (x[t] @ w + h @ u + b).chunk(4, 1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
        return F.cross_entropy(h @ head, y)

    return loss


CURVES = {
    "mlp": (mlp, lambda p: torch.optim.Adam(p, lr=1e-2)),
    "lenet": (lenet, lambda p: torch.optim.Adam(p, lr=3e-3, weight_decay=1e-2)),
    "cifar": (cifar, lambda p: torch.optim.SGD(p, lr=0.05)),
    "gpt": (gpt, lambda p: torch.optim.AdamW(p, lr=3e-3, weight_decay=0.1)),
    "lstm": (lstm, lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True)),
}


def main():
    torch.set_num_threads(1)
    curves = {}
    for name, (make, optimiser) in CURVES.items():
        net = Net()
        loss = make(net)
        steps = optimiser(net.weights)
        losses = []
        for _ in range(STEPS):
            steps.zero_grad()
            value = loss()
            value.backward()
            steps.step()
            losses.append(value.item())
        curves[name] = np.array(losses)
        print(name, losses[0], losses[9], losses[-1])
    np.savez(sys.argv[1], **curves)


if __name__ == "__main__":
    main()
