"""Decoding as a torch operator: when it applies, how the keys are shared out, and the launch."""

import torch
from torch import Tensor, library

from skipless.ops.triton import decoding
from skipless.ops.triton.launch import Call, strides_of
from skipless.ops.triton.op import by_token

_MOST_ROWS = 64
_KEYS_PER_TILE = 64
_KEYS_PER_SHARE = 256  # at least: less is not worth a second kernel
_LAUNCH: dict = {"BLOCK_N": _KEYS_PER_TILE, "num_warps": 4, "num_stages": 2}
_PROGRAMS = 264  # two for each multiprocessor of a large GPU


def applies(q: Tensor, k: Tensor, needs_grad: bool) -> bool:
    """Whether these are few queries, of which no gradient is asked: their rows must fit one tile."""
    return not needs_grad and q.shape[2] * (q.shape[1] // k.shape[1]) <= _MOST_ROWS and q.shape[2] < k.shape[2]


def shares_of(keys: int, heads: int, batch: int) -> tuple[int, int]:
    """(how many shares, keys in each, whole tiles): enough to fill a GPU, where there are keys enough."""
    wanted = min(-(-keys // _KEYS_PER_SHARE), max(1, _PROGRAMS // (heads * batch)))
    tiles = -(-keys // _KEYS_PER_TILE)
    each = -(-tiles // wanted) * _KEYS_PER_TILE
    return -(-keys // each), each


@library.custom_op("skipless::shaped_decoding", mutates_args=())
def shaped_decoding(
    q: Tensor, k: Tensor, v: Tensor, vectors: list[Tensor], row: Tensor | None, places: list[Tensor], causal: bool
) -> Tensor:
    """The output alone; arguments as those of skipless::shaped_attention."""
    call, out = Call(q, k, v, vectors, row, places, causal), by_token(q)
    batch, heads, length, width = k.shape
    rows = max(16, 1 << (q.shape[2] * call.groups - 1).bit_length())
    number, each = shares_of(length, heads, batch)
    alone, sizes = number == 1, (batch, heads, number, rows)
    parts = tuple(q.new_empty(shape, dtype=torch.float32) for shape in ((*sizes, width), sizes, sizes) if not alone)
    shape, layout, q_length, k_length, count, scale = call.common()
    constants: dict = {n: x for n, x in call.constants().items() if n not in ("RELATIVE", "RANGE")}
    constants |= {"ROWS": rows, "ALONE": alone}
    joining: dict = {n: x for n, x in constants.items() if n not in ("CAUSAL", "ROW", "PRECISION", "ALONE")}
    with torch.cuda.device_of(q):
        decoding.share[number, heads, batch](
            q, k, v, out, strides_of(q, k, v, out), parts or (out, out, out), shape, layout, q_length, k_length, each,
            count, scale, **constants, **_LAUNCH,
        )  # fmt: skip
        if not alone:
            past = k_length - q_length
            decoding.join[heads, batch](
                parts, out, strides_of(out)[0], shape, layout[0], q_length, past, count, number, **joining
            )
    return out


@shaped_decoding.register_fake
def _(q, k, v, vectors, row, places, causal):
    return by_token(q)
