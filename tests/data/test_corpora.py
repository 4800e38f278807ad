import sys
import types

import pytest

from skipless.data.text import held_out, open_corpus, share_held_out


def test_stdlib_is_real_text_in_a_fixed_order():
    corpus = open_corpus("stdlib")
    texts = list(corpus)
    assert sum(map(len, texts)) > 5e6
    assert [part.name for part in corpus.parts] == sorted(part.name for part in corpus.parts)
    assert any("class JSONDecoder" in text for text in texts)
    assert corpus.fingerprint() == open_corpus("stdlib").fingerprint()


def test_a_folder_keeps_validation_and_test_files_apart(tmp_path):
    for name in (
        "train-00.txt",
        "train-01.txt",
        "valid.txt",
        "wiki.test.raw",
        ".hidden.txt",
        "notes.doc",
        "latest.txt",
    ):
        (tmp_path / name).write_text(name)
    corpus = open_corpus(tmp_path)
    assert [part.name for part in corpus.parts] == ["latest.txt", "train-00.txt", "train-01.txt"]
    assert corpus.validation is not None
    assert list(corpus.validation) == ["valid.txt"]


def test_shared_wikipedia(shared_data):
    corpus = open_corpus(shared_data / "wikipedia")
    assert len(corpus.parts) == 3
    assert corpus.validation is not None
    assert len(list(corpus.validation)) >= 300
    assert next(iter(corpus)).count(" ") > 100


def test_paths_and_globs(sources, tmp_path):
    assert len(open_corpus(sources / "json-*.py").parts) == len(list(sources.glob("json-*.py")))
    assert list(open_corpus(str(sources / "json-tool.py"))) == [(sources / "json-tool.py").read_text()]
    for spec, message in [
        (tmp_path / "none.txt", "no corpus .*none.txt.*the named corpora are stdlib, wikitext-103, c4"),
        (tmp_path / "*.txt", "no corpus"),
        (tmp_path, "holds no text"),
    ]:
        with pytest.raises(ValueError, match=message):
            open_corpus(spec)


def test_fingerprint_follows_content_and_not_place(tmp_path):
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.txt").write_text("text")
    first = open_corpus(tmp_path / "one").fingerprint()
    assert open_corpus(tmp_path / "two").fingerprint() == first
    (tmp_path / "two" / "a.txt").write_text("next")
    assert open_corpus(tmp_path / "two").fingerprint() != first


def test_held_out_share():
    texts = [f"document {i}".encode() for i in range(20_000)]
    share = sum(held_out(text, 0.05) for text in texts) / len(texts)
    assert share == pytest.approx(0.05, abs=0.006)
    assert not any(held_out(text, 0.0) for text in texts)


def test_a_share_above_zero_holds_out_one_of_two_documents():
    texts = ["first", "second", "third"]
    share = share_held_out(texts, 1e-9)
    assert [held_out(text.encode(), share) for text in texts].count(True) == 1
    assert share_held_out(reversed(texts), 1e-9) == share
    assert share_held_out(texts, 0.0) == 0.0
    assert share_held_out(["alone"], 1e-9) == share_held_out(["same", "same"], 1e-9) == 1e-9
    many = (f"document {i}" for i in range(20_000))
    assert share_held_out(many, 0.05) == 0.05
    assert next(many, None) is not None, "no more is read than needed"


class FakeRows(list):
    def skip(self, count: int) -> "FakeRows":
        return FakeRows(self[count:])


def fake_hub(monkeypatch, load) -> None:
    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load))


def test_hub_corpora(monkeypatch):
    asked = []

    def load(repository, configuration, split, streaming):
        asked.append((repository, configuration, split, streaming))
        if repository == "allenai/c4":
            return FakeRows({"text": f"page {i}"} for i in range(5))
        lines = ["", " = One = \n", "", " text\n", "", " = = Part = = \n", "", " = Two = \n", ""]
        return FakeRows({"text": line} for line in lines)

    fake_hub(monkeypatch, load)
    c4 = open_corpus("c4", download=True)
    assert list(c4.parts[0].documents(skip=3)) == ["page 3", "page 4"]
    wikitext = open_corpus("wikitext-103", download=True)
    assert list(wikitext) == [" = One = \n text\n = = Part = = \n", " = Two = \n"]
    assert wikitext.validation is not None
    list(wikitext.validation)
    assert asked == [
        ("allenai/c4", "en", "train", True),
        ("Salesforce/wikitext", "wikitext-103-raw-v1", "train", False),
        ("Salesforce/wikitext", "wikitext-103-raw-v1", "validation", False),
    ]


def test_hub_that_cannot_be_reached(monkeypatch):
    def load(*_, **__):
        raise ConnectionError("Couldn't reach 'allenai/c4' on the Hub\nand more")

    fake_hub(monkeypatch, load)
    with pytest.raises(OSError, match=r"c4 could not be read .*ConnectionError: Couldn't reach.*: check the network"):
        list(open_corpus("c4", download=True))
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"pip install 'skipless\[data\]'"):
        list(open_corpus("c4", download=True))
    with pytest.raises(ValueError, match="add --download to `skipless prepare c4`"):
        open_corpus("c4")
