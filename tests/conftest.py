import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported; the processes that tests start inherit it

import signal
from collections import defaultdict
from itertools import combinations
from pathlib import Path
from zlib import crc32

import hypothesis
import pytest
import torch
from tests.processes import Program

REPOSITORY = Path(__file__).resolve().parent.parent

if not torch.cuda.is_available():
    # without a GPU its kernels run in Triton's interpreter, which must be asked for before Triton is imported
    os.environ.setdefault("TRITON_INTERPRET", "1")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # a shell ignores it for what it starts in the background; tests of Ctrl-C and the processes they start need it
    signal.signal(signal.SIGINT, signal.default_int_handler)

hypothesis.settings.register_profile("sample", max_examples=50, deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.register_profile("full", deadline=None, print_blob=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="every case of every catalogue, and random examples")


def pytest_configure(config: pytest.Config) -> None:
    hypothesis.settings.load_profile("full" if config.getoption("full") else "sample")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    named = any("::" in argument for argument in config.args)  # whoever names a test wants all its cases
    if not (named or config.getoption("full")):
        left_out = beyond_the_samples(items)
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)  # long tests first, so that all cores are busy to the end


def beyond_the_samples(items: list[pytest.Item]) -> set[pytest.Item]:
    """The cases of tests marked catalogue(most) that a run without --full leaves out."""
    catalogues = defaultdict(list)
    for item in items:
        if item.get_closest_marker("catalogue"):
            catalogues[item.path, item.originalname].append(item)
    return {case for cases in catalogues.values() for case in set(cases) - set(sample(cases))}


def sample(cases: list[pytest.Item]) -> list[pytest.Item]:
    """At most `most` cases, the same in every run: each in turn has the most pairs of values that none before it had.

    So every value of every parameter is in the sample wherever `most` allows it.
    """
    pairs = {case: set(combinations([*sorted(case.callspec.indices.items()), None], 2)) for case in cases}
    left, chosen, seen = sorted(cases, key=lambda case: crc32(case.name.encode())), [], set()
    while left and len(chosen) < cases[0].get_closest_marker("catalogue").args[0]:
        chosen.append(max(left, key=lambda case: len(pairs[case] - seen)))
        left.remove(chosen[-1])
        seen |= pairs[chosen[-1]]
    return chosen


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of corpora: $SKIPLESS_DATA, or shared/data next to the repository."""
    named = os.environ.get("SKIPLESS_DATA")
    folder = Path(named) if named else REPOSITORY.parent / "shared" / "data"
    if named and not folder.is_dir():
        pytest.fail(f"SKIPLESS_DATA={named} is not a folder")
    if not folder.is_dir():
        pytest.skip("no corpora: set SKIPLESS_DATA to their folder")
    return folder


@pytest.fixture
def full(request: pytest.FixtureRequest) -> bool:
    """Whether every case is asked for, for tests that skip long ones by themselves."""
    return request.config.getoption("full")


@pytest.fixture
def on_hopper(tmp_path):
    """Runs a script that compiles kernels for a GPU that is not here, by the tests' own module hopper."""

    def run(script: str, *arguments: str) -> None:
        paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
        changes = {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | changes
        Program(script, *arguments, environment=environment).finished()

    return run
