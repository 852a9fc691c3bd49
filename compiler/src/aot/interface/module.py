"""The model "@NAME@", compiled by gristmill @VERSION@.

    model = Model()
    outputs = model.run(input=array)      # a dict of arrays by name; or run(array, ..) in order

Tensors choose the variant by their shapes; dtypes and shapes are checked, nothing is converted. bf16 and floats of 8
bits are unsigned integers of the same bits. Variables:
@VARIABLES@"""

import ctypes
import os

import numpy as np

_VARIANTS = [
@ROWS@]
# Label: dtype and shape; None for an extent that may change.
_VARIABLES = {
@TYPES@}
_ERRORS = {2: ValueError, 3: NotImplementedError, 5: MemoryError}


class Model:
    """Code, threads and variables. Its runs take turns. A model lives until its last run has ended: `close` may overlap with runs."""

    def __init__(self, threads=0, library=None):
        """`threads`: those of callers included; 0: one per core. `library`: the shared library, by default @LIBRARY@ beside this file."""
        folder = os.path.dirname(os.path.abspath(__file__))
        self._model = None
        self._library = ctypes.CDLL(library or os.path.join(folder, "@LIBRARY@"))
        for name in ("message", "describe"):
            getattr(self._library, "@P@_" + name).restype = ctypes.c_char_p

        class Options(ctypes.Structure):
            _fields_ = [("size", ctypes.c_size_t), ("threads", ctypes.c_uint32)]

        options = Options(ctypes.sizeof(Options), threads)
        model = ctypes.c_void_p()
        self._call("open", ctypes.byref(options), ctypes.byref(model))
        self._model = model

    def _call(self, name, *arguments):
        status = getattr(self._library, "@P@_" + name)(*arguments)
        if status:
            message = self._library.@P@_message().decode()
            raise _ERRORS.get(status, RuntimeError)(message)

    def close(self):
        """Ends threads and frees memory."""
        model, self._model = self._model, None
        if model:
            self._call("close", model)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def __del__(self):
        self.close()

    def _open(self):
        if not self._model:
            raise ValueError("the model is closed")
        return self._model

    def describe(self):
        """One line about the model."""
        return self._library.@P@_describe(self._open()).decode()

    def run(self, /, *tensors, **named):
        """Runs once; gives the outputs by name. For an input whose name is not an identifier: run(**{"the name": array})."""
        names = [name for name, _, _ in _VARIANTS[0][0]]
        given = dict(zip(names, tensors))
        twice = sorted(set(given) & set(named))
        if twice:
            raise ValueError(f"the inputs {twice} are given in order and by name")
        given.update(named)
        if len(tensors) > len(names) or set(given) != set(names):
            raise ValueError(f"expected the inputs {names}, got {len(tensors)} in order and {sorted(named)}")
        shapes = [np.shape(given[name]) for name in names]
        fits = (i for i, (inputs, _) in enumerate(_VARIANTS) if [s for _, _, s in inputs] == shapes)
        variant = next(fits, None)
        if variant is None:
            known = [[s for _, _, s in inputs] for inputs, _ in _VARIANTS]
            raise ValueError(f"there is no code for shapes {shapes}, the model has {known}")
        inputs, outputs = _VARIANTS[variant]
        arrays = [self._checked(name, given[name], dtype) for name, dtype, _ in inputs]
        results = [np.empty(shape, dtype) for _, dtype, shape in outputs]
        pointers = lambda arrays: (ctypes.c_void_p * max(1, len(arrays)))(*[a.ctypes.data for a in arrays])
        self._call("run_variant", self._open(), ctypes.c_uint32(variant), pointers(arrays), pointers(results))
        return {name: array for (name, _, _), array in zip(outputs, results)}

    @staticmethod
    def _checked(name, array, dtype):
        array = np.asarray(array)
        if array.dtype != np.dtype(dtype):
            raise TypeError(f"{name}: expected {dtype}, got {array.dtype}")
        # `ascontiguousarray` makes a scalar a vector.
        return np.ascontiguousarray(array).reshape(array.shape)

    def set(self, variable, value):
        """Sets a variable to an array of its dtype and shape."""
        if variable in _VARIABLES:
            dtype, shape = _VARIABLES[variable]
            value = self._checked(variable, value, dtype)
            fits = len(shape) == value.ndim and all(n in (None, m) for n, m in zip(shape, value.shape))
            if not fits:
                raise ValueError(f"{variable}: expected shape {shape}, got {value.shape}")
        else:
            value = np.ascontiguousarray(value)
        self._call("set", self._open(), variable.encode(), ctypes.c_void_p(value.ctypes.data), ctypes.c_size_t(value.nbytes))

    def get(self, variable, dtype, shape):
        """The value of a variable."""
        value = np.empty(shape, dtype)
        self._call("get", self._open(), variable.encode(), ctypes.c_void_p(value.ctypes.data), ctypes.c_size_t(value.nbytes))
        return value

    def variables(self):
        """The labels of all variables."""
        label = self._library.@P@_variable
        label.restype = ctypes.c_char_p
        model, labels = self._open(), []
        while (found := label(model, ctypes.c_uint32(len(labels)))) is not None:
            labels.append(found.decode())
        return labels

    def save(self, path):
        """Writes all variables to a safetensors file."""
        self._call("save", self._open(), os.fspath(path).encode())

    def load(self, path):
        """Sets the variables that a safetensors file has values for; all or none."""
        self._call("load", self._open(), os.fspath(path).encode())

    def reset(self):
        """Puts all variables back to their first values."""
        self._call("reset", self._open())
