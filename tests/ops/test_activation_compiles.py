"""The fused activation as its compilers see it: torch's, and Triton's for a Hopper GPU, which needs none."""

import pytest
import torch
from torch import library

from skipless.ops import gpu

pytestmark = pytest.mark.skipif(not gpu.INSTALLED, reason="triton is not installed")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

SCRIPT = """
import itertools, re, torch
from hopper import compiled, intercept, usage
from skipless.ops.gpu import activation

intercept(activation, "forward_kernel", "backward_kernel")
for dtype, biased in itertools.product((torch.bfloat16, torch.float16), (True, False)):
    x, bias = torch.empty(64, 4096, dtype=dtype), torch.empty(4096) if biased else None
    compiled.clear()
    activation.biased_gelu._init_fn(x, bias, 0.8, 0.3, -0.2, 1.7)
    activation.biased_gelu_backward._init_fn(x, x, bias, 0.8, 0.3, 1.7, biased)
    assert len(compiled) == 2, len(compiled)
    for kernel in compiled:
        case, code = (kernel.name, dtype, "biased" if biased else "unbiased"), kernel.asm["ptx"]
        wide = len(re.findall(r"cp\\.async\\.cg\\.shared\\.global [^;]*, 0x10,", code))
        short = re.search(r"ld\\.global\\S*\\.b16|st\\.global\\S*\\.b16", code)
        assert wide and not short, f"{case} reads or writes 2 bytes"
        assert "st.global.v4.b32" in code and not re.search(r"div\\.\\w+\\.f32", code), case
        registers, stack = usage(kernel)
        assert stack == 0, f"registers of {case} spill"
        assert registers <= 64, f"8192 x 4096 entries of {case} no longer fit an H200 at once"
        assert 8 * (kernel.metadata.shared + 1024) <= 227 * 1024, case
"""


def test_kernels_compile_for_a_gpu_that_is_not_here(on_hopper):
    """Every access of 16 bytes, nothing spilled, and eight programs to a multiprocessor; with a bias and without."""
    on_hopper(SCRIPT)


def test_torch_finds_no_fault_with_the_operators():
    from skipless.ops.gpu.activation import biased_gelu, biased_gelu_backward

    torch.manual_seed(0)
    x, upstream, bias = (torch.randn(size, device=DEVICE) for size in ((9, 16), (9, 16), (16,)))
    for b in (bias, None):
        learned = None if b is None else b.clone().requires_grad_()
        library.opcheck(biased_gelu, (x.clone().requires_grad_(), learned, 0.8, 0.3, -0.2, 1.7))
        for sums in {False, b is not None}:
            library.opcheck(biased_gelu_backward, (upstream, x, b, 0.8, 0.3, 1.7, sums))
