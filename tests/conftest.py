import os
import subprocess
import sys
from pathlib import Path

import hypothesis
import pytest
import torch

REPOSITORY = Path(__file__).resolve().parent.parent

if not torch.cuda.is_available():
    # without a GPU its kernels run in Triton's interpreter, which must be asked for before Triton is imported
    os.environ.setdefault("TRITON_INTERPRET", "1")

hypothesis.settings.register_profile("skipless", deadline=None)
hypothesis.settings.register_profile("skipless-ci", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("skipless-ci" if os.environ.get("CI") else "skipless")

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # the workers share the cores


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


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
def on_hopper(tmp_path):
    """Runs a script that compiles kernels for a GPU that is not here, by the tests' own module hopper."""

    def run(script: str, *arguments: str) -> None:
        paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
        changes = {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | changes
        command = [sys.executable, "-c", script, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)
        assert done.returncode == 0, done.stderr[-3000:]

    return run
