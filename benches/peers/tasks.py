"""Tensors and steps between two tasks of TensorFlow, each a process of this machine: the peer of `benches/examples/tasks`.

tasks.py [N]: medians of N rounds (15). With tensorflow-cpu in the Python that runs it.
"""

import os
import socket
import statistics
import subprocess
import sys
import time

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["CUDA_VISIBLE_DEVICES"] = ""
import tensorflow.compat.v1 as tf

tf.disable_eager_execution()


def server(number, addresses):
    config = tf.ConfigProto(intra_op_parallelism_threads=1, inter_op_parallelism_threads=2)
    return tf.train.Server({"worker": addresses}, job_name="worker", task_index=number, config=config)


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def main():
    if len(sys.argv) > 2 and sys.argv[1] == "serve":
        server(int(sys.argv[2]), sys.argv[3:])
        print("ready", flush=True)
        sys.stdin.read(1)
        os._exit(0)
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    processes = []
    for number in "01":
        command = [sys.executable, __file__, "serve", number, *addresses]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        process.stdout.readline()
        processes.append(process)
    here, there = "/job:worker/task:0/cpu:0", "/job:worker/task:1/cpu:0"
    cases = []
    with tf.device(there):
        x = tf.placeholder(tf.float32, [1])
        added = x + 1.0
    with tf.device(here):
        y = added + 1.0
    variables = {}
    for n_bytes in (4 << 20, 64 << 20):
        with tf.device(there):
            # Neither constant folding nor a slice before the transfer.
            variables[n_bytes] = tf.Variable(tf.ones([n_bytes // 4]))
            read = variables[n_bytes].read_value()
        with tf.device(here):
            cases.append((n_bytes, tf.slice(read, [0], [1]).op, {}))
    cases.insert(0, (4, y, {x: [1.0]}))
    options = tf.ConfigProto()
    options.graph_options.rewrite_options.disable_meta_optimizer = True
    with tf.Session("grpc://" + addresses[0], config=options) as session:
        session.run(tf.global_variables_initializer())
        # A callable, as gristmill's programs are: feeds and fetches are looked up once.
        calls = []
        for n_bytes, fetch, feeds in cases:
            if feeds:
                call = session.make_callable(fetch, list(feeds))
                calls.append((n_bytes, lambda call=call, v=list(feeds.values()): call(*v)))
            else:
                calls.append((n_bytes, session.make_callable(fetch)))
        seconds = {n_bytes: [] for n_bytes, _ in calls}
        for _ in range(rounds):
            for n_bytes, call in calls:
                n = 200 if n_bytes == 4 else 4
                call()
                started = time.perf_counter()
                for _ in range(n):
                    call()
                seconds[n_bytes].append((time.perf_counter() - started) / n)
    for n_bytes, all_seconds in seconds.items():
        s = statistics.median(all_seconds)
        print(f"{n_bytes:>9} B  tensorflow   {s * 1e6:9.1f} us  {n_bytes / s / 1e9:6.2f} GB/s")
    for process in processes:
        process.kill()


main()
