"""Files: whole or not there, journals, locks, and what is said when the disk is full."""

import errno
import json
import os

import pytest

from skipless.files import FolderLock, Journal, WholeFile, append_line, read_lines, write_json, write_whole, writing


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_file_has_its_name_only_when_it_is_whole(tmp_path):
    file = WholeFile(tmp_path / "a.bin")
    assert names(tmp_path) == []
    file.write(b"one ")
    assert [name.endswith(".part") for name in names(tmp_path)] == [True]
    file.write(b"two")
    file.finish()
    assert names(tmp_path) == ["a.bin"]
    assert (tmp_path / "a.bin").read_bytes() == b"one two"
    other = WholeFile(tmp_path / "a.bin")
    other.write(b"three")
    other.abandon()
    assert (names(tmp_path), (tmp_path / "a.bin").read_bytes()) == (["a.bin"], b"one two")


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
