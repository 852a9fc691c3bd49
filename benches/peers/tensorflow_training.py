"""The training of the CIFAR-10 tutorial's network here and in TensorFlow, in turn: with the input pipeline, and the step alone.

usage: tensorflow_training.py FIT TRAINING [--threads N] [--rounds N] [--no-xla]
needs: pip install tensorflow-cpu; FIT and TRAINING are target/release/examples/fit and training
(cargo build --release -p gristmill-benches --example fit --example training)

TensorFlow's is a loop of its own over a tf.function, plain and with jit_compile (XLA), images NHWC as its CPU kernels take them, with
tf.nn.lrn. Its pipeline is tf.data on images in memory: random crop to 24 x 24, flip, brightness, contrast, and standardisation, on as many
threads. Bind both to the same cores: taskset -c 0 python tensorflow_training.py FIT TRAINING. Images per second are medians of rounds,
each an epoch of 12,800 images after a first one; milliseconds are medians of rounds, each the median of 30 steps.
"""

import argparse
import os
import statistics
import subprocess
import time

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"

import numpy as np
import tensorflow as tf

BATCH = 128
IMAGES = 12_800


def changed(image, label):
    image = tf.cast(tf.image.random_crop(image, [24, 24, 3]), tf.float32)
    image = tf.image.random_brightness(tf.image.random_flip_left_right(image), 63)
    return tf.image.per_image_standardization(tf.image.random_contrast(image, 0.2, 1.8)), label


def pipeline(threads):
    images = np.random.default_rng(1).integers(0, 256, (IMAGES, 32, 32, 3), np.uint8)
    labels = np.arange(IMAGES, dtype=np.int32) % 10
    data = tf.data.Dataset.from_tensor_slices((images, labels)).shuffle(IMAGES)
    data = data.map(changed, num_parallel_calls=threads, deterministic=False)
    data = data.batch(BATCH, drop_remainder=True).prefetch(2)
    options = tf.data.Options()
    options.threading.private_threadpool_size = threads
    options.autotune.enabled = False
    return data.with_options(options)


def pooled(x):
    return tf.nn.max_pool2d(x, 3, 2, "SAME")


def normalised(x):
    return tf.nn.lrn(x, depth_radius=4, bias=1.0, alpha=0.001 / 9, beta=0.75)


class CifarLrn(tf.Module):
    def __init__(self):
        super().__init__()
        shapes = [(5, 5, 3, 64), (5, 5, 64, 64), (2304, 384), (384, 192), (192, 10)]
        self.weights = [tf.Variable(tf.random.truncated_normal(shape, stddev=0.05)) for shape in shapes]
        self.biases = [tf.Variable(tf.zeros(shape[-1])) for shape in shapes]

    def __call__(self, x):
        conv0, conv1, *dense = zip(self.weights, self.biases)
        x = normalised(pooled(convolved(x, *conv0)))
        x = pooled(normalised(convolved(x, *conv1)))
        x = tf.reshape(x, [BATCH, 2304])
        for weights, bias in dense[:-1]:
            x = tf.nn.relu(tf.nn.bias_add(x @ weights, bias))
        weights, bias = dense[-1]
        return tf.nn.bias_add(x @ weights, bias)


def convolved(x, weights, bias):
    return tf.nn.relu(tf.nn.bias_add(tf.nn.conv2d(x, weights, 1, "SAME"), bias))


def sgd(variables):
    """The tutorial's: plain descent."""

    def update(gradients):
        for variable, gradient in zip(variables, gradients):
            variable.assign_sub(0.1 * gradient)

    return update


def adam(variables):
    """As in `training`, by TensorFlow's kernel, one call for each variable."""
    moments = [(tf.Variable(tf.zeros_like(v)), tf.Variable(tf.zeros_like(v))) for v in variables]
    powers = [tf.Variable(0.9), tf.Variable(0.999)]

    def update(gradients):
        for variable, gradient, (m, v) in zip(variables, gradients, moments):
            tf.raw_ops.ResourceApplyAdam(
                var=variable.handle, m=m.handle, v=v.handle, beta1_power=powers[0], beta2_power=powers[1],
                lr=0.001, beta1=0.9, beta2=0.999, epsilon=1e-8, grad=gradient,
            )
        powers[0].assign(powers[0] * 0.9)
        powers[1].assign(powers[1] * 0.999)

    return update


def stepper(optimiser, decay, is_xla):
    net = CifarLrn()
    update = optimiser(net.trainable_variables)

    @tf.function(jit_compile=is_xla)
    def step(images, labels):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, net(images)))
            for weights in net.weights[2:4] if decay else []:
                loss += decay * tf.nn.l2_loss(weights)
        update(tape.gradient(loss, net.trainable_variables))
        return loss

    return step


def epoch(data, step):
    n, last, start = 0, None, time.perf_counter()
    for images, labels in data:
        last = step(images, labels)
        n += len(labels)
    if last is not None:
        last.numpy()
    return n / (time.perf_counter() - start)


def median_ms(step, images, labels):
    times = []
    for _ in range(30):
        start = time.perf_counter()
        step(images, labels).numpy()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def ours(place, *command):
    """The figure at a place among the words of an output."""
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[place])


def compare(name, unit, rounds, own, peers, is_speed):
    """Prints medians of rounds in turn, and the ratio to the better peer."""
    mine, theirs = [], {kind: [] for kind in peers}
    for measure in peers.values():
        measure()
    for _ in range(rounds):
        mine.append(own())
        for kind, measure in peers.items():
            theirs[kind].append(measure())
    others = {kind: statistics.median(figures) for kind, figures in theirs.items()}
    mine, best = statistics.median(mine), (max if is_speed else min)(others.values())
    beside = ", ".join(f"{kind} {figure:.1f}" for kind, figure in others.items())
    print(f"{name}\t{mine:.1f} {unit}\t{beside}\tratio to the best {mine / best:.2f}", flush=True)


def main():
    words = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    words.add_argument("fit")
    words.add_argument("training")
    words.add_argument("--threads", type=int, default=1)
    words.add_argument("--rounds", type=int, default=3)
    words.add_argument("--no-xla", action="store_true")
    args = words.parse_args()
    tf.config.threading.set_intra_op_parallelism_threads(args.threads)
    tf.config.threading.set_inter_op_parallelism_threads(args.threads)
    kinds = {"plain": False} if args.no_xla else {"plain": False, "xla": True}
    threads, data = str(args.threads), pipeline(args.threads)

    def with_pipeline(is_xla):
        step = stepper(sgd, 0.004, is_xla)
        return lambda: epoch(data, step)

    def alone(is_xla):
        step = stepper(adam, 0.0, is_xla)
        images, labels = tf.random.normal([BATCH, 24, 24, 3]), tf.range(BATCH) % 10
        return lambda: median_ms(step, images, labels)

    for name, peers in {
        "pipeline": {"tf.data": lambda: epoch(data, lambda *_: None)},
        "cifar": {kind: with_pipeline(is_xla) for kind, is_xla in kinds.items()},
    }.items():
        compare(name, "images/s", args.rounds, lambda: ours(0, args.fit, name, threads), peers, True)
    peers = {kind: alone(is_xla) for kind, is_xla in kinds.items()}
    compare("step", "ms", args.rounds, lambda: ours(1, args.training, "cifar_lrn", "--threads", threads), peers, False)


if __name__ == "__main__":
    main()
