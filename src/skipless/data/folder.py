"""The folder being prepared: who may write to it, what was asked for, and how far it has come."""

import json
import os
import re
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

from skipless.data.store import MANIFEST, VERIFIED, Section, TokenizerNote, read_manifest
from skipless.data.tokenizer import MODEL_FILE
from skipless.files import (
    FolderLock,
    Journal,
    append_line,
    check_folder,
    mapping,
    read_json,
    read_lines,
    reading,
    remove_parts,
    write_json,
    write_whole,
    writing,
)
from skipless.schema import build

OPTIONS, JOURNAL = "options.json", "sections.jsonl"
SHARD = re.compile(r"(train|valid)-(\d{5,}|images|labels)\.bin")
_FORCE = "start over with --force"
Found = TypeVar("Found")


class Folder:
    """A folder under preparation. Its own files are the only ones it ever deletes."""

    def __init__(self, path: Path):
        self.path = path

    @contextmanager
    def locked(self) -> Generator[None]:
        """Keep a second `skipless prepare` out; the lock ends with the process, however that ends."""
        check_folder(self.path, OPTIONS)
        with writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            lock = FolderLock(self.path, "preparing", "wait for it, or use another --out")
        with lock:
            yield

    def claim(self, options: dict, force: bool) -> None:
        """Make the folder that of these options, or refuse: tokens by other options, or a folder of something else."""
        path = self.path / OPTIONS
        there = self._options() if path.is_file() and not force else options
        if there.keys() != options.keys():
            raise ValueError(
                f"{path} is not of `skipless prepare`, or of another version: give --out a folder of its own"
            )
        differing = [] if force else _differing(there, options)
        if differing and (self.complete() or self.sections()):
            raise ValueError(
                f"{self.path} was prepared with other options ({'; '.join(differing)}): use another --out, or --force "
                "to start over"
            )
        if differing or force:
            self._clear()
        remove_parts(self.path)
        if self.complete():  # an earlier run may have been killed between its manifest and its journal's end
            (self.path / JOURNAL).unlink(missing_ok=True)
        if not path.is_file():
            write_json(path, options, indent=1)

    def _options(self) -> dict:
        return read_json(self.path / OPTIONS, mapping, _FORCE)

    def _journal(self) -> list[dict]:
        return _read(self.path / JOURNAL, read_lines)

    def _own(self, file: Path) -> bool:
        return bool(SHARD.fullmatch(file.name)) or file.name in (OPTIONS, JOURNAL, MANIFEST, VERIFIED, MODEL_FILE)

    def _clear(self) -> None:
        def last(file: Path) -> int:
            return 0 if file.name == MANIFEST else 2 if file.name == OPTIONS else 1

        for file in sorted(self.path.iterdir(), key=last):
            if self._own(file):
                file.unlink()

    def complete(self) -> bool:
        """Whether the manifest is there."""
        return (self.path / MANIFEST).is_file()

    def reopen(self) -> None:
        """Turn a finished folder back into an unfinished one, for shards that have gone missing."""
        manifest = read_manifest(self.path)
        lines = [{"tokenizer": asdict(manifest.tokenizer)}, *(section.to_json() for section in manifest.sections)]
        Journal(self.path / JOURNAL).replace(lines)
        (self.path / MANIFEST).unlink()

    def tokenizer(self) -> TokenizerNote | None:
        """The description of the tokenizer that made the finished sections, if there are any."""
        lines = self._journal()
        note = "the note of a tokenizer"
        return (
            _read(self.path / JOURNAL, lambda _: build(TokenizerNote, lines[0]["tokenizer"], note)) if lines else None
        )

    def sections(self) -> dict[int, Section]:
        """Finished sections by index, whether or not their files are still there."""
        lines = [line for line in self._journal() if "index" in line]
        found = _read(self.path / JOURNAL, lambda _: [Section.from_json(line) for line in lines])
        return {section.index: section for section in found}

    def present(self, section: Section) -> bool:
        """Whether all of the section's shards are there."""
        return all((self.path / shard.file).is_file() for shard in section.shards)

    def note_tokenizer(self, described: TokenizerNote) -> None:
        """Start the journal, before the tokenizer's file is there: one that is there without a note is not ours."""
        append_line(self.path / JOURNAL, {"tokenizer": asdict(described)})

    def note_section(self, section: Section) -> None:
        """Add a finished section to the journal."""
        append_line(self.path / JOURNAL, section.to_json())

    def finish(self, manifest: str) -> None:
        """Write the manifest; the journal has done its work."""
        write_whole(self.path / MANIFEST, manifest.encode())
        os.unlink(self.path / JOURNAL)


def _read(path: Path, reader: Callable[[Path], Found]) -> Found:
    with reading(path, _FORCE):
        return reader(path)


def _differing(there: dict, here: dict) -> list[str]:
    there, here = _flat(there), _flat(json.loads(json.dumps(here)))
    return [
        f"{key}: {there.get(key)} there, {here.get(key)} now"
        for key in sorted(there.keys() | here.keys())
        if there.get(key) != here.get(key)
    ]


def _flat(values: dict, prefix: str = "") -> dict:
    found = {}
    for key, value in values.items():
        if isinstance(value, dict):
            found |= _flat(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = value
    return found
