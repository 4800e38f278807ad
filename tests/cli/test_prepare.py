"""What a user meets: each thing that can be put right is one line, exit code 2, no traceback."""

import lzma
import os
import re
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest

from skipless.cli import main

COMMAND = [sys.executable, "-c", "from skipless.cli import main; main()", "prepare"]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """140 kB of real text."""
    path = tmp_path_factory.mktemp("text") / "json.txt"
    library = Path(sysconfig.get_path("stdlib"))
    path.write_bytes(
        b"\n\n\n".join((library / name).read_bytes() for name in ("argparse.py", "json/decoder.py")) + b"\n"
    )
    return path


def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    """The one line with which the command refuses."""
    monkeypatch.setattr(sys, "argv", ["skipless", "prepare", *map(str, arguments)])
    capsys.readouterr()
    with pytest.raises(SystemExit) as caught:
        main()
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("training a tokenizer")]
    assert caught.value.code == 2, lines
    assert len(lines) == 1, lines
    assert lines[0].startswith("skipless: ")
    return lines[0]


def test_prepare_and_again(text, tmp_path):
    arguments = [*COMMAND, str(text), "--out", str(tmp_path / "out"), "--vocab", "400"]
    first = subprocess.run(arguments, check=True, capture_output=True, text=True)
    assert first.stdout.strip() == str(tmp_path / "out")
    assert re.search(r"train: [\d,]+ tokens in [\d,]+ documents, .* r = 0\.\d+", first.stderr)
    again = subprocess.run(arguments, check=True, capture_output=True, text=True)
    assert "nothing to do" in again.stderr


def test_one_document_is_not_called_documents(tmp_path, monkeypatch, capsys):
    (tmp_path / "a.txt").write_text("the signal survives " * 200)
    monkeypatch.setattr(
        sys, "argv", ["skipless", "prepare", str(tmp_path / "a.txt"), "--bytes", "--out", str(tmp_path / "out")]
    )
    with pytest.raises(SystemExit):
        main()
    assert "train: 4,001 tokens in 1 document, 0.0 MB" in capsys.readouterr().err


def test_errors_are_one_line_with_a_remedy(text, tmp_path, monkeypatch, capsys):
    def says(*arguments: str | Path) -> str:
        return refused(monkeypatch, capsys, *arguments, "--out", tmp_path / "out")

    bad = tmp_path / "bad.txt"
    bad.write_bytes(b"caf\xe9 au lait")
    assert "byte 3 (0xe9) is not valid UTF-8" in says(bad, "--bytes", "--force")
    empty = tmp_path / "empty.txt"
    empty.touch()
    assert "no text" in says(empty, "--bytes", "--force")
    assert "no text" in says(empty, "--vocab", "300", "--force")
    assert "more than this text allows: use --vocab" in says(text, "--force")
    assert "no corpus" in says(tmp_path / "nowhere.txt")
    (tmp_path / "a.doc").touch()
    assert "suffix must be one of" in says(tmp_path / "a.doc")
    cut = tmp_path / "cut.txt.xz"
    cut.write_bytes(lzma.compress(text.read_bytes())[:-20])
    assert "cut.txt.xz is damaged or cut short" in says(cut, "--bytes", "--force")
    assert "add --download" in says("c4")
    assert "exclude each other" in says(text, "--bytes", "--tokenizer", bad)
    assert "--vocab is for a tokenizer that is trained, and --bytes trains none" in says(
        text, "--bytes", "--vocab", "9"
    )
    assert "--sample-mb is for a tokenizer that is" in says(text, "--tokenizer", bad, "--sample-mb", "1")
    assert "is not a SentencePiece model" in says(text, "--tokenizer", bad, "--force")
    assert "byte fallback alone needs" in says(text, "--vocab", "3")
    assert "use 'error' or 'replace'" in says(text, "--bytes", "--invalid-utf8", "ignore")
    assert "give 1 to 1024 threads" in says(text, "--bytes", "--workers", "0")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read and write everything")
def test_permissions(text, tmp_path, monkeypatch, capsys):
    closed = tmp_path / "closed.txt"
    closed.write_text("text")
    closed.chmod(0)
    assert "closed.txt cannot be read (Permission denied)" in refused(monkeypatch, capsys, closed, "--bytes")
    tmp_path.chmod(0o500)
    assert "could not be written" in refused(monkeypatch, capsys, text, "--bytes", "--out", tmp_path / "new" / "out")
    tmp_path.chmod(0o700)


def test_damage_and_other_options(text, tmp_path, monkeypatch, capsys):
    options = [text, "--bytes", "--shard-mb", ".01", "--out", tmp_path / "out"]
    monkeypatch.setattr(sys, "argv", ["skipless", "prepare", *map(str, options)])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 0
    assert "shard_mb: 0.01 there, 64.0 now" in refused(monkeypatch, capsys, text, "--bytes", "--out", tmp_path / "out")
    shard = tmp_path / "out" / "train-00000.bin"
    shard.write_bytes(shard.read_bytes()[:-1] + b"\1")
    assert f"{shard} is damaged" in refused(monkeypatch, capsys, *options)
    shard.write_bytes(b"")
    assert f"{shard} has 0 bytes" in refused(monkeypatch, capsys, *options)


@pytest.mark.skipif(sys.platform == "win32", reason="limits are POSIX")
def test_no_room_on_the_disk_and_room_again(text, tmp_path):
    def limit() -> None:
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))

    arguments = [*COMMAND, str(text), "--bytes", "--out", str(tmp_path / "out")]
    full = subprocess.run(arguments, check=False, capture_output=True, text=True, preexec_fn=limit)
    assert full.returncode == 2, full.stderr
    assert re.fullmatch(r"skipless: .*train-00000.bin could not be written \(.*\): free some space, .*\n", full.stderr)
    assert not list((tmp_path / "out").glob(".*.skipless-*"))
    subprocess.run(arguments, check=True, capture_output=True)


@pytest.mark.skipif(sys.platform == "win32", reason="signals are POSIX")
@pytest.mark.parametrize("options", [["--vocab", "2000"], ["--bytes", "--shard-mb", ".01"]])
def test_ctrl_c_leaves_a_folder_to_resume(tmp_path, options):
    """While the tokenizer trains, and while shards are written."""
    arguments = [*COMMAND, "stdlib", "--out", str(tmp_path / "out"), *options]
    run = subprocess.Popen(
        arguments,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a runner in the background ignores it
    )
    awaited = "options.json" if "--vocab" in options else "train-00003.bin"
    while not (tmp_path / "out" / awaited).exists():
        assert run.poll() is None
        time.sleep(0.01)
    run.send_signal(signal.SIGINT)
    begun = time.monotonic()
    _, complaint = run.communicate()
    assert time.monotonic() - begun < 10
    assert run.returncode == 130, complaint
    assert complaint.splitlines()[-1].endswith("are kept: run the same command to resume")
    assert "Traceback" not in complaint
    assert not list((tmp_path / "out").glob(".*.skipless-*"))


def test_help_and_import_need_no_torch():
    code = "import sys; sys.argv = ['skipless', 'prepare', '--help']\nfrom skipless.cli import main\ntry: main()\n"
    code += "except SystemExit: print('torch' in sys.modules, 'sentencepiece' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert shown.stdout.splitlines()[-1] == "False False"
    code = "import sys, skipless.data.prepare; print('torch' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert shown.stdout.strip() == "False"
