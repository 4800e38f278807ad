import errno
import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from skipless.console import Progress
from skipless.data.prepare import Folder, Preparation, prepare
from skipless.data.store import TokenStore, read_manifest
from skipless.data.text import held_out, open_corpus
from skipless.data.tokenizer import Bytes, ByteTokenizer, FileTokenizer, TrainUnigram, load_tokenizer
from skipless.theory.kernels import repeat_rate


def contents(folder: Path) -> dict[str, bytes]:
    """The files that make up the result."""
    skipped = ("verified.json", ".lock")
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name not in skipped}


@pytest.fixture(scope="module")
def plan(sources, model) -> Preparation:
    return Preparation(str(sources), FileTokenizer(model), valid_fraction=0.1, shard_mb=0.1)


@pytest.fixture(scope="module")
def finished(plan, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("finished")
    prepare(plan, out)
    return out


@pytest.fixture
def folder(finished, tmp_path) -> Path:
    return shutil.copytree(finished, tmp_path / "copy")


@pytest.mark.parametrize("split", ["train", "valid"])
def test_shards_hold_the_corpus_exactly(finished, sources, split):
    store = TokenStore(finished, split, verify="always")
    tokens = store.read(0, len(store))
    ends = np.flatnonzero(tokens == store.end)
    found = [store.tokenizer.decode(part[:-1]) for part in np.split(tokens, ends + 1)[:-1]]
    texts = [text for text in open_corpus(sources) if held_out(text.encode(), 0.1) == (split == "valid")]
    assert found == texts
    counted = store.manifest.splits[split]
    assert (counted.documents, counted.text_bytes) == (len(texts), sum(len(text.encode()) for text in texts))
    assert counted.tokens == len(store) == sum(shard.tokens for shard in store.shards)
    assert store.repeat_rate == pytest.approx(repeat_rate(tokens))


def test_neither_workers_nor_chunks_change_the_result(plan, finished, tmp_path, monkeypatch):
    monkeypatch.setattr("skipless.data.prepare.CHUNK", 10_000)
    prepare(plan, tmp_path / "other", workers=5)
    assert contents(tmp_path / "other") == contents(finished)


def test_a_finished_folder_is_checked_and_left_alone(plan, folder, capsys):
    before = contents(folder)
    assert prepare(plan, folder, progress=Progress()) == read_manifest(folder)
    assert "shards checked, nothing to do" in capsys.readouterr().err
    assert contents(folder) == before


def test_a_deleted_shard_is_made_again_and_the_others_are_kept(plan, folder):
    before = contents(folder)
    kept = (folder / "train-00003.bin").stat().st_mtime_ns
    for name in ("train-00000.bin", "train-00002.bin", "tokenizer.model"):
        (folder / name).unlink()
    with pytest.raises(ValueError, match=r"train-00000.bin is missing: the same `skipless prepare` command"):
        TokenStore(folder)
    prepare(plan, folder)
    assert contents(folder) == before
    assert (folder / "train-00003.bin").stat().st_mtime_ns == kept


def damage(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    if how == "flip":
        data[len(data) // 2] ^= 4
    path.write_bytes(data[:-2] if how == "truncate" else data)


@pytest.mark.parametrize(("how", "message"), [("flip", "is damaged"), ("truncate", "it is cut short")])
@pytest.mark.parametrize("complete", [True, False])
def test_a_damaged_shard_is_named_and_refused(plan, folder, how, message, complete):
    before = contents(folder)
    damage(folder / "train-00001.bin", how)
    expected = rf"train-00001.bin .*{message}.*delete it, and the same `skipless prepare` command makes it anew"
    with pytest.raises(ValueError, match=expected):
        TokenStore(folder)
    if not complete:
        Folder(folder).reopen()
    with pytest.raises(ValueError, match=expected):
        prepare(plan, folder)
    (folder / "train-00001.bin").unlink()
    prepare(plan, folder)
    assert contents(folder) == before


def test_hashes_are_trusted_until_a_file_changes(folder, monkeypatch):
    TokenStore(folder)
    hashed = []
    monkeypatch.setattr("skipless.data.store.check_hash", lambda folder, shard: hashed.append(shard.file))
    TokenStore(folder)
    assert hashed == []
    (folder / "train-00001.bin").touch()
    TokenStore(folder)
    assert hashed == ["train-00001.bin"]
    TokenStore(folder, verify="always")
    assert len(hashed) > 5


def test_several_may_verify_at_once_and_a_note_that_fails_stops_none(folder, monkeypatch):
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: TokenStore(folder, verify="always"), range(24)))
    assert not list(folder.glob(".*.skipless-*"))

    def full(path, data):
        raise OSError(28, "No space left on device")

    (folder / "verified.json").unlink()
    monkeypatch.setattr("skipless.data.store.write_whole", full)
    assert len(TokenStore(folder)) > 0
    assert not (folder / "verified.json").exists()


def test_other_options_are_named_and_force_starts_over(plan, folder, sources, model):
    other = Preparation(str(sources), Bytes(), valid_fraction=0.2, shard_mb=0.1)
    with pytest.raises(
        ValueError, match=r"other options \(.*tokenizer.kind: file there, bytes now.*0.1 there, 0.2 now"
    ):
        prepare(other, folder)
    prepare(other, folder, force=True)
    assert TokenStore(folder).tokenizer.kind == "bytes"
    assert not (folder / "tokenizer.model").exists()


@pytest.mark.parametrize(
    "name",
    [
        "movie.part",
        "tokenizer.model",
        "train-00000.bin",
        "manifest.json",
        "sections.jsonl",
        "verified.json",
        "notes.txt",
    ],
)
def test_a_folder_of_other_files_is_left_alone_whatever_their_names(plan, tmp_path, name):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).write_text("precious")
    for force in (False, True):
        with pytest.raises(ValueError, match=rf"holds other files \({name}\)"):
            prepare(plan, tmp_path / "out", force=force)
    kept = {file.name: file.read_text() for file in (tmp_path / "out").iterdir() if file.name != ".lock"}
    assert kept == {name: "precious"}


def test_options_of_something_else_are_left_alone(plan, tmp_path):
    (tmp_path / "options.json").write_text('{"colour": "red"}')
    with pytest.raises(ValueError, match=r"options\.json is not of `skipless prepare`"):
        prepare(plan, tmp_path)
    assert (tmp_path / "options.json").read_text() == '{"colour": "red"}'


def test_files_beside_the_shards_stay(plan, folder):
    others = ("movie.part", "train-mine.bin", "notes.txt")
    for name in others:
        (folder / name).write_text("precious")
    prepare(plan, folder, workers=1, force=True)
    assert [(folder / name).read_text() for name in others] == ["precious"] * 3


def test_a_tokenizer_that_no_preparation_noted_is_not_taken(plan, folder, tmp_path):
    """Also in a folder of our own: its manifest would say that it was made as asked for."""
    unfinished = tmp_path / "unfinished"
    unfinished.mkdir()
    for name in ("options.json", "tokenizer.model"):
        shutil.copy(folder / name, unfinished)
    with pytest.raises(ValueError, match=r"tokenizer\.model is there, and no preparation has noted it"):
        prepare(plan, unfinished, workers=1)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("options.json", "{"),
        ("options.json", "[1]"),
        ("sections.jsonl", "garbage\n"),
        ("sections.jsonl", "[]\n"),
        ("sections.jsonl", '{"index": 0}\n'),
    ],
)
def test_damaged_notes_are_named_and_force_starts_over(plan, folder, finished, name, content):
    (folder / "manifest.json").unlink()
    (folder / name).write_text(content)
    with pytest.raises(ValueError, match=rf"copy/{name} is damaged or of another version .* --force"):
        prepare(plan, folder)
    prepare(plan, folder, force=True)
    assert contents(folder) == contents(finished)


@pytest.mark.parametrize("content", ["{", "[1]", "3"])
def test_a_damaged_note_of_checks_only_means_checking_again(folder, content):
    (folder / "verified.json").write_text(content)
    assert len(TokenStore(folder)) > 0
    assert "train-00000.bin" in json.loads((folder / "verified.json").read_text())


def test_options_that_came_to_nothing_leave_the_folder_free(sources, tmp_path):
    """A vocabulary that the text is too short for, and then the one that the error names."""
    with pytest.raises(ValueError, match="vocab"):
        prepare(Preparation(str(sources), TrainUnigram(60_000, 0.05)), tmp_path / "out")
    assert (tmp_path / "out" / "options.json").is_file()
    prepare(Preparation(str(sources), Bytes()), tmp_path / "out")
    assert TokenStore(tmp_path / "out").tokenizer.kind == "bytes"


def test_a_changed_corpus_is_noticed(tmp_path):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("one two three")
    plan = Preparation(str(tmp_path / "text"), Bytes(), valid_fraction=0.0)
    prepare(plan, tmp_path / "out")
    (tmp_path / "text" / "a.txt").write_text("one two four!")
    with pytest.raises(ValueError, match=r"corpus.fingerprint: \w+ there, \w+ now"):
        prepare(plan, tmp_path / "out")


def test_a_tokenizer_that_did_not_make_the_shards_is_refused(folder, plan):
    store = TokenStore(folder)
    store.check_tokenizer(load_tokenizer(folder / "tokenizer.model"))
    with pytest.raises(ValueError, match=r"this tokenizer \(bytes, 256 pieces.*did not make the shards"):
        store.check_tokenizer(ByteTokenizer())
    other = TrainUnigram(500, 0.2).make(open_corpus(plan.corpus).parts, lambda text: True)
    assert other.model is not None
    (folder / "tokenizer.model").write_bytes(other.model)
    for refused in (lambda: TokenStore(folder).tokenizer, lambda: prepare(plan, folder)):
        with pytest.raises(ValueError, match=r"500 pieces.*did not make the shards.*600 pieces"):
            refused()


def test_separate_validation_text(sources, tmp_path):
    valid = sources / "json-tool.py"
    plan = Preparation(str(sources / "email-*.py"), Bytes(), valid=str(valid))
    manifest = prepare(plan, tmp_path / "out")
    assert manifest.splits["valid"].documents == 1
    assert manifest.splits["valid"].text_bytes == valid.stat().st_size
    assert manifest.splits["train"].documents == len(list(sources.glob("email-*.py")))
    with pytest.raises(ValueError, match="either --valid or --valid-fraction"):
        Preparation("stdlib", Bytes(), valid="x", valid_fraction=0.1)


def test_shared_wikipedia_by_bytes_has_the_rate_of_characters(shared_data, tmp_path):
    plan = Preparation(str(shared_data / "wikipedia" / "valid.txt.xz"), Bytes(), valid_fraction=0.02, shard_mb=1)
    manifest = prepare(plan, tmp_path / "out")
    rate = manifest.splits["train"].repeat_rate
    assert rate is not None
    assert 0.04 < rate < 0.08
    assert len(TokenStore(tmp_path / "out").shards) == 5


def test_no_text_is_an_error(tmp_path):
    (tmp_path / "empty.txt").write_text("\n\n\n")
    for choice, message in [(Bytes(), "empty holds no text to train on"), (TrainUnigram(300), "holds no text")]:
        with pytest.raises(ValueError, match=message):
            prepare(Preparation(str(tmp_path / "empty.txt"), choice), tmp_path / choice.describe()["kind"])


def test_a_split_without_tokens_says_what_there_is(tmp_path, sources):
    prepare(Preparation(str(sources / "json-tool.py"), Bytes(), valid_fraction=0.0), tmp_path / "out")
    with pytest.raises(ValueError, match=r"no tokens for 'valid'; it has train \([\d,]+ tokens\), valid \(0 tokens\)"):
        TokenStore(tmp_path / "out", "valid")


def test_what_is_not_a_prepared_folder_is_left_alone(plan, tmp_path, folder):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("dear to me")
    for force in (False, True):
        with pytest.raises(ValueError, match=r"thesis holds other files \(chapter.tex\)"):
            prepare(plan, tmp_path / "thesis", force=force)
    with pytest.raises(ValueError, match=r"thesis is not a prepared folder"):
        TokenStore(tmp_path / "thesis")
    (folder / "manifest.json").write_text(json.dumps({"format": 99}))
    with pytest.raises(ValueError, match=r"manifest.json is damaged or of another version \(format 99"):
        TokenStore(folder)


def test_two_documents_are_enough_for_validation(tmp_path):
    (tmp_path / "a.txt").write_text("The first document.\n\n\nThe second one, which is longer.")
    manifest = prepare(Preparation(str(tmp_path / "a.txt"), Bytes()), tmp_path / "out")
    assert [manifest.splits[split].documents for split in ("train", "valid")] == [1, 1]
    assert manifest.options["valid"] == {"fraction": 0.005}, "what was asked for"
    none = prepare(Preparation(str(tmp_path / "a.txt"), Bytes(), valid_fraction=0.0), tmp_path / "none")
    assert [none.splits[split].documents for split in ("train", "valid")] == [2, 0]


def test_two_at_once_are_kept_apart(plan, folder):
    refusal = r"process \d+ on .* is preparing .*: wait for it, or use another --out"
    with Folder(folder).locked(), pytest.raises(ValueError, match=refusal):
        prepare(plan, folder)


def test_a_file_system_without_locks_is_no_second_command(tmp_path, monkeypatch, caplog):
    fcntl = pytest.importorskip("fcntl")

    def unknown(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unknown)
    (tmp_path / "a.txt").write_text("The signal goes through.")
    prepare(Preparation(str(tmp_path / "a.txt"), Bytes()), tmp_path / "out")
    assert f"{tmp_path / 'out'} cannot be locked (No locks available)" in caplog.text
