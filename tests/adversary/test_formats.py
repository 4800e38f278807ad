"""Random changes of every file that is read: refused by the file's name, or of no effect that matters."""

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.adversary.catalogue import GENERATE, READERS, put, said
from tests.adversary.conftest import inside, run

from skipless.data.store import TokenStore, read_manifest
from skipless.training.config import Experiment

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**25), 10**25)
    | st.floats()
    | st.sampled_from(["", "x", "../x", "e-spa", "<script>", "\udcff", "0" * 70]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "kind", "step"]), inner, max_size=2)
    ),
    max_leaves=5,
)


def nodes(value: Any, path: tuple = ()) -> list[tuple]:
    """The paths of everything in a tree of JSON."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(each for key, child in inner for each in nodes(child, (*path, key)))]


@st.composite
def changes(draw: st.DrawFn) -> Callable[[bytes], bytes]:
    """A file's bytes with one value changed, added or left out, a byte flipped, or the end cut off."""
    kind = draw(st.sampled_from(["value", "value", "value", "without", "more", "byte", "cut"]))
    at, value = draw(st.floats(0, 1, exclude_max=True)), draw(VALUES)

    def change(data: bytes) -> bytes:
        if kind == "byte":
            index = int(at * len(data))
            return data[:index] + bytes([data[index] ^ 0x10]) + data[index + 1 :]
        if kind == "cut":
            return data[: int(at * len(data))]
        lines = data.decode().splitlines() if data[:1] == b"{" and data[1:2] != b"\n" else [data.decode()]
        tree = json.loads(lines[0])
        paths = nodes(tree)[1:] or [()]
        path = paths[int(at * len(paths))]
        changed = copy.deepcopy(tree)
        holder = changed
        for key in path[:-1]:
            holder = holder[key]
        if not path:
            changed = value
        elif kind == "without":
            del holder[path[-1]]
        elif kind == "more" and isinstance(holder, dict):
            holder["unknown"] = value
        else:
            holder[path[-1]] = value
        return "\n".join([json.dumps(changed), *lines[1:], ""]).encode()

    return change


FILES = (
    "data/manifest.json",
    "data/options.json",
    "experiment.json",
    "run/experiment.json",
    "run/metrics.jsonl",
    "stopped/data.json",
    "export/config.json",
    "export/tokenizer_config.json",
    "export/generation_config.json",
    "vit-export/config.json",
    "vit-run/classes.json",
    "evaluation.json",
    "inspection.json",
    "certificates.json",
    "results/skips-small.json",
    "results/logs/skips-small.jsonl",
    "tasks/piqa.validation.jsonl",
    "lines.jsonl",
)
OTHERS = {
    "export/generation_config.json": said(GENERATE.replace("run", "export", 1)),
    "experiment.json": said("train experiment.json --show"),
    "results/logs/skips-small.jsonl": ["report", "results"],
}


@pytest.fixture(scope="module")
def place(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shutil.copytree(world, tmp_path_factory.mktemp("formats") / "world")


QUICK = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


@pytest.mark.parametrize("verified", [True, False], ids=["with hashes", "without"])
@pytest.mark.parametrize("file", FILES)
def test_a_changed_file_never_ends_in_a_traceback(
    world: Path, place: Path, file: str, verified: bool, full: bool
) -> None:
    """Without hashes.json, as in files from elsewhere, only what a command cannot use can be refused."""
    path, hashes = place / file, (place / file).with_name("hashes.json")
    if verified and not (hashes.is_file() and path.name in json.loads(hashes.read_text())["files"]):
        pytest.skip("no hashes are kept of it")
    whole, kept = path.read_bytes(), hashes.read_bytes() if hashes.is_file() else None

    @settings(QUICK, max_examples=200 if full else 12)
    @given(changes())
    def try_it(change: Callable[[bytes], bytes]) -> None:
        shutil.rmtree(place / "new", ignore_errors=True)
        if file.startswith("stopped"):  # which a command that goes on with it brings to its end
            shutil.rmtree(place / "stopped")
            shutil.copytree(world / "stopped", place / "stopped")
        changed = change(whole)
        put(path, changed)
        if kept is not None and verified:
            put(hashes, kept)
        elif kept is not None:
            hashes.unlink(missing_ok=True)
        with inside(place):
            ending = run(*OTHERS.get(file, READERS.get(file, ())))
        assert not ending.traceback
        assert ending.code in (0, 2), ending
        if ending.code == 2:
            given_names = {path.name, file.partition("/")[0], path.stem, path.name.partition(".")[0]}
            assert any(name in ending.err for name in given_names), ending.err
        elif verified:
            assert changed == whole

    try:
        try_it()
    finally:
        put(path, whole)
        if kept is not None:
            put(hashes, kept)


def test_a_changed_manifest_is_refused_or_gives_the_same_tokens(place: Path, full: bool) -> None:
    path = place / "data" / "manifest.json"
    whole = path.read_bytes()
    before, tokens = read_manifest(path.parent), TokenStore(path.parent).read(0, 500)

    @settings(QUICK, max_examples=1000 if full else 100)
    @given(changes())
    def try_it(change: Callable[[bytes], bytes]) -> None:
        put(path, change(whole))
        try:
            store = TokenStore(path.parent)
        except (ValueError, OSError) as error:
            words = str(error)
        else:
            assert np.array_equal(store.read(0, 500), tokens)
            assert store.manifest.tokenizer == before.tokenizer
            return
        assert str(path.parent) in words  # the manifest, or a shard that is not the one listed

    try:
        try_it()
    finally:
        put(path, whole)


def test_a_changed_experiment_is_refused_or_reads_back_as_itself(place: Path, full: bool) -> None:
    whole = (place / "run" / "experiment.json").read_bytes()

    @settings(QUICK, max_examples=1000 if full else 100)
    @given(changes())
    def try_it(change: Callable[[bytes], bytes]) -> None:
        try:
            found = Experiment.from_json(change(whole).decode(errors="replace"))
        except ValueError:
            return
        assert Experiment.from_json(found.to_json()) == found

    try_it()
