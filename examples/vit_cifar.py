"""A vision transformer without skips and norms, or Pre-LN, on a folder of pictures, by the library's own training.

    python examples/vit_cifar.py cifar10
    python examples/vit_cifar.py cifar10 --network pre-ln --rate 1e-2

The folder has train/CLASS/*.jpg and test/CLASS/*.jpg, or a tar of each, all squares of one size such as CIFAR-10's
32 × 32. The same by two commands: skipless prepare cifar10 --images --out data/cifar10, then skipless train
vit/mirrored --data data/cifar10. What is here besides is how to look at a trained network. Needs Pillow.
"""

import argparse
from pathlib import Path

import torch

import skipless
from skipless.data.image_files import prepare_images
from skipless.data.image_loader import ImageLoader
from skipless.data.image_store import ImageStore
from skipless.training.accuracy import by_class, evaluate_images

NUMBERS = {"rate": None, "embedding_rate": 2e-3, "epochs": 50, "batch": 256, "depth": 12, "width": 256, "seed": 0}


def main(words: list[str] | None = None) -> None:
    """Prepare, train, and print the accuracy on the test images and on each class."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--network", choices=("pre-ln", "mirrored", "mirrored-u-spa"), default="mirrored")
    parser.add_argument("--out", type=Path, default=Path("vit"))
    for name, value in NUMBERS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=float if value is None else type(value), default=value)
    options = parser.parse_args(words)
    data, run = options.out / "data", options.out / options.network
    prepare_images(options.folder, data)
    train, test = ImageStore(data), ImageStore(data, "valid")
    steps = max(options.epochs * len(train) // options.batch, 2)
    settings = {"depth": options.depth, "width": options.width, "heads": max(options.width // 64, 1), "steps": steps}
    settings |= {"batch_size": options.batch, "embedding_rate": options.embedding_rate, "seed": options.seed}
    settings |= {} if options.rate is None else {"rate": options.rate}
    gpu = torch.cuda.is_available()
    settings |= {} if gpu else {"precision": "fp32", "compile": False}
    skipless.train(f"vit/{options.network}", data=data, out=run, quiet=not gpu, eval_every=steps, **settings)

    model = skipless.load(run, device="cuda" if gpu else "cpu")
    first = ImageLoader(test, 8).batch(0).inputs.to("cuda" if gpu else "cpu")
    print(skipless.inspect(model, first).verdict.text)
    result = evaluate_images(model, ImageLoader(test, 500), precision="fp32")
    for each in by_class(result.answers, test.manifest.classes):
        print(f"{each.name}: {each.accuracy:.1%}")
    print(f"{options.network}: {result.accuracy:.2%} of {result.images:,} test images")


if __name__ == "__main__":
    main()
