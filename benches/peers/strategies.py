"""Data-parallel training here, in PyTorch (DistributedDataParallel) and in TensorFlow (its strategies), in turn, on two cores.

usage: strategies.py TRAINING [--tensorflow PYTHON] [--rounds N] [MODEL ...]
       strategies.py --alone KIND MODEL (a process of one kind: median ms of a step, seconds to the end of the first, peak MiB)
       strategies.py --losses KIND MODEL (losses of the first steps, which all kinds of PyTorch and TensorFlow share)
needs: pip install torch numpy; PYTHON is an interpreter with tensorflow-cpu, without which TensorFlow is left out; TRAINING is
target/release/examples/training (cargo build --release -p gristmill-benches --example training)

Models are `mlp`, `lenet` and `cifar` of `training.py`, a batch has 128 examples, and a step is forward, backward and Adam. Each
kind has two threads: one device with both, or two replicas with one each and 64 of the examples.
- gristmill: one device, and `Mirrored` and `CentralStorage` on two logical CPUs.
- torch: one process; ddp: two processes, which add their gradients over gloo.
- tf: one device; tf-mirrored: `MirroredStrategy`; tf-central: `CentralStorageStrategy`, both on two logical CPUs. A loop of its
  own over a tf.function, images NHWC as its CPU kernels take them.

Each round is a process of each kind (two for ddp), whose figure is the median of 30 steps; the table has medians of rounds. The
first step counts from the model, with the libraries loaded and the processes connected. Peak memory is of the whole process with
its libraries; for ddp it is the sum of both, with the pages that they share counted twice.

Both cores have to be free: beside a build, steps of torch often took three to fifty times as long (less so with
OMP_WAIT_POLICY=passive), those of the others up to about twice.
"""

import argparse
import datetime
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time

BATCH = 128
REPLICAS = 2
THREADS = 2
TIMEOUT = 600

# Shape of an image (NHWC), filters of the convolutions, and widths of the dense layers with the first one's inputs.
NETS = {
    "mlp": ((784,), [], [784, 512, 256, 10]),
    "lenet": ((28, 28, 1), [6, 16], [784, 120, 84, 10]),
    "cifar": ((24, 24, 3), [64, 64], [2304, 384, 192, 10]),
}


def initial(name):
    """Weights (HWIO for convolutions, inputs by outputs for dense layers) and biases in turn, the same for all kinds."""
    import numpy as np

    shape, filters, units = NETS[name]
    random, channels, arrays = np.random.default_rng(1), [shape[-1], *filters], []
    shapes = [(5, 5, *pair) for pair in zip(channels, channels[1:])] + list(zip(units, units[1:]))
    for shape in shapes:
        area = np.prod(shape[:-2])
        most = (6 / (area * (shape[-2] + shape[-1]))) ** 0.5
        arrays += [random.uniform(-most, most, shape).astype(np.float32), np.zeros(shape[-1], np.float32)]
    return arrays


def batch(name):
    """Images (NHWC) and labels."""
    import numpy as np

    images = np.random.default_rng(2).standard_normal((BATCH, *NETS[name][0]), np.float32)
    return images, np.arange(BATCH) % 10


def peak_mib():
    """Of this process. A parent's peak would count as well, so that the parents here load no library."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def steps(kind, name, rank, folder):
    """A step, and what measures its median, for a kind that is a process of Python."""
    return tensorflow_steps(kind, name) if kind.startswith("tf") else torch_steps(name, rank, folder)


# PyTorch


def as_torch(name):
    """The initial weights as PyTorch has them: OIHW, outputs by inputs, and images flattened from NCHW."""
    shape, filters, units = NETS[name]
    arrays = initial(name)
    first = 2 * len(filters)
    if filters:
        side = shape[0] // 4
        rows = arrays[first].reshape(side, side, filters[-1], units[1])
        arrays[first] = rows.transpose(2, 0, 1, 3).reshape(units[0], units[1])
    orders = {1: (0,), 2: (1, 0), 4: (3, 2, 0, 1)}
    return [array.transpose(orders[array.ndim]) for array in arrays]


def torch_steps(name, rank, folder):
    """With a rank, the process is one of the replicas."""
    import torch
    from training import MODELS, median_ms

    is_replica = rank is not None
    torch.set_num_threads(THREADS // REPLICAS if is_replica else THREADS)
    if is_replica:
        connect(rank, folder)
    # The first optimiser loads the compiler of PyTorch, for a second.
    torch.optim.Adam([torch.zeros(1)])
    begin = time.perf_counter()
    net = MODELS[name][0]()
    with torch.no_grad():
        for parameter, array in zip(net.parameters(), as_torch(name), strict=True):
            parameter.copy_(torch.from_numpy(array.copy()))
    if is_replica:
        net = torch.nn.parallel.DistributedDataParallel(net, gradient_as_bucket_view=True)
    optimiser = torch.optim.Adam(net.parameters(), fused=True)
    x, label = torch_batch(name, rank)

    def step():
        optimiser.zero_grad()
        loss = torch.nn.functional.cross_entropy(net(x), label)
        loss.backward()
        optimiser.step()
        return loss.detach()

    return begin, step, lambda: median_ms(step)


def torch_batch(name, rank):
    import torch

    x, label = (torch.from_numpy(array) for array in batch(name))
    x = x.movedim(-1, 1).contiguous()
    if rank is None:
        return x, label
    return x.chunk(REPLICAS)[rank].clone(), label.chunk(REPLICAS)[rank].clone()


def connect(rank, folder):
    import torch

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    where, most = f"file://{folder}/store", datetime.timedelta(seconds=TIMEOUT / 4)
    torch.distributed.init_process_group("gloo", init_method=where, rank=rank, world_size=REPLICAS, timeout=most)


def disconnect():
    """Gloo's threads end with the group, and not after Python, where they would end the process."""
    import torch

    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def sum_of_ranks(figure):
    import torch

    total = torch.tensor([float(figure)], dtype=torch.float64)
    torch.distributed.all_reduce(total)
    return total.item()


def start_ranks(words):
    """Runs this script once for each rank, and prints what the first one says."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, *words, "--folder", folder, "--rank"]
        ranks = [subprocess.Popen([*command, str(rank)]) for rank in range(REPLICAS)]
        try:
            codes = [rank.wait(TIMEOUT) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
    return max(map(abs, codes))


# TensorFlow


def tensorflow_steps(kind, name):
    import tensorflow as tf
    from tensorflow_training import median_ms

    n_replicas = 1 if kind == "tf" else REPLICAS
    tf.config.threading.set_intra_op_parallelism_threads(THREADS // n_replicas)
    tf.config.threading.set_inter_op_parallelism_threads(THREADS)
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * n_replicas)
    begin = time.perf_counter()
    strategy = strategy_of(kind)
    with strategy.scope():
        variables = [tf.Variable(array) for array in initial(name)]
        update = adam(variables)
    images, labels = tensorflow_batch(strategy, name)

    def replica(x, label):
        with tf.GradientTape() as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(label, logits(name, variables, x))
            loss = tf.reduce_mean(losses) / n_replicas
        gradients = tape.gradient(loss, variables)
        tf.distribute.get_replica_context().merge_call(update, args=(gradients,))
        return loss

    @tf.function
    def step(images, labels):
        return strategy.reduce("SUM", strategy.run(replica, args=(images, labels)), axis=None)

    return begin, lambda: step(images, labels).numpy(), lambda: median_ms(step, images, labels)


def strategy_of(kind):
    import tensorflow as tf

    devices = [f"/cpu:{i}" for i in range(REPLICAS)]
    match kind:
        case "tf-mirrored":
            return tf.distribute.MirroredStrategy(devices)
        case "tf-central":
            return tf.distribute.experimental.CentralStorageStrategy(devices, devices[0])
    return tf.distribute.get_strategy()


def tensorflow_batch(strategy, name):
    """Images and labels, as many for each replica."""
    import tensorflow as tf

    def part(array):
        parts = tf.split(array, strategy.num_replicas_in_sync)
        return strategy.experimental_distribute_values_from_function(lambda c: parts[c.replica_id_in_sync_group])

    return [part(array) for array in batch(name)]


def logits(name, variables, x):
    import tensorflow as tf
    from tensorflow_training import convolved

    _, filters, units = NETS[name]
    layers = list(zip(variables[::2], variables[1::2]))
    for layer in layers[: len(filters)]:
        x = tf.nn.max_pool2d(convolved(x, *layer), 2, 2, "SAME")
    x = tf.reshape(x, [-1, units[0]])
    for weights, bias in layers[len(filters) : -1]:
        x = tf.nn.relu(tf.nn.bias_add(x @ weights, bias))
    weights, bias = layers[-1]
    return tf.nn.bias_add(x @ weights, bias)


def adam(variables):
    """By TensorFlow's kernel, one call for each variable and device, after the sum of the replicas' gradients."""
    import tensorflow as tf

    moments = [(tf.Variable(tf.zeros_like(v)), tf.Variable(tf.zeros_like(v))) for v in variables]
    powers = [tf.Variable(0.9), tf.Variable(0.999)]

    def one(variable, gradient, m, v, *powers):
        tf.raw_ops.ResourceApplyAdam(
            var=variable.handle, m=m.handle, v=v.handle, beta1_power=powers[0], beta2_power=powers[1],
            lr=0.001, beta1=0.9, beta2=0.999, epsilon=1e-8, grad=gradient,
        )

    def update(strategy, gradients):
        sums = strategy.extended.batch_reduce_to(tf.distribute.ReduceOp.SUM, list(zip(gradients, variables)))
        for variable, gradient, (m, v) in zip(variables, sums, moments):
            strategy.extended.update(variable, one, args=(gradient, m, v, *powers))
        for power, beta in zip(powers, [0.9, 0.999]):
            strategy.extended.update(power, lambda p, beta=beta: p.assign(p * beta))

    return update


# All of them


def alone(kind, name, rank, folder):
    begin, step, median = steps(kind, name, rank, folder)
    step()
    first = time.perf_counter() - begin
    for _ in range(3):
        step()
    ms, peak = median(), peak_mib()
    if rank is not None:
        peak = sum_of_ranks(peak)
    if not rank:
        print(f"{ms:.4f} {first:.4f} {peak:.0f}", flush=True)
    if rank is not None:
        disconnect()


def losses(kind, name, rank, folder):
    _, step, _ = steps(kind, name, rank, folder)
    found = [float(step()) for _ in range(10)]
    if rank is not None:
        found = [sum_of_ranks(loss) / REPLICAS for loss in found]
    if not rank:
        print(*(f"{loss:.5f}" for loss in found))


def words_of(*command):
    """What a process prints, by words; with what it complains of where it fails."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=2 * TIMEOUT)
    if done.returncode:
        sys.exit(f"{' '.join(command)}: {done.returncode}\n{done.stderr[-4000:]}")
    return done.stdout.split()


def ours(training, name, n_replicas, strategy="mirrored"):
    flags = ["--threads", str(THREADS), "--replicas", str(n_replicas), "--strategy", strategy]
    said = words_of(training, name, *flags)
    return float(said[1]), float(said[6]), float(said[9])


def theirs(python, kind, name):
    return tuple(float(word) for word in words_of(python, __file__, "--alone", kind, name))


def kinds(args):
    """By name: what measures a model, and which of ours it is beside."""
    found = {
        "gristmill": (lambda name: ours(args.training, name, 1), "gristmill"),
        "gristmill mirrored": (lambda name: ours(args.training, name, REPLICAS), "gristmill mirrored"),
        "gristmill central": (lambda name: ours(args.training, name, REPLICAS, "central"), "gristmill central"),
    }
    pythons = {"torch": sys.executable, "ddp": sys.executable}
    if args.tensorflow:
        pythons |= dict.fromkeys(["tf", "tf-mirrored", "tf-central"], args.tensorflow)
    for kind, python in pythons.items():
        beside = {"torch": "gristmill", "tf": "gristmill", "tf-central": "gristmill central"}.get(kind, "gristmill mirrored")
        found[kind] = (lambda name, python=python, kind=kind: theirs(python, kind, name), beside)
    return found


def table(name, kinds, rounds):
    """Prints the rows of a model."""
    measured = {kind: [] for kind in kinds}
    for _ in range(rounds):
        for kind, (measure, _) in kinds.items():
            measured[kind].append(measure(name))
    medians = {kind: [statistics.median(column) for column in zip(*rows)] for kind, rows in measured.items()}
    for kind, (ms, first, peak) in medians.items():
        ratio = medians[kinds[kind][1]][0] / ms
        print(f"| {name} | {kind} | {ms:.3f} ms | {ratio:.2f} | {first:.2f} s | {peak:.0f} MiB |", flush=True)


def main():
    words = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    words.add_argument("training")
    words.add_argument("models", nargs="*", default=list(NETS))
    words.add_argument("--tensorflow", metavar="PYTHON")
    words.add_argument("--rounds", type=int, default=3)
    args = words.parse_intermixed_args()
    print("| model | kind | step | ratio of ours to it | first step after | peak memory |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name in args.models:
        table(name, kinds(args), args.rounds)


def child(measure):
    words = argparse.ArgumentParser()
    words.add_argument("flag")
    words.add_argument("kind", choices=["torch", "ddp", "tf", "tf-mirrored", "tf-central"])
    words.add_argument("model", choices=list(NETS))
    words.add_argument("--rank", type=int)
    words.add_argument("--folder")
    # The first word is the flag that chose `measure`.
    args = words.parse_args(["_", *sys.argv[2:]])
    if args.kind == "ddp" and args.rank is None:
        sys.exit(start_ranks(sys.argv[1:]))
    measure(args.kind, args.model, args.rank, args.folder)


if __name__ == "__main__":
    child_of = {"--alone": alone, "--losses": losses}.get(sys.argv[1] if len(sys.argv) > 1 else None)
    child(child_of) if child_of else main()
