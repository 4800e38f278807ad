"""A vision transformer without skips and norms, and Pre-LN, on a folder of images.

    python examples/vit_cifar.py cifar10
    python examples/vit_cifar.py cifar10 --network pre-ln --rate 1e-2

The folder has train/CLASS/*.jpg and test/CLASS/*.jpg, all of one size, such as CIFAR-10's 32 × 32. Each patch of an
image is a location, in reading order, and sees all others. Needs Pillow.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from skipless import ExponentialSPA, Transformer, UniformSPA, preset
from skipless.training.config import OptimizerConfig
from skipless.training.optim.build import build_optimizer, set_rates, warmup_cosine

PATCH, ALIKE = 4, 0.12  # ALIKE: the mean cosine of two rows of the stream on CIFAR-10, as the repeat rate of tokens
SCHEMES = {"mirrored": ExponentialSPA(0.2, ALIKE), "mirrored-u-spa": UniformSPA(0.6, ALIKE)}
NUMBERS = {"rate": 2e-3, "embedding_rate": 1e-2, "epochs": 50, "batch": 256, "depth": 12, "width": 256, "seed": 0}


class ViT(nn.Module):
    """Patches and their places to a stream, a transformer without a causal mask, and the mean of its locations."""

    def __init__(self, network: str, size: int, classes: int, depth: int, width: int):
        super().__init__()
        length, numbers = (size // PATCH) ** 2, 3 * PATCH**2
        kind = {"causal": False, "head": "pooled", "classes": classes, "vocab_size": 1}
        config = preset("wikitext103/pre-ln") if network == "pre-ln" else preset("mirrored", scheme=SCHEMES[network])
        self.transformer = Transformer(config, depth=depth, width=width, heads=width // 64, length=length, **kind)
        self.transformer.embedding.requires_grad_(False)  # there are no tokens
        self.patches = nn.ModuleDict({"embedding": nn.Linear(numbers, width, bias=False)})
        self.places = nn.ModuleDict({"embedding": nn.Embedding(length, width)})
        nn.init.normal_(self.places["embedding"].weight, std=(2 * width) ** -0.5)  # both are half of a row of unit norm
        nn.init.normal_(self.patches["embedding"].weight, std=(2 * width * numbers) ** -0.5)

    def forward(self, images: Tensor, labels: Tensor | None = None) -> Tensor:
        """(batch, 3, size, size) of unit variance → logits, or with labels the loss."""
        rows = nn.functional.unfold(images, PATCH, stride=PATCH).transpose(1, 2)
        stream = self.patches["embedding"](rows) + self.places["embedding"].weight
        return self.transformer(inputs_embeds=stream, targets=labels)


def read(folder: Path) -> list[Tensor]:
    """Images (n, 3, size, size) of bytes, and the number of each one's class."""
    names = sorted(path.name for path in folder.iterdir() if path.is_dir())
    files = [(path, label) for label, name in enumerate(names) for path in sorted((folder / name).glob("*.jpg"))]
    images = np.stack([np.asarray(Image.open(path).convert("RGB")) for path, _ in files]).transpose(0, 3, 1, 2)
    return [torch.from_numpy(images.copy()), torch.tensor([label for _, label in files])]


def augment(images: Tensor) -> Tensor:
    """Each image shifted by up to an eighth of its side, and one in two mirrored."""
    (batch, _, size, _), here = images.shape, {"device": images.device}
    rows, columns = torch.randint(2 * (size // 8) + 1, (2, batch, 1), **here)
    side, number = torch.arange(size, **here), torch.arange(batch, **here)[:, None, None]
    flipped = torch.where(torch.rand(batch, 1, **here) < 0.5, size - 1 - side, side)
    padded = nn.functional.pad(images, [size // 8] * 4).permute(0, 2, 3, 1)
    return padded[number, (side + rows)[:, :, None], (flipped + columns)[:, None, :]].permute(0, 3, 1, 2)


def main(words: list[str] | None = None) -> None:
    """Train, and print the accuracy on the test images."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--network", choices=("pre-ln", *SCHEMES), default="mirrored")
    for name, value in NUMBERS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    options = parser.parse_args(words)
    torch.manual_seed(options.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    images, labels, asked, answers = (t.to(device) for part in ("train", "test") for t in read(options.folder / part))
    scale, mean = torch.std_mean(images.float(), (0, 2, 3), keepdim=True)
    images, asked = (images - mean) / scale, (asked - mean) / scale
    model = ViT(options.network, images.shape[-1], int(labels.max()) + 1, options.depth, options.width).to(device)
    factors = {} if options.network == "pre-ln" else {"query": 3.0, "key": 3.0, "up": 0.5, "down": 0.5}
    rates = OptimizerConfig("muon", options.rate, options.embedding_rate, role_rates=factors, gain_rate=1e-2)
    optimizer, steps = build_optimizer(model, rates), options.epochs * (len(images) // options.batch)
    for step in range(steps):
        chosen = torch.randint(len(images), (options.batch,), device=device)
        set_rates(optimizer, warmup_cosine(step + 1, steps, max(steps // 10, 1)))
        optimizer.zero_grad()
        loss = model(augment(images[chosen]), labels[chosen])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        if step % max(steps // 10, 1) == 0:
            print(f"step {step} of {steps}: loss {loss.item():.3f}", flush=True)
    with torch.no_grad():
        found = torch.cat([model(part).argmax(1) for part in asked.split(500)])
    print(f"{options.network}: {(found == answers).double().mean().item():.2%} of {len(answers):,} test images")


if __name__ == "__main__":
    main()
