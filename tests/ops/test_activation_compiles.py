"""The fused activation as its compilers see it: torch's, and Triton's for a Hopper GPU, which needs none."""

import os
import subprocess
import sys

import pytest
import torch

from skipless.ops import triton

pytestmark = pytest.mark.skipif(not triton.INSTALLED, reason="triton is not installed")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

SCRIPT = """
import re, subprocess, sys, tempfile, torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from skipless.ops import activation_kernel

class Hopper:
    get_current_target = lambda self: GPUTarget("cuda", 90, 32)
    get_current_device = lambda self: 0
    get_current_stream = lambda self, device=None: 0
    get_active_torch_device = lambda self: torch.device("cpu")

driver.set_active(Hopper())

class Launched:
    '''A kernel that is compiled where it would be launched.'''
    def __init__(self, kernel):
        self.kernel = kernel
    def __getitem__(self, grid):
        return lambda *args, **options: compiled.append(self.kernel.warmup(*args, grid=grid, **options))

compiled = []
for name in ("forward_kernel", "backward_kernel"):
    setattr(activation_kernel, name, Launched(getattr(activation_kernel, name)))
torch.cuda.device_of = lambda tensor: __import__("contextlib").nullcontext()

x = torch.empty(64, 4096, dtype=getattr(torch, sys.argv[1]))
bias = torch.empty(4096) if sys.argv[2] == "biased" else None
activation_kernel.biased_gelu._init_fn(x, bias, 0.8, 0.3, -0.2, 1.7)
activation_kernel.biased_gelu_backward._init_fn(x, x, bias, 0.8, 0.3, 1.7, bias is not None)
assert len(compiled) == 2, len(compiled)
for kernel in compiled:
    code = kernel.asm["ptx"]
    wide = len(re.findall(r"cp\\.async\\.cg\\.shared\\.global [^;]*, 0x10,", code))
    assert wide and not re.search(r"ld\\.global\\S*\\.b16|st\\.global\\S*\\.b16", code), "reads or writes of 2 bytes"
    assert "st.global.v4.b32" in code and not re.search(r"div\\.\\w+\\.f32", code)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        tool = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        usage = subprocess.run(tool, capture_output=True, text=True, check=True).stdout
    registers, stack = (int(re.search(word + r":(\\d+)", usage)[1]) for word in ("REG", "STACK"))
    print(kernel.name, wide, "wide loads", registers, "registers", kernel.metadata.shared, "bytes shared")
    assert stack == 0, "registers spill"
    assert registers <= 64, "8192 x 4096 entries no longer fit an H200 at once"
    assert 8 * (kernel.metadata.shared + 1024) <= 227 * 1024
"""


@pytest.mark.parametrize("biased", ["biased", "unbiased"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_kernels_compile_for_a_gpu_that_is_not_here(dtype, biased, tmp_path):
    """Every access of 16 bytes, nothing spilled, and eight programs to a multiprocessor."""
    environment = {n: x for n, x in os.environ.items() if n != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, dtype, biased],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_torch_finds_no_fault_with_the_operators():
    from skipless.ops.activation_kernel import biased_gelu, biased_gelu_backward

    torch.manual_seed(0)
    x, upstream, bias = (torch.randn(size, device=DEVICE) for size in ((9, 16), (9, 16), (16,)))
    for b in (bias, None):
        learned = None if b is None else b.clone().requires_grad_()
        torch.library.opcheck(biased_gelu, (x.clone().requires_grad_(), learned, 0.8, 0.3, -0.2, 1.7))
        for sums in {False, b is not None}:
            torch.library.opcheck(biased_gelu_backward, (upstream, x, b, 0.8, 0.3, 1.7, sums))
