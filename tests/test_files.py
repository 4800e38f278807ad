"""Files: whole or not there, journals, locks, and what is said when the disk is full."""

import errno
import json
import os
import shutil

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from skipless.files import (
    HASHES,
    ChangedError,
    FolderLock,
    Journal,
    WholeFile,
    append_line,
    check_hashes,
    is_part,
    leads_inside,
    mapping,
    parse_json,
    part_of,
    read_json,
    read_lines,
    reading,
    remove_parts,
    write_hashes,
    write_json,
    write_whole,
    writing,
)

BAD_JSON = {
    b"": "not JSON",
    b"{": "not JSON",
    b"\xff": "not JSON",
    b"[" * 100_000: "more than 64 levels",
    b"[" * 70 + b"]" * 70: "more than 64 levels",
    b'{"a":' * 900 + b"1" + b"}" * 900: "more than 64 levels",
    b'{"a": 1, "b": {"c": 1, "c": 2}}': "the key 'c' is there twice",
    b"9" * 400: "has 400 digits",
    b"9" * 5000: "has 5000 digits",
}


@pytest.mark.parametrize("text", BAD_JSON, ids=lambda text: text[:12].decode(errors="replace"))
def test_json_beyond_its_bounds_is_refused_by_the_file_s_name(tmp_path, text):
    (tmp_path / "a.json").write_bytes(text)
    with pytest.raises(ValueError, match=rf"a\.json is damaged .*{BAD_JSON[text]}.*; make it again"):
        read_json(tmp_path / "a.json", mapping, "make it again")


def test_json_within_its_bounds_is_json(tmp_path):
    values = {"a": [1, -(1 << 63), (1 << 63) - 1, 1e300, None, True, "x"], "b": {"c": []}}
    (tmp_path / "a.json").write_text(json.dumps(values))
    assert read_json(tmp_path / "a.json", mapping) == values
    assert parse_json("[" * 64 + "]" * 64)
    assert isinstance(parse_json(str(10**30)), float)
    (tmp_path / "a.json").write_text("[]")
    with pytest.raises(ValueError, match=r"a\.json is damaged .*a list where there should be an object"):
        read_json(tmp_path / "a.json", mapping)


def test_an_error_names_its_file_once_and_one_that_cannot_be_read_is_said_to_be_there(tmp_path, monkeypatch):
    file = tmp_path / "a.json"
    with pytest.raises(ValueError) as error, reading(tmp_path), reading(file, "mend it"):  # noqa: PT011
        raise KeyError("b")
    assert str(error.value) == f"{file} is damaged or of another version ('b' is missing); mend it"
    with pytest.raises(FileNotFoundError, match=r"a\.json cannot be read \(No such file or directory\)"):
        read_json(file, mapping)
    with pytest.raises(IsADirectoryError, match=r"cannot be read \(Is a directory\)"):
        read_json(tmp_path, mapping)

    def forbidden(*_):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(file))

    monkeypatch.setattr("pathlib.Path.open", forbidden)
    with pytest.raises(PermissionError, match=r"a\.json cannot be read \(Permission denied\)"):
        read_json(file, mapping)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_file_has_its_name_only_when_it_is_whole(tmp_path):
    file = WholeFile(tmp_path / "a.bin")
    assert names(tmp_path) == []
    file.write(b"one ")
    assert [is_part(path) for path in tmp_path.iterdir()] == [True]
    file.write(b"two")
    file.finish()
    assert names(tmp_path) == ["a.bin"]
    assert (tmp_path / "a.bin").read_bytes() == b"one two"
    other = WholeFile(tmp_path / "a.bin")
    other.write(b"three")
    other.abandon()
    assert (names(tmp_path), (tmp_path / "a.bin").read_bytes()) == (["a.bin"], b"one two")


def test_only_what_we_made_is_taken_for_a_leftover(tmp_path):
    """Names that others give to partial files, and names near to ours."""
    foreign = [
        "movie.part",
        "a.crdownload",
        ".a.swp",
        "a~",
        ".part",
        "a.skipless-0123abcd",
        ".a.skipless-xyz",
        ".a.tmp",
    ]
    for name in foreign:
        (tmp_path / name).write_text("precious")
    (tmp_path / "folder.part").mkdir()
    part_of(tmp_path / "a").write_text("half")
    part_of(tmp_path / "b").mkdir()
    remove_parts(tmp_path)
    assert names(tmp_path) == sorted([*foreign, "folder.part"])


@pytest.fixture
def hashed(tmp_path):
    """Two files and their hashes."""
    (tmp_path / "a.json").write_text("{}")
    (tmp_path / "b.bin").write_bytes(bytes(range(200)))
    write_hashes(tmp_path, ["a.json", "b.bin"])
    return tmp_path


def test_files_as_written_are_verified(hashed):
    assert check_hashes(hashed)
    (hashed / "notes.txt").write_text("not listed")
    assert check_hashes(hashed, "*.json")
    assert not check_hashes(hashed, "notes.txt")
    assert not check_hashes(hashed / "..")


@given(position=st.integers(0, 10**6), bit=st.integers(0, 7), cut=st.booleans(), name=st.sampled_from(["a", "b", "h"]))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_damage_to_a_listed_file_or_to_the_list_is_named(hashed, position, bit, cut, name):
    path = hashed / {"a": "a.json", "b": "b.bin", "h": HASHES}[name]
    data = path.read_bytes()
    at = position % len(data)
    damaged = data[:at] if cut else data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]
    if name == "h" and not cut and _means(damaged) == _means(data):
        return  # a space of JSON's layout, say: the list is as it was
    path.write_bytes(damaged)
    try:
        with pytest.raises(ChangedError, match=path.name.replace(".", r"\.")):
            check_hashes(hashed)
    finally:
        path.write_bytes(data)


def _means(data: bytes) -> object:
    try:
        return json.loads(data)
    except ValueError:
        return None


def test_a_file_that_is_gone_is_named(hashed):
    (hashed / "b.bin").unlink()
    with pytest.raises(ChangedError, match=r"b\.bin is missing, and .*hashes\.json lists it: put a copy back"):
        check_hashes(hashed)
    assert check_hashes(hashed, "a*")


@pytest.mark.parametrize("name", ["../a.json", "/etc/passwd", "", ".", "x/../../a.json"])
def test_a_list_from_elsewhere_reads_nothing_outside(hashed, name):
    assert not leads_inside(name)
    write_json(hashed / HASHES, json.loads((hashed / HASHES).read_text().replace("a.json", name)))
    with pytest.raises(ChangedError, match=r"hashes\.json is damaged"):
        check_hashes(hashed)


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    write_json(tmp_path / "a.json", {"a": 1})

    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(
        OSError, match=r"a\.json could not be written \(No space .*\): free some space, and run the same"
    ):
        write_whole(tmp_path / "a.json", b"new")
    assert (names(tmp_path), json.loads((tmp_path / "a.json").read_bytes())) == (["a.json"], {"a": 1})


def test_a_symlink_stays_and_its_target_is_written(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "target")
    write_whole(tmp_path / "link", b"text")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_bytes() == b"text"


def test_what_is_said_of_a_full_disk_and_of_a_folder_without_permission(tmp_path):
    path = tmp_path / "a.bin"
    full = OSError(errno.ENOSPC, "No space left on device")
    with (
        pytest.raises(OSError, match=r"\): takes 3\.0 GB; .* free: delete one, and go on$"),
        writing(path, "go on", room="delete one", needed=3 * 10**9),
        writing(path),  # explained twice, said once
    ):
        raise full
    with (
        pytest.raises(OSError, match=r"\(Permission denied\): check the folder and its permissions, and"),
        writing(path),
    ):
        raise PermissionError(errno.EACCES, "Permission denied")


def test_a_journal_goes_on_after_half_a_line(tmp_path):
    path = tmp_path / "log.jsonl"
    assert read_lines(path) == []
    append_line(path, {"step": 1})
    with path.open("ab") as file:
        file.write(b'{"step": 2, "lo')
    before = path.read_bytes()
    assert (read_lines(path), path.read_bytes()) == ([{"step": 1}], before), "reading changes nothing"
    append_line(path, {"step": 3, "loss": float("inf")})
    assert read_lines(path) == [{"step": 1}, {"step": 3, "loss": float("inf")}]


@pytest.mark.parametrize("harm", ["file", "folder", "replaced"])
def test_a_journal_that_is_deleted_meanwhile_takes_no_more_lines(tmp_path, harm):
    journal = Journal(tmp_path / "run" / "log.jsonl")
    journal.path.parent.mkdir()
    journal.add({"step": 1})
    if harm == "folder":
        shutil.rmtree(tmp_path / "run")
    else:
        journal.path.unlink()
    if harm == "replaced":
        journal.path.write_text("")
    for act in (journal.sync, lambda: journal.add({"step": 2})):
        with pytest.raises(OSError, match="deleted or replaced by another program"):
            act()


def test_a_journal_is_replaced_and_goes_on(tmp_path):
    journal = Journal(tmp_path / "log.jsonl")
    for step in range(3):
        journal.add({"step": step})
    journal.replace([{"step": 0}])
    journal.add({"step": 9})
    journal.sync()
    journal.close()
    assert read_lines(journal.path) == [{"step": 0}, {"step": 9}]
    unchanged = journal.path.stat().st_mtime_ns
    journal.replace([{"step": 0}, {"step": 9}])
    assert journal.path.stat().st_mtime_ns == unchanged


@pytest.mark.parametrize(("line", "complaint"), [("[1]", "line 2 is not an object"), ("{", "line 2: ")])
def test_a_damaged_line_is_named(tmp_path, line, complaint):
    (tmp_path / "log.jsonl").write_text(f'{{"step": 1}}\n{line}\n')
    with pytest.raises(ValueError, match=complaint):
        read_lines(tmp_path / "log.jsonl")


def test_one_writer_per_folder(tmp_path):
    with FolderLock(tmp_path, "writing to") as lock:
        with pytest.raises(ValueError, match=rf"process {os.getpid()} on .* is writing to .*: wait for it"):
            FolderLock(tmp_path, "writing to")
        lock.release()
        FolderLock(tmp_path, "writing to").release()
    assert (tmp_path / ".lock").read_text() == ""
