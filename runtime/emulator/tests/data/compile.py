#!/usr/bin/env python3
"""Compiles the CUDA files beside this script to PTX with NVRTC; needs no GPU.

    python3 -m venv .venv && .venv/bin/pip install nvidia-cuda-nvrtc==13.0.88
    .venv/bin/python runtime/emulator/tests/data/compile.py [FILE.cu ...]

Without files, compiles all. `--cubin` writes cubins beside the PTX as well, for `nvdisasm`. The architecture is in the
first line of each file, `// arch: sm_90a`; further NVRTC options may follow it.
"""

import ctypes
import glob
import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))


def load():
    """Opens NVRTC from the environment's site-packages or the loader's path."""
    for folder in sys.path:
        for found in glob.glob(os.path.join(folder, "nvidia", "cu13", "lib", "libnvrtc-builtins.so.13*")):
            if ".alt." not in found:
                ctypes.CDLL(found)
                return ctypes.CDLL(os.path.join(os.path.dirname(found), "libnvrtc.so.13"))
    return ctypes.CDLL("libnvrtc.so.13")


def read(nvrtc, program, what):
    size = ctypes.c_size_t()
    getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    getattr(nvrtc, f"nvrtcGet{what}")(program, buffer)
    return buffer.raw


def compile_file(nvrtc, path, cubin):
    source = open(path).read()
    first = source.split("\n", 1)[0]
    if not first.startswith("// arch: "):
        sys.exit(f"{path}: the first line must be `// arch: sm_..`")
    arch, *more = first.removeprefix("// arch: ").split()
    options = [f"-arch={arch}", *more]
    program = ctypes.c_void_p()
    name = os.path.basename(path)
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), name.encode(), 0, None, None)
    argv = (ctypes.c_char_p * len(options))(*[o.encode() for o in options])
    if nvrtc.nvrtcCompileProgram(program, len(options), argv) != 0:
        sys.exit(f"{path}:\n" + read(nvrtc, program, "ProgramLog").decode(errors="replace"))
    ptx = read(nvrtc, program, "PTX").rstrip(b"\0").decode()
    # Where the source lies on this machine is nobody's business.
    ptx = ptx.replace(os.getcwd() + os.sep, "")
    with open(os.path.splitext(path)[0] + ".ptx", "w") as out:
        out.write(ptx.rstrip() + "\n")
    if cubin:
        with open(os.path.splitext(path)[0] + ".cubin", "wb") as out:
            out.write(read(nvrtc, program, "CUBIN"))


def main():
    arguments = sys.argv[1:]
    cubin = "--cubin" in arguments
    files = [a for a in arguments if a != "--cubin"] or sorted(glob.glob(os.path.join(HERE, "**", "*.cu"), recursive=True))
    nvrtc = load()
    for path in files:
        compile_file(nvrtc, path, cubin)


main()
