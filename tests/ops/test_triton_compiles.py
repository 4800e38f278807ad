"""Every Triton kernel compiles for a Hopper GPU, which needs none: the interpreter takes what the compiler may not."""

import pytest

from skipless.ops import gpu

SCRIPT = """
import re, sys, torch
from hopper import compiled, intercept, usage
from skipless.ops import Layout, BiasVectors
from skipless.ops.gpu import attention, decode, launch, rotary
from skipless.ops.layout import kernel_layout
from skipless.theory.shapes import ExponentialShape, UniformShape

intercept(attention, "forward", "key_side", "query_side", "row_products", "query_side_from_saved")
intercept(decode, "share", "join")
intercept(rotary, "rotate")
shapes = {"e-spa": ExponentialShape.between(0.05, 0.04), "u-spa": UniformShape(0.7, 0.75)}
width, shape = int(sys.argv[1]), shapes[sys.argv[2]]
q, k, v, dout = (torch.empty(2, 256, 4, width, dtype=torch.bfloat16).transpose(1, 2) for _ in range(4))
bias = BiasVectors.of(shape, 256).for_kernels(torch.ones(4) if sys.argv[3] == "gain" else None)
rest = (*bias, [], True)
out, lse = launch.shaped_attention._init_fn(q, k, v, *rest)
def both(backward_of, *arguments):
    '''The two sides, and those of which one saves its scores for the other.'''
    for launch.SAVED_SCORES_BYTES in (0, 2**29):
        backward_of._init_fn(*arguments, *rest)

both(launch.shaped_attention_backward, dout, q, k, v, out, lse)
for keys in (k, torch.cat([k] * 2, dim=2)):
    decode.shaped_decoding._init_fn(q[:, :, :1], keys, keys, *rest)
assert len(compiled) == 9, len(compiled)
qkv, table = torch.empty(2, 256, 12 * width, dtype=torch.bfloat16), torch.empty(1, 1, 256, width // 2)
out, lse, rotated = rotary.rotary_attention._init_fn(qkv, None, table, table, 4, 4, *rest)
both(rotary.rotary_attention_backward, dout, qkv, None, table, table, rotated, out, lse, 4, 4)
assert len(compiled) == 16, len(compiled)
print([(kernel.name, kernel.metadata.shared) for kernel in compiled])
assert all(kernel.metadata.shared <= 227 * 1024 for kernel in compiled)

def fit(kernel):
    '''Programs that a multiprocessor's registers and its shared memory hold, 8 at most; and bytes of stack.'''
    registers, stack = usage(kernel)
    by_registers = 65536 // (-(-registers // 8) * 8 * 32 * kernel.metadata.num_warps)
    return min(8, by_registers, 228 * 1024 // (kernel.metadata.shared + 1024)), stack

for plain, rotating in zip(compiled[1:6], compiled[11:], strict=True):
    assert plain.name == rotating.name
    assert (plain.hash == rotating.hash) == (plain.name == "row_products")
    (programs, stack), (rotary_programs, rotary_stack) = fit(plain), fit(rotating)
    assert rotary_programs >= programs and rotary_stack <= stack, "rotating back costs registers"
    assert rotating.metadata.shared <= plain.metadata.shared
rotate = compiled[9]
assert fit(rotate) == (8, 0)
accesses = set(re.findall(r"(?:ld|st)\\.global\\S*", rotate.asm["ptx"]))
assert accesses == {"ld.global.v4.b32", "st.global.v4.b32"}, accesses
documents = list(kernel_layout(Layout.packed((torch.arange(256)[None] // 100).expand(2, -1)), 2, True))
launch.shaped_attention_backward._init_fn(dout, q, k, v, out, lse, *bias, documents, True)
assert [kernel.name for kernel in compiled[16:]] == ["row_products", "key_side", "query_side_from_saved"]
assert all(fit(kernel)[1] == 0 for kernel in compiled[16:]), "with documents it spills"
"""


@pytest.mark.skipif(not gpu.INSTALLED, reason="triton is not installed")
@pytest.mark.parametrize(("width", "kind", "gain"), [(64, "u-spa", ""), (128, "e-spa", ""), (64, "e-spa", "gain")])
def test_kernels_compile_for_a_gpu_that_is_not_here(width, kind, gain, on_hopper):
    on_hopper(SCRIPT, str(width), kind, gain)
