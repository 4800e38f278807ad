import gzip
import json
import lzma
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skipless.data import formats
from skipless.data.formats import Reading, articles, documents, wikitext_articles

READING = Reading()


def read(path: Path, **options) -> list[str]:
    return list(documents(path, Reading(**options)))


@given(
    st.lists(st.sampled_from([b"a", b"bc d", "é☃".encode(), b"\n", b"\n\n\n", b"\r\n", b"x" * 30]), max_size=40),
    st.lists(st.integers(1, 25), min_size=1),
    st.booleans(),
)
def test_documents_depend_on_the_bytes_and_not_on_the_blocks(pieces, cuts, split):
    data = b"".join(pieces)
    blocks, at, turn = [], 0, 0
    while at < len(data):
        blocks.append(data[at : at + cuts[turn % len(cuts)]])
        at, turn = at + cuts[turn % len(cuts)], turn + 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(formats, "LONGEST", 40)
        whole = [piece for piece in articles([data], split) if piece[1]]
        parted = [piece for piece in articles(blocks, split) if piece[1]]
    assert parted == whole
    for at, piece in whole:
        assert data[at : at + len(piece)] == piece
        assert len(piece) <= 40
        piece.decode()
    if not split:
        assert b"".join(piece for _, piece in whole) == data
    else:
        kept = b"".join(piece for _, piece in whole)
        assert re.sub(rb"[\r\n]", b"", kept) == re.sub(rb"[\r\n]", b"", data)


def test_articles_are_split_at_two_empty_lines_and_keep_the_rest(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"\nTitle\n\nText  with spaces \nline\n\n\n\nSecond\n\n\n\n\n\n")
    assert read(path) == ["Title\n\nText  with spaces \nline", "Second"]
    path.write_bytes(b"One\r\n\r\nstill one\r\n\r\n\r\nTwo\r\n")
    assert read(path) == ["One\r\n\r\nstill one", "Two"]
    path.write_bytes(b"no gap at all\n\njust a paragraph\n")
    assert read(path) == ["no gap at all\n\njust a paragraph"]


def test_a_whole_file_is_one_document_to_the_byte(sources):
    path = sources / "json-decoder.py"
    assert read(path) == [path.read_text()]


def test_shared_wikipedia_loses_nothing(shared_data):
    path = shared_data / "wikipedia" / "valid.txt.xz"
    found = read(path)
    assert len(found) >= 300
    assert "\n\n\n".join(found) == lzma.decompress(path.read_bytes()).decode().strip("\n")


def test_wikitext_articles_start_at_headings(shared_data):
    for name in ("valid", "test"):
        path = shared_data / "wikitext-103" / f"wiki.{name}.raw.xz"
        found = read(path)
        assert len(found) == 60
        assert "".join(found) == lzma.decompress(path.read_bytes()).decode()
        assert all(text.lstrip().startswith("= ") for text in found)


def test_headings_of_lower_levels_and_formulas_start_no_article():
    lines = [b" \n", b" = A = \n", b" \n", b" text\n", b" = 5 = \n", b" \n", b" = = B = = \n", b" \n", b" = C = \n"]
    assert list(wikitext_articles(lines)) == [b"".join(lines[:8]), lines[8]]


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".zst"])
def test_packed_files_read_alike_and_truncation_is_named(tmp_path, sources, suffix):
    data = b"\n\n\n".join(path.read_bytes() for path in sorted(sources.iterdir()))
    plain = tmp_path / "text.txt"
    plain.write_bytes(data)
    if suffix == ".zst":
        zstandard = pytest.importorskip("zstandard")
        half = len(data) // 2  # two frames, as parallel packers write them
        packed = zstandard.compress(data[:half]) + zstandard.compress(data[half:])
    else:
        packed = gzip.compress(data) if suffix == ".gz" else lzma.compress(data)
    path = tmp_path / f"text.txt{suffix}"
    path.write_bytes(packed)
    seen = []
    assert list(documents(path, READING, seen=seen.append)) == read(plain)
    assert sum(seen) == len(packed)
    assert list(documents(path, READING, skip=5)) == read(plain)[5:]
    for damaged in (packed[: len(packed) * 3 // 4], b"not packed at all"):
        path.write_bytes(damaged)
        with pytest.raises(OSError, match=re.escape(str(path)) + " is damaged or cut short"):
            read(path)


def test_invalid_utf8_is_named_by_file_and_byte(tmp_path, monkeypatch):
    monkeypatch.setattr(formats, "BLOCK", 1000)
    data = bytearray("Ein Töpfchen Übergröße.\n\n\n".encode() * 300)
    data[5001:5002] = b"\xff"
    path = tmp_path / "bad.txt"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"bad.txt: byte 5001 \(0xff\) is not valid UTF-8.*--invalid-utf8 replace"):
        read(path)
    assert "\ufffd" in "".join(read(path, invalid_utf8="replace"))
    with pytest.raises(ValueError, match="use 'error' or 'replace'"):
        Reading(invalid_utf8="ignore")  # ty: ignore[invalid-argument-type]


def test_jsonl(tmp_path, shared_data):
    found = read(shared_data / "c4-sample" / "c4.jsonl.xz")
    assert len(found) == 1480
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": "one\n\n\n"}) + "\n\n" + json.dumps({"text": ""}) + '\n{"text": "two"}')
    assert read(path) == ["one\n\n\n", "two"]
    for line, message in [
        ("{broken", "a.jsonl, line 2 is not JSON"),
        ('{"body": "x", "id": 3}', r"line 2 has no text in 'text': name the field .*--text-field`\); it has: body, id"),
        ('{"text": null}', "line 2 has no text in 'text'"),
        ('{"text": "\\ud800"}', "line 2: surrogates not allowed at character 0"),
    ]:
        path.write_text('{"text": "fine"}\n' + line + "\n")
        with pytest.raises(ValueError, match=message):
            read(path)
    assert "\ufffd" in read(path, invalid_utf8="replace")[1]
    path.write_text('{"body": "x"}')
    assert read(path, text_field="body") == ["x"]


def test_parquet(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pytest.importorskip("pyarrow").table
    path = tmp_path / "a.parquet"
    parquet.write_table(table({"text": [f"document {i}" for i in range(1000)], "id": range(1000)}), path)
    assert read(path) == [f"document {i}" for i in range(1000)]
    assert next(documents(path, READING, skip=990)) == "document 990"
    with pytest.raises(ValueError, match="no column 'body': name one with --text-field: text, id"):
        read(path, text_field="body")
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(ValueError, match=r"a.parquet is not a whole parquet file"):
        read(path)


def test_parquet_without_pyarrow_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow.parquet", None)
    (tmp_path / "a.parquet").touch()
    with pytest.raises(ValueError, match=r"pip install 'skipless\[data\]'"):
        read(tmp_path / "a.parquet")


def test_long_documents_are_cut_at_line_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(formats, "LONGEST", 1000)
    text = "".join(f"line {i}\n" for i in range(500))
    (tmp_path / "a.md").write_text(text)
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": text}))
    for name in ("a.md", "a.jsonl"):
        found = read(tmp_path / name)
        assert "".join(found) == text
        assert all(len(piece) <= 1000 and piece.endswith("\n") for piece in found)


def test_unknown_suffix_lists_the_known(tmp_path):
    (tmp_path / "a.doc").touch()
    with pytest.raises(ValueError, match=r"a.doc: the suffix must be one of .txt"):
        read(tmp_path / "a.doc")


def test_a_byte_order_mark_is_no_part_of_json(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes('\ufeff{"text": "one"}\n{"text": "\ufefftwo"}\n'.encode())
    assert read(path) == ["one", "\ufefftwo"]
    path.write_bytes(b'\xef\xbb\xbf{"text": "\xff"}\n')
    with pytest.raises(ValueError, match="byte 13 "):
        read(path)


@pytest.mark.parametrize("codec", ["utf-16", "utf-16-be"])
def test_wide_characters_are_recognised(tmp_path, codec):
    path = tmp_path / "a.txt"
    path.write_bytes("\ufeffone".encode(codec) if codec == "utf-16-be" else "one".encode(codec))
    with pytest.raises(ValueError, match="iconv -f UTF-16 -t UTF-8"):
        read(path)
