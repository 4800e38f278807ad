"""Bad values and bad files through main() in this process: a sentence, exit code 2, no traceback, nothing changed."""

import shutil
from pathlib import Path

import pytest
from tests.adversary.catalogue import BINARIES, DAMAGES, HARMLESS, READERS, VALUES, put
from tests.adversary.conftest import inside, run


@pytest.mark.parametrize("words", VALUES, ids=lambda words: " ".join(words).encode("ascii", "replace").decode() or "-")
def test_a_bad_value_is_refused_in_a_sentence(place: Path, words: list[str]) -> None:
    shutil.rmtree(place / "new", ignore_errors=True)
    before = state(place)
    with inside(place):
        ending = run(*words)
    assert not ending.traceback
    assert ending.code == 2, ending
    assert "skipless: " in ending.err or "Usage: " in ending.err
    assert {file: seen for file, seen in state(place).items() if file in before} == before


@pytest.fixture(scope="module")
def place(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the world that all bad values share: none of them may change a file of it."""
    return shutil.copytree(world, tmp_path_factory.mktemp("place") / "world")


def state(folder: Path) -> dict[Path, tuple[int, int]]:
    """Size and time of every file but notes of who was last there."""
    files = (file for file in folder.rglob("*") if file.is_file() and file.name not in (".lock", "verified.json"))
    return {file: (file.stat().st_size, file.stat().st_mtime_ns) for file in files}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("file", READERS)
def test_a_damaged_file_is_refused_by_its_name(here: Path, caplog, file: str, damage: str) -> None:
    for hashes in here.glob("*/hashes.json"):  # which would refuse it before it is read
        hashes.unlink()
    put(here / file, DAMAGES[damage]((here / file).read_bytes()))
    ending = run(*READERS[file])
    assert not ending.traceback
    if (file, damage) in HARMLESS:
        assert ending.code == 0, ending
        assert ("lines are lost" in caplog.text) == (HARMLESS[file, damage] == "lines are lost")
    else:
        assert ending.code == 2, ending
        of_folder = file.startswith(("data/options", "images/options", "results/"))
        folder = ("data", "images", "results") if of_folder else ()
        named = (Path(file).name, *folder, *(["lines holds no text"] if damage == "empty" else []))
        assert any(name in ending.err for name in named), ending.err


@pytest.mark.parametrize(("file", "damage", "content", "words"), BINARIES, ids=lambda value: str(value)[:40])
def test_a_file_of_another_kind_is_refused_by_its_name(here: Path, file: str, damage, content: bytes, words) -> None:
    put(here / file, content)
    ending = run(*words)
    assert not ending.traceback
    assert ending.code == 2, ending
    assert Path(file).name in ending.err


@pytest.mark.parametrize("file", ["run/experiment.json", "run/metrics.jsonl", "export/config.json"])
def test_a_folder_in_the_place_of_a_file_is_refused(here: Path, file: str) -> None:
    (here / file).unlink()
    (here / file).mkdir()
    ending = run(*READERS[file])
    assert (ending.traceback, ending.code) == ("", 2)
