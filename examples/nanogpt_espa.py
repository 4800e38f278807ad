"""A small GPT of your own, without skips or norms: python examples/nanogpt_espa.py TEXT [STEPS].

TEXT is a file, read as bytes (.xz is unpacked). The network is written out in plain PyTorch, so that you see what
changes in yours: attention by E-SPA, MLPs that start as rotations, f(x) instead of x + f(norm(x)). With --pre-ln it has
skips, norms and plain attention instead, to compare.
"""

import argparse
import lzma
import math
from pathlib import Path

import torch
from torch import Tensor, nn

import skipless as sk


class Block(nn.Module):
    """Attention, then an MLP. Without skips each one's output is the next one's input."""

    def __init__(self, width: int, heads: int, shape: sk.AttentionShape, pre_ln: bool):
        super().__init__()
        self.attention = sk.nn.ShapedAttention(width, heads, shape)
        self.mlp = sk.nn.MLP(width, 4 * width, "gelu")
        self.norms = nn.ModuleList([nn.RMSNorm(width), nn.RMSNorm(width)]) if pre_ln else None
        self.attention.reset_parameters("normal" if pre_ln else "zero-query")  # queries at 0: attention is its shape
        self.mlp.reset_parameters() if pre_ln else self.mlp.reset_mirrored()  # mirrored: a rotation

    def forward(self, x: Tensor) -> Tensor:
        if self.norms is None:
            return self.mlp(self.attention(x))
        x = x + self.attention(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


class GPT(nn.Module):
    """Bytes in, logits of the next byte out: (batch, length) → (batch, length, 256)."""

    def __init__(self, depth: int = 12, width: int = 128, heads: int = 4, pre_ln: bool = False):
        super().__init__()
        scheme = sk.StandardAttention() if pre_ln else sk.ExponentialSPA(gamma_final=0.05, repeat_rate=0.05)
        self.embedding = nn.Embedding(256, width)  # N(0, 1): every location starts with a mean square of 1
        self.blocks = nn.Sequential(*(Block(width, heads, shape, pre_ln) for shape in scheme.shapes(depth)))
        self.norm = nn.RMSNorm(width) if pre_ln else nn.Identity()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.blocks(self.embedding(tokens)))
        return x @ self.embedding.weight.T / math.sqrt(x.shape[-1])


def read(path: Path) -> Tensor:
    """The text's bytes."""
    data = path.read_bytes()
    return torch.frombuffer(bytearray(lzma.decompress(data) if path.suffix == ".xz" else data), dtype=torch.uint8)


def batch(data: Tensor, size: int, length: int) -> tuple[Tensor, Tensor]:
    """Random windows of the text, and the byte after each location."""
    starts = torch.randint(len(data) - length - 1, (size,)).tolist()
    windows = torch.stack([data[s : s + length + 1] for s in starts]).long()
    return windows[:, :-1], windows[:, 1:]


def train(model: GPT, data: Tensor, steps: int, rate: float, size: int, length: int) -> list[float]:
    """Adam with a warm-up and a cosine to 0; the loss of each step, in nats a byte."""
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps + 1, pct_start=0.1)
    losses = []
    for step in range(steps):
        tokens, targets = batch(data, size, length)
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        if step % 20 == 0 or step == steps - 1:
            print(f"step {step:5}  loss {losses[-1]:.3f}", flush=True)
    return losses


def main(arguments: list[str] | None = None) -> list[float]:
    """Inspect the network, then train it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text", type=Path)
    parser.add_argument("steps", type=int, nargs="?", default=200)
    for name, value in {"depth": 12, "width": 128, "batch": 8, "length": 128}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--pre-ln", action="store_true")
    args = parser.parse_args(arguments)  # by default the command line's
    torch.manual_seed(0)
    data, model = read(args.text), GPT(args.depth, args.width, pre_ln=args.pre_ln)
    print(sk.inspect(model, batch(data, 4, args.length)[0]).verdict.text)
    return train(model, data, args.steps, args.rate, args.batch, args.length)


if __name__ == "__main__":
    main()
