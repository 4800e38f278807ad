"""Compiles Triton kernels for a Hopper GPU that is not here, in a process without the interpreter: see on_hopper.

A script imports this, names the kernels whose launches it wants compiled instead, and calls what launches them.
"""

import re
import subprocess
import tempfile
from contextlib import nullcontext

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

compiled = []  # by launch


class Hopper:
    """As much of a driver as compiling asks for."""

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=None):
        return 0

    def get_active_torch_device(self):
        return torch.device("cpu")


class Launched:
    """A kernel that is compiled where it would be launched."""

    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        return lambda *args, **options: compiled.append(self.kernel.warmup(*args, grid=grid, **options))


def intercept(module, *names):
    """Have the module's kernels of these names compiled, not run."""
    for name in names:
        setattr(module, name, Launched(getattr(module, name)))


def usage(kernel):
    """(registers of a thread, bytes of stack, where what does not fit them goes)."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        tool = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        told = subprocess.run(tool, capture_output=True, text=True, check=True).stdout
    registers, stack = (int(re.search(rf"{word}:(\d+)", told)[1]) for word in ("REG", "STACK"))
    print(kernel.name, registers, "registers,", stack, "bytes of stack,", kernel.metadata.shared, "bytes shared")
    return registers, stack


driver.set_active(Hopper())
torch.cuda.device_of = lambda tensor: nullcontext()
