"""What a training step takes before it is run: parameters, memory, communication and time on H200s, by formulas.

Counts follow from the configuration. Rates are those of one H200: the two of products were fitted to E-SPA's steps of
36 blocks, at widths 1024 and 512, the others measured by themselves (results/h200). With them all steps of those logs
come out within 8 % of their time, which is what boards differ by, and within 5 % of their memory. Under FSDP2 memory is
compared with torch's own tracker on a simulated step (benchmarks/scale.py). Times on several GPUs are not measured.
"""

import bisect
import math
from dataclasses import dataclass
from typing import Literal

from skipless.model.config import ModelConfig
from skipless.theory.schemes import ValueSkipInit
from skipless.training.optim.muon import multiplications
from skipless.training.optim.owners import rounds

MEMORY = 141e9  # bytes of an H200
_HALF, _FULL = 2, 4  # bytes of a number
_LOGITS_AT_ONCE = 2**28  # as in ops/cross_entropy.py
_MUON_ENTRIES = 2**28  # of one batch of matrices, as in optim/muon.py

# Rates, in FLOP/s and bytes/s.
_PRODUCTS, _PRODUCTS_BELOW = 662e12, 137.0  # at width 1024, and how they fall below it: d/(d + 137)
_WIDEST_MEASURED = 1024
_PASSES = 3.6e12  # of kernels that only read and write: 75 % of 4.8 TB/s, as the activation's reach
_IDLE = 1.1e-3  # seconds of a step in which nothing runs
_HOST = 2.25e-3  # seconds a block and step, started from the host: the quicker of two hosts
_ATTENTION = {  # by head width, then by length: E-SPA forward and backward, 7·T·d FLOP a token
    64: {512: 142e12, 2048: 247e12},
    128: {512: 201e12, 2048: 346e12, 8192: 363e12, 32_768: 387e12},
}
NVLINK = 450e9  # to and from the other GPUs of a node, at most eight
NODES = 400e9  # eight links of 400 Gbit/s: what enters a node by one of them goes on to its GPUs by NVLink
_NODE = 8


@dataclass(frozen=True)
class Parameters:
    """The numbers of parameters: of a block's matrices and vectors, and outside blocks (tables, heads, last norm)."""

    matrices: int
    vectors: int
    outside: int
    depth: int

    @classmethod
    def of(cls, model: ModelConfig) -> "Parameters":
        """The parameters of a network; ValueError for relative positions, whose matrices are not counted here."""
        if model.position == "relative":
            raise ValueError("position is 'relative', whose matrices are not counted; use 'rope' or 'none'")
        hidden, width, heads = model.hidden or 0, model.width, model.heads
        images, rows = model.images, model.vocab_size
        patches = None if images is None else (images.patch_numbers + images.length) * width
        tables = patches or rows * width * (1 if model.tied_head or model.head != "lm" else 2)
        counted = patches or rows * width * (1 if model.tied_head else 2)
        matrices = (model.matrix_parameters - counted) // model.depth
        parts = 2 if hidden else 1
        vectors = hidden + width if hidden and model.mlp_bias else 0
        vectors += parts * width if model.norm != "none" else 0
        vectors += heads + model.readers if model.bias_gain else 0
        vectors += model.attention_skip.trainable + (model.mlp_skip.trainable if hidden else 0)
        if isinstance(model.scheme, ValueSkipInit):
            vectors += 2 * (heads if getattr(model.scheme, "per_head", False) else 1)
        outside = tables + (width if model.norm == "pre" else 0)
        outside += (width + 1) * model.classes if model.head != "lm" else 0
        return cls(matrices, vectors, outside, model.depth)

    @property
    def block(self) -> int:
        return self.matrices + self.vectors

    @property
    def total(self) -> int:
        return self.depth * self.block + self.outside


@dataclass(frozen=True)
class Step:
    """One training step in bfloat16: on one GPU as a CUDA graph, on several sharded by FSDP2.

    rows: sequences of `length` tokens on each GPU, one micro-batch. recompute: train.recompute. Bytes are those of one
    GPU, or through its link; times are in seconds.
    """

    model: ModelConfig
    rows: int
    length: int
    gpus: int = 1
    recompute: bool = False
    optimizer: Literal["adam", "muon"] = "adam"

    def __post_init__(self):
        for name in ("rows", "length", "gpus"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.optimizer not in ("adam", "muon"):
            raise ValueError(f"optimizer is {self.optimizer!r}; costs are known of 'adam' and 'muon'")
        if self.model.norm == "post":
            raise ValueError("norm is 'post', whose memory is not counted; use 'pre' or 'none'")
        if self.model.images is not None:
            raise ValueError("the network is one of images, whose steps were not measured; Parameters.of counts it")

    @property
    def tokens(self) -> int:
        return self.rows * self.length

    @property
    def parameters(self) -> Parameters:
        return Parameters.of(self.model)

    @property
    def state_bytes(self) -> float:
        """16·P/N: weights 4, Adam's moments 8, and 4 of gradients; alone 2 of gradients and 2 of half copies.

        Muon has one moment of a block's matrices: 12 bytes.
        """
        count = self.parameters
        saved = _FULL * count.matrices * count.depth if self.optimizer == "muon" else 0
        return (4 * _FULL * count.total - saved) / self.gpus

    @property
    def gathered_bytes(self) -> float:
        """Under FSDP2: the table in half precision, and 12 bytes a parameter of one block.

        Two blocks' weights (4), what a third is gathered into (2), gradients (2), and what they are summed from (4).
        """
        count = self.parameters
        return 0.0 if self.gpus == 1 else float(_HALF * count.outside + 12 * count.block)

    @property
    def kept_per_token(self) -> float:
        """What a block keeps of a token for its backward pass, compiled: 32·d bytes for E-SPA, and 4 a head.

        Its input; the product of W_Q, W_K and W_V, and q and k rotated; attention's output, and W_O's; both sides of
        the activation. Without W_V and W_O 28·d. Pre-LN keeps the stream and a normalised copy, twice, in place of
        the two inputs: 40·d where the stream is float32, 36·d under FSDP2.
        """
        model, width = self.model, self.model.width
        kv, read = width // model.heads * (model.kv_heads or model.heads), model.reader_width
        rotated = width + kv + 2 * read
        product = rotated + (kv if model.value_output == "trained" else 0)
        inputs = self._stream * width + (_HALF * width if model.value_output == "trained" else 0)
        if model.norm == "pre":
            inputs = 2 * (self._stream + _HALF) * width
        attention = product + (rotated if model.position == "rope" else 0) + width
        attention += width + 2 * read if read else 0  # values are put together, and readers' outputs are W_O's input
        return inputs + _HALF * (attention + 2 * (model.hidden or 0)) + _FULL * (model.heads + model.readers)

    @property
    def _stream(self) -> int:
        """Bytes of a number that blocks hand on: a skip adds to the embedding's float32, which FSDP2 casts."""
        return _FULL if self.gpus == 1 and not self.model.skipless else _HALF

    @property
    def activation_bytes(self) -> float:
        """What all blocks keep between their passes; with recompute their inputs alone."""
        kept = self._stream * self.model.width if self.recompute else self.kept_per_token
        return self.model.depth * self.tokens * kept

    @property
    def block_bytes(self) -> float:
        """A block in its backward pass: gradients of both sides of the activation; with recompute what it keeps too."""
        again = self.kept_per_token if self.recompute else 0.0
        return self.tokens * (2 * _HALF * (self.model.hidden or 0) + again)

    @property
    def loss_bytes(self) -> float:
        """Logits of one chunk of rows, the table's gradient in float32, and that of the last block's output."""
        classes, width = self._classes, self.model.width
        chunks = math.ceil(self.tokens / max(1, _LOGITS_AT_ONCE // classes))
        logits = _HALF * math.ceil(self.tokens / chunks) * classes
        sums = (1 if chunks == 1 else 2) * _FULL * classes * width
        return logits + sums + 2 * _HALF * self.tokens * width

    @property
    def _classes(self) -> int:
        return self.model.vocab_size if self.model.head == "lm" else self.model.classes

    @property
    def muon_bytes(self) -> float:
        """Muon's work on a batch of whole matrices, after activations are gone: 14 bytes a number, of a GPU's share."""
        if self.optimizer == "adam":
            return 0.0
        largest = self.model.width * max(self.model.width, self.model.hidden or 0)
        share = math.ceil(self.parameters.matrices * self.model.depth / self.gpus)
        return 14.0 * max(largest, min(_MUON_ENTRIES, share))

    @property
    def peak_bytes(self) -> float:
        """The most at one time: at the loss, in the first or last block's backward pass, or in Muon's update.

        Gradients come as activations go. A CUDA graph, on one GPU, has a place for both.
        """
        gradients = 0.0 if self.gpus == 1 else _FULL * self.parameters.total / self.gpus
        table = _FULL * self._classes * self.model.width
        first = self.activation_bytes + max(self.loss_bytes, table + self.block_bytes)
        last = gradients + max(table + self.block_bytes, self.muon_bytes)
        return self.state_bytes - gradients + self.gathered_bytes + max(first, last)

    @property
    def sent_bytes(self) -> float:
        """Through each GPU's link: 8·P·(N − 1)/N. Half weights gathered twice, float32 gradients reduced."""
        return 8 * self.parameters.total * (self.gpus - 1) / self.gpus

    @property
    def muon_sent_bytes(self) -> float:
        """Through each GPU's link in Muon's update: 4·P/N·(N − 1)/N, of the P in the blocks' matrices.

        In half precision a GPU's rows go to the owners of their matrices, and as many come back.
        """
        if self.optimizer == "adam":
            return 0.0
        return 4 * self.parameters.matrices * self.model.depth * (self.gpus - 1) / self.gpus**2

    @property
    def flops(self) -> float:
        """6 per matrix entry and token, a third of a block's more with recompute; and attention's."""
        model, count = self.model, self.parameters
        matrices = (8 if self.recompute else 6) * count.matrices * count.depth + 6 * model.vocab_size * model.width
        return self.tokens * matrices + self.attention_flops

    @property
    def attention_flops(self) -> float:
        """7·T·d per token and block, with recompute 9·T·d."""
        per_token = (9 if self.recompute else 7) * self.length * (self.model.width + self.model.reader_width)
        return self.tokens * self.model.depth * per_token

    @property
    def compute_seconds(self) -> float:
        """Products, attention, and kernels that read and write, one after the other; the optimiser not included."""
        model = self.model
        again, scores = 4 / 3 if self.recompute else 1.0, self.attention_flops
        products = self.flops - scores
        width = min(model.width, _WIDEST_MEASURED)
        reached = _PRODUCTS * width / (width + _PRODUCTS_BELOW) * (1 + _PRODUCTS_BELOW / _WIDEST_MEASURED)
        kv = model.width // model.heads * (model.kv_heads or model.heads) + 2 * model.reader_width
        passes = 5 * _HALF * (model.hidden or 0) + (4 * (model.width + kv) if model.position == "rope" else 0)
        passes += 72 * model.width if model.norm == "pre" else 0  # 12 forward and 24 backward, twice
        read = self.tokens * (again * model.depth * passes + 2 * _HALF * model.vocab_size)
        rate = attention_rate(model.width // model.heads, self.length)
        return products / reached + scores / rate + read / _PASSES + _IDLE

    @property
    def muon_flops(self) -> float:
        """Newton–Schulz on the GPU that has the most to do, summed over the rounds in which GPUs divide matrices."""
        if self.optimizer == "adam":
            return 0.0
        shapes = matrix_shapes(self.model) * self.model.depth
        costs, sizes = [2 * multiplications(*shape) for shape in shapes], [math.prod(shape) for shape in shapes]
        return sum(
            max(sum(costs[number] for stack in stacks for number in stack) for stacks in owned)
            for owned in rounds(shapes, sizes, costs, self.gpus, _MUON_ENTRIES)
        )

    @property
    def optimizer_seconds(self) -> float:
        """28 bytes a parameter of Adam's and 4 of clipping, sharded; then Muon's products, and what it sends.

        Nothing of that overlaps. Between nodes each GPU sends by its own link: no two are sent the same.
        """
        adam = 32 * self.parameters.total / self.gpus / _PASSES
        sent = self.muon_sent_bytes / (NVLINK if self.gpus <= _NODE else NODES / _NODE)
        return adam + self.muon_flops / _PRODUCTS + sent

    @property
    def link_seconds(self) -> float:
        """sent_bytes over NVLink in one node, and over the links between nodes beyond eight GPUs."""
        return self.sent_bytes / (NVLINK if self.gpus <= _NODE else NODES)

    @property
    def host_seconds(self) -> float:
        """What the host takes to start it all, where no CUDA graph does: on several GPUs."""
        return 0.0 if self.gpus == 1 else _HOST * self.model.depth * (4 / 3 if self.recompute else 1.0)

    @property
    def seconds(self) -> float:
        """The longest of computing, sending and starting, which overlap; then the optimiser."""
        return max(self.compute_seconds, self.link_seconds, self.host_seconds) + self.optimizer_seconds

    @property
    def bound(self) -> str:
        """Which of the three it is: "compute", "link" or "host"."""
        times = {"compute": self.compute_seconds, "link": self.link_seconds, "host": self.host_seconds}
        return max(times, key=lambda name: times[name])

    @property
    def fits(self) -> bool:
        """Whether it takes at most 95 % of an H200's memory; the rest is torch's and the driver's."""
        return self.peak_bytes <= 0.95 * MEMORY


def attention_rate(head_width: int, length: int) -> float:
    """FLOP/s of attention forward and backward, between measured lengths by their logarithm; beyond them the nearest.

    Head widths up to 64 are given the rates of 64, wider ones those of 128.
    """
    rates = _ATTENTION[64 if head_width <= 64 else 128]
    lengths = sorted(rates)
    if length <= lengths[0] or length >= lengths[-1]:
        return rates[lengths[0] if length <= lengths[0] else lengths[-1]]
    at = bisect.bisect_right(lengths, length)
    low, high = lengths[at - 1], lengths[at]
    share = math.log(length / low) / math.log(high / low)
    return rates[low] + share * (rates[high] - rates[low])


def matrix_shapes(model: ModelConfig) -> list[tuple[int, int]]:
    """The shapes of one block's matrices: W_Q and W_K, W_V and W_O where they are trained, and the MLP's two."""
    kv, read = model.width // model.heads * (model.kv_heads or model.heads), model.reader_width
    shapes = [(model.width, model.width), (kv, model.width)] * (2 if model.value_output == "trained" else 1)
    if read:
        shapes = [(model.width + read, model.width)] * 2 + [(read, model.width), (model.width, read)]
    return shapes + ([(model.hidden, model.width), (model.width, model.hidden)] if model.hidden else [])


def fewest_gpus(step: Step, most: int = 65_536) -> Step | None:
    """The step on the fewest GPUs, a power of two, on which it fits; None where not even `most` are enough."""
    gpus = 1
    while gpus <= most:
        candidate = Step(step.model, step.rows, step.length, gpus, step.recompute, step.optimizer)
        if candidate.fits:
            return candidate
        gpus *= 2
    return None
