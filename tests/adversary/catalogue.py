"""Bad inputs by command: values that no option takes, and files that are not what they are said to be."""

import gzip
import io
import json
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np

from skipless.model.config import ModelConfig
from skipless.training.config import DataConfig, OptimizerConfig, TrainConfig

HUGE = "99999999999999999999999"
NOT_POSITIVE = ("0", "-1", HUGE, "x", "1.5", "nan", "")
NOT_FINITE = ("nan", "inf", "-inf", "-1", "x", "")
DEVICES = ("nosuch", "cuda:99", "", "cpu:x")


def said(command: str) -> list[str]:
    return command.split()


def spread(command: str, **options: tuple[str, ...]) -> list[list[str]]:
    """The command with each value of each option."""
    return [
        [*command.split(), f"--{name.replace('_', '-')}", value] for name, values in options.items() for value in values
    ]


def refused(kind: Any) -> dict[str, tuple[str, ...]]:
    """Texts that no field of a dataclass takes, by what its type is."""
    found = {}
    for name, hint in typing.get_type_hints(kind).items():
        inner = [each for each in typing.get_args(hint) if each is not type(None)]
        bare = inner[0] if type(None) in typing.get_args(hint) and len(inner) == 1 else hint
        if bare is int:
            found[name] = ("x", "1.5", "-2", HUGE)
        elif bare is float:
            found[name] = ("x", "nan", "-inf")
        elif bare is bool or typing.get_origin(bare) is Literal:
            found[name] = ("x", "")
    return found


def settings() -> list[list[str]]:
    """Every field of an experiment, by --set."""
    parts = {"model": ModelConfig, "train": TrainConfig, "optimizer": OptimizerConfig, "data": DataConfig}
    return [
        ["train", "experiment.json", "--show", "--set", f"{part}.{name}={text}"]
        for part, kind in parts.items()
        for name, texts in refused(kind).items()
        for text in texts
    ]


GENERATE = "generate run --prompt fox --max-new-tokens 2 --device cpu"
INSPECT = "inspect run --length 8"
EVAL = "eval run --corpus text.txt --device cpu --max-tokens 32"
KERNELS = "kernels e-spa --no-figure --length 6"
REPRODUCE = "reproduce baselines --data data --device cpu"
TEXT_ALONE = (["--bytes"], ["--vocab", "9"], ["--valid", "text.txt"], ["--valid-fraction", ".5"], ["--workers", "1"])
VALUES: list[list[str]] = [
    *settings(),
    *spread(
        "prepare text.txt --bytes --out new",
        workers=NOT_POSITIVE,
        shard_mb=(*NOT_FINITE, "0", "1e300"),
        valid_fraction=(*NOT_FINITE, "1", "2"),
        invalid_utf8=("x", ""),
        valid=("nosuch", ""),
    ),
    *spread("prepare text.txt --out new", vocab=NOT_POSITIVE, sample_mb=(*NOT_FINITE, "0", "1e300")),
    *spread("prepare text.txt --out new", tokenizer=("nosuch", "bytes", "text.txt", "data", "export/config.json")),
    *spread("prepare lines.jsonl --bytes --out new", text_field=("nosuch", "")),
    *([*said("prepare --images --out new"), name] for name in ("nosuch", "", "/dev/null", "tasks", "text.txt", "data")),
    *([*said("prepare pictures --images --out new"), *words] for words in TEXT_ALONE),
    said("prepare text.txt --bytes --out images"),
    said("prepare pictures --images --out data"),
    *(said(f"train {name} --data images --out new --device cpu") for name in ("experiment.json", "mirrored")),
    *(said(f"train {name} --data data --out new --device cpu") for name in ("vit.json", "vit/mirrored")),
    *spread(
        "train vit.json --show",
        set=("model.images.side=9", "model.images.patch=3", "model.length=5", "model.classes=0"),
    ),
    *([*said("prepare --bytes --out new"), name] for name in ("nosuch", "", "nosuch/*.txt", "/dev/null", "tasks")),
    *spread(
        KERNELS,
        depth=NOT_POSITIVE,
        length=(*NOT_POSITIVE, "10000000"),
        gamma_final=(*NOT_FINITE, "0"),
        skip=("x", "1", "nan", "1,2", "-1", "1,1,1", ""),
        norm=("x", ""),
        activation=("x", "dks-x", "tat-nosuch", "\udcff"),
        calibration=("x", "mlp-aware"),
        repeat_rate=(*NOT_FINITE, "1"),
        input=("x", ""),
        seed=("-1", HUGE, "x", "1.5"),
        blocks=("x", "-1", "9999", HUGE, ""),
        figure=("x.jpg",),
        json=(".", "text.txt/x.json"),
        rho_final=("0.5",),
        set=("x", "nosuch=1", "gamma_final=x", "gamma_final=0", "="),
        **{"import": ("nosuch.py", "nosuch_module", "text.txt", "")},
    ),
    *spread("kernels u-spa --no-figure --length 6", rho_final=(*NOT_FINITE, "1"), gamma_final=("0.1",)),
    *(["kernels", name] for name in ("nosuch", "", "wikitext103/nosuch", "e-spa/", "fig8")),
    *spread(
        INSPECT,
        batch=NOT_POSITIVE,
        depth=("1", "x"),
        width=("8",),
        device=DEVICES,
        rounding=("x",),
        blocks=("nosuch", ""),
        text=("nosuch", "data"),
        corpus=("nosuch",),
        tokenizer=("nosuch",),
        seed=("-1", HUGE, "x"),
        json=(".",),
        figure=("x.jpg",),
    ),
    *spread("inspect wikitext103/e-spa --width 32 --depth 2", **{"import": ("nosuch.py", "data")}),
    *spread("train experiment.json --show", **{"import": ("nosuch.py", "text.txt")}),
    *spread("inspect wikitext103/e-spa --length 8", depth=NOT_POSITIVE, width=NOT_POSITIVE, heads=NOT_POSITIVE),
    *spread("inspect wikitext103/e-spa --width 32 --depth 2", length=("1", *NOT_POSITIVE), batch=("999999999999",)),
    *(["inspect", name] for name in ("nosuch", "hf:nosuch", "hf:", "data", "tasks", "experiment.json", "")),
    *spread(
        EVAL,
        stride=NOT_POSITIVE,
        max_tokens=NOT_POSITIVE[:2] + NOT_POSITIVE[3:],
        length=("0", "-1", "x"),
        precision=("x", ""),
        quantise=("x", "", "int9"),
        backend=("x",),
        device=DEVICES,
        tokenizer=("nosuch", "text.txt", "tasks"),
        json=(".",),
        tasks=("nosuch", ","),
        tasks_folder=("nosuch",),
    ),
    *spread("eval run --tasks piqa --tasks-folder tasks --device cpu", limit=NOT_POSITIVE),
    *(["eval", "run", "--corpus", name] for name in ("nosuch", "", "tasks/piqa.validation.jsonl")),
    *spread(
        GENERATE,
        max_new_tokens=(*NOT_POSITIVE, "999999999999"),
        temperature=(*NOT_FINITE, "1e-300", "1e-40"),
        top_k=NOT_POSITIVE[:2] + NOT_POSITIVE[3:],
        top_p=(*NOT_FINITE, "0", "2"),
        seed=("-1", HUGE, "x", "1.5"),
        device=DEVICES,
        tokenizer=("nosuch", "tasks", "text.txt"),
        prompt=("a\udcffb",),
    ),
    *([command, name] for command in ("generate", "eval", "export") for name in ("nosuch", "data", "text.txt", "")),
    *spread("export run", out=("text.txt", "run"), tokenizer=("nosuch", "tasks", "text.txt"), classes=("images",)),
    *spread(
        "export vit-run", out=("text.txt", "vit-run"), tokenizer=("bytes",), classes=("nosuch", "data", "pictures")
    ),
    *spread("eval vit-export", corpus=("nosuch", "data", "text.txt"), tasks=("piqa",), length=("4",), device=("tpu",)),
    said("eval vit-export"),
    *(
        ["train", name, "--device", "cpu"]
        for name in ("nosuch", "nosuch.json", "text.txt", "data", "wikitext103/x", "")
    ),
    *spread("train experiment.json --out new", device=DEVICES, data=("nosuch", "run", "text.txt")),
    *spread("train experiment.json --device cpu", out=("text.txt", "data", "text.txt/x", "run")),
    *spread("train experiment.json --show", depth=NOT_POSITIVE, width=NOT_POSITIVE, set=("x", "=", "train", "a.b=1")),
    *spread(
        "train experiment.json --out new --device cpu",
        set=("train.batch_size=1000000000", "model.depth=100000000", "train.length=99999", "model.vocab_size=3"),
    ),
    said(
        "train experiment.json --out new --device cpu --set model.value_output=identity --set model.bias_gain=true "
        "--set model.readers=99999 --set train.batch_size=1000"
    ),
    *spread(
        REPRODUCE,
        jobs=NOT_POSITIVE,
        rates=NOT_POSITIVE,
        seeds=NOT_POSITIVE,
        budget=("nan", "-1", "x", "0"),
        scale=("x", ""),
        arms=("nosuch", "e-spa,nosuch"),
        out=("text.txt",),
        device=DEVICES,
    ),
    *(["reproduce", name] for name in ("nosuch", "", "base lines")),
    *(["reproduce", "baselines", "--data", name] for name in ("nosuch", "run", "tasks")),
    ["reproduce", "c4", "--data", "data", "--other-text", "nosuch"],
    *spread("demo --out new", steps=NOT_POSITIVE, seed=("-1", HUGE, "x"), device=DEVICES),
    *spread("demo --steps 1", out=("text.txt", "data", "run")),
    *spread("report inspection.json", out=(".", "inspection.json", "text.txt/x.html")),
    *(["report", name] for name in ("nosuch", "data", "tasks", "text.txt", "experiment.json", "export", "")),
    ["nosuch"],
    ["train", "--nosuch"],
    ["report"],
]

DEEP = b"[" * 100_000
Damage = Callable[[bytes], bytes]


def _changed(change: Callable[[Any], Any]) -> Damage:
    """A change of what a JSON file, or the first line of one, holds."""

    def damage(data: bytes) -> bytes:
        first, newline, rest = data.partition(b"\n") if data[:1] == b"{" and data[1:2] != b"\n" else (data, b"", b"")
        return json.dumps(change(json.loads(first))).encode() + newline + rest

    return damage


def _without_first_key(value: Any) -> Any:
    return {key: inner for key, inner in value.items() if key != next(iter(value))} if isinstance(value, dict) else {}


DAMAGES: dict[str, Damage] = {
    "empty": lambda data: b"",
    "cut short": lambda data: data[: len(data) // 2],
    "no JSON": lambda data: b"{\n" + data,
    "a list": lambda data: b"[]\n",
    "text": lambda data: b'"x"\n',
    "null": lambda data: b"null\n",
    "nested too deep": lambda data: DEEP + b"\n",
    "nested in an object": lambda data: b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"\n",
    "no UTF-8": lambda data: b"\xff\xfe" + data,
    "keys twice": lambda data: b'{"a": 1, "a": 2}\n',
    "another object": lambda data: b'{"step": true, "loss": "x"}\n',
    "a number of 400 digits": lambda data: b'{"step": 1, "loss": ' + b"9" * 400 + b"}\n",
    "a key less": _changed(_without_first_key),
    "other types": _changed(lambda value: {key: [] for key in value} if isinstance(value, dict) else [[]]),
    "nulls": _changed(lambda value: dict.fromkeys(value) if isinstance(value, dict) else [None]),
}
READERS: dict[str, list[str]] = {
    "data/manifest.json": said("train experiment.json --out new --device cpu"),
    "data/options.json": said("prepare lines.jsonl --bytes --valid-fraction 0.3 --out data --workers 1"),
    "experiment.json": said("train experiment.json --out new --device cpu"),
    "vit.json": said("train vit.json --out new --device cpu"),
    "images/manifest.json": said("train vit.json --out new --device cpu"),
    "images/options.json": said("prepare pictures --images --out images"),
    "run/experiment.json": GENERATE.split(),
    "run/metrics.jsonl": ["report", "run"],
    "stopped/metrics.jsonl": said("train experiment.json --out stopped --resume --device cpu"),
    "stopped/data.json": said("train experiment.json --out stopped --resume --device cpu"),
    "stopped/env.json": said("train experiment.json --out stopped --resume --device cpu"),
    "export/config.json": said(GENERATE.replace("run", "export", 1)),
    "export/tokenizer.json": said(GENERATE.replace("run", "export", 1)),
    "export/tokenizer_config.json": said(GENERATE.replace("run", "export", 1)),
    "vit-run/classes.json": said("export vit-run --out new"),
    "evaluation.json": ["report", "evaluation.json"],
    "vit-export/config.json": said("eval vit-export --corpus images --device cpu"),
    "inspection.json": ["report", "inspection.json"],
    "certificates.json": ["report", "certificates.json"],
    "results/skips-small.json": ["report", "results"],
    "results/logs/skips-small.jsonl": said("reproduce skips --scale small --tables-only --out results"),
    "tasks/piqa.validation.jsonl": said("eval run --tasks piqa --tasks-folder tasks --device cpu"),
    "lines.jsonl": said("prepare lines.jsonl --bytes --out new"),
}
# Damage that a command may live with, and why.
HARMLESS = {
    ("run/metrics.jsonl", "empty"): "a run that has logged nothing yet",
    ("run/metrics.jsonl", "cut short"): "a line that is not finished is left out, as after a crash",
    ("results/logs/skips-small.jsonl", "cut short"): "likewise; the page says how many runs are missing",
    **{("stopped/env.json", damage): "nothing reads it" for damage in ("another object", "a key less", "nulls")},
    ("stopped/env.json", "other types"): "nothing reads it",
    ("certificates.json", "a key less"): "the version that wrote it",
    ("inspection.json", "a key less"): "the version that wrote it",
    ("evaluation.json", "a key less"): "the version that wrote it",
    ("results/skips-small.json", "a key less"): "the version that wrote it",
    # the folder has no hashes.json, and is said to be unverified: what is left out has its default
    ("export/config.json", "a key less"): "fields of later versions are missing in older files",
    ("vit-export/config.json", "a key less"): "likewise",
    ("export/tokenizer.json", "a key less"): "its version",
    ("export/tokenizer_config.json", "a key less"): "defaults of transformers",
    ("export/tokenizer_config.json", "another object"): "defaults of transformers",
    # a warning names the log
    ("stopped/metrics.jsonl", "empty"): "lines are lost",
    ("stopped/metrics.jsonl", "cut short"): "lines are lost",
}


def _npz(**arrays: Any) -> bytes:
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


PNG = b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR\x7f\xff\xff\xff\x7f\xff\xff\xff\x08\x02\x00\x00\x00"  # of 2³¹ × 2³¹ pixels
BINARIES: list[tuple[str, str, bytes, list[str]]] = [
    *(
        (file, name, content, words.split())
        for file, words in {
            "run/model.safetensors": GENERATE,
            "export/model.safetensors": GENERATE.replace("generate run", "generate export"),
            "vit-export/model.safetensors": "eval vit-export --corpus images --device cpu",
            "run/probes/step-00000000.npz": "report run",
        }.items()
        for name, content in {
            "empty": b"",
            "text": b"no such thing",
            "a header too long": b"\xff" * 64,
            "zeros": bytes(4096),
            "a pickle": b"\x80\x04\x95\x0c\x00\x00\x00\x00\x00\x00\x00\x8c\x02os\x8c\x06system\x93.",
            "a header nested too deep": (10**5).to_bytes(8, "little") + b"[" * 10**5,
        }.items()
    ),
    *(
        ("run/probes/step-00000000.npz", name, content, ["report", "run"])
        for name, content in {
            "one dimension": _npz(step=0, states=np.ones(3)),
            "not square": _npz(step=0, states=np.ones((3, 4, 5))),
            "one location": _npz(step=0, states=np.ones((3, 1, 1))),
            "no block": _npz(step=0, states=np.ones((0, 4, 4))),
            "no step": _npz(states=np.ones((3, 4, 4))),
            "text": _npz(step="x", states=np.array([["a"]])),
            "complex": _npz(step=0, states=np.ones((3, 4, 4)) * 1j),
        }.items()
    ),
    *(
        ("text.txt", name, content, said("prepare text.txt --bytes --out new"))
        for name, content in {"no UTF-8": b"abc\xff\xfe", "UTF-16": "abc".encode("utf-16")}.items()
    ),
    *(
        ("text.txt.gz", name, content, said("prepare text.txt.gz --bytes --out new"))
        for name, content in {"no gzip": b"abc", "cut short": gzip.compress(b"abc" * 999, mtime=0)[:20]}.items()
    ),
    *(
        (file, name, content, said("train vit.json --out new --device cpu"))
        for file in ("images/train-images.bin", "images/train-labels.bin")
        for name, content in {"empty": b"", "text": b"no pixels", "zeros": bytes(4096)}.items()
    ),
    *(
        (file, name, content, [*said("prepare --images --out new"), file.split("/")[0]])
        for file in ("pictures/train/along/000.png", "pictures.tar.xz")
        for name, content in {"empty": b"", "text": b"no picture", "zeros": bytes(4096), "a head": PNG}.items()
    ),
    ("text.txt.xz", "no xz", b"abc", said("prepare text.txt.xz --bytes --out new")),
    ("text.parquet", "no parquet", b"abc", said("prepare text.parquet --bytes --out new")),
]


def put(file: Path, content: bytes) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)
