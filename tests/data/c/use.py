"""Runs the module of the compiled digits: use.py FOLDER_OF_THE_MODULE DATA. Prints "ok"."""

import os
import sys
import threading

sys.path.insert(0, sys.argv[1])

import numpy as np

import class_model
import counter
import digits


def refused(error, text, call):
    try:
        call()
    except error as e:
        assert text in str(e), e
        return
    raise AssertionError(f"{text}: no {error.__name__}")


images = np.load(sys.argv[2] + "/batch.npz")["image"]
labels = np.load(sys.argv[2] + "/labels.npy")
with digits.Model(threads=2) as model:
    assert "2 variants" in model.describe()
    right = [model.run(image)["probabilities"].argmax() for image in images[:, None]]
    assert (right == labels).sum() == 356
    eight = model.run(image=images[:8])["probabilities"]
    assert eight.shape == (8, 10) and (eight.argmax(1) == right[:8]).all()
    assert (model.run(np.asfortranarray(images[:8]))["probabilities"] == eight).all()
    refused(ValueError, "no code for shapes [(2, 1, 8, 8)]", lambda: model.run(images[:2]))
    refused(TypeError, "expected float32", lambda: model.run(images[:8].astype("float64")))
    refused(ValueError, "expected the inputs ['image']", lambda: model.run())
    refused(ValueError, "expected the inputs ['image']", lambda: model.run(other=images[:8]))
    refused(ValueError, "unknown variable", lambda: model.set("v", images))
    refused(ValueError, "unknown variable", lambda: model.set("v", [1.0]))
with counter.Model() as sums:
    assert sums.variables() == ["v"]
    sums.set("v", np.array([3, 4], "float32"))
    sums.save("v.safetensors")
with counter.Model() as sums:
    sums.load("v.safetensors")
    assert sums.run(np.array([1, 1], "float32"))["sum"].tolist() == [4, 5]
    refused(ValueError, "cannot open it", lambda: sums.load("w.safetensors"))
    refused(TypeError, "v: expected float32, got int64", lambda: sums.set("v", [1, 2]))
    refused(ValueError, "v: expected shape (2,), got (4,)", lambda: sums.set("v", np.zeros(4, "float32")))
    refused(ValueError, "['x'] are given in order and by name", lambda: sums.run(np.array([1, 1], "float32"), x=0))
refused(ValueError, "closed", lambda: model.run(images[:8]))

# Names that differ in quotes alone, and one that is a parameter's.
with class_model.Model() as names:
    one, two, three = (np.array([n], "float32") for n in (1, 2, 4))
    named = {'a"b': one, "a\\b": two, "self": three}
    assert names.run(**named)["sum"].tolist() == [1 + 2 * 2 + 3 * 4]

# Closed while threads run it.
for _ in range(20):
    model = digits.Model(threads=2)
    ends = []

    def run_until_closed():
        try:
            while True:
                assert (model.run(image=images[:8])["probabilities"] == eight).all()
        except ValueError as e:
            ends.append("closed" in str(e))

    threads = [threading.Thread(target=run_until_closed) for _ in range(3)]
    for thread in threads:
        thread.start()
    model.close()
    for thread in threads:
        thread.join()
    assert ends == [True] * 3

# A child ends as usual, and closes what its parent has opened.
with digits.Model(threads=2) as model:
    child = os.fork()
    if child == 0:
        model.close()
        sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0
print("ok")
