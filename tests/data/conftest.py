import sysconfig
from pathlib import Path

import pytest

from skipless.data.text import open_corpus
from skipless.data.tokenizer import TrainUnigram

PACKAGES = ("email", "json", "logging", "urllib")


@pytest.fixture(scope="session")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some 0.8 MB of real text: a few packages of the standard library, one document per file."""
    folder = tmp_path_factory.mktemp("sources")
    library = Path(sysconfig.get_path("stdlib"))
    for package in PACKAGES:
        for path in sorted((library / package).glob("*.py")):
            if path.stat().st_size:
                (folder / f"{package}-{path.name}").write_bytes(path.read_bytes())
    return folder


@pytest.fixture(scope="session")
def model(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SentencePiece model of 600 pieces, trained on `sources`."""
    tokenizer = TrainUnigram(600, 0.3).make(open_corpus(sources).parts, lambda text: True)
    path = tmp_path_factory.mktemp("model") / "small.model"
    assert tokenizer.model is not None
    path.write_bytes(tokenizer.model)
    return path
