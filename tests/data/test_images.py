"""Pictures to a prepared folder and back; damaged pictures and damaged folders are refused in one sentence."""

import io
import json
import os
import shutil
import struct
import sys
import tarfile
import zlib
from pathlib import Path

import numpy as np
import pytest
from tests.pictures import CLASSES, packed, striped

from skipless.console import Progress
from skipless.data import image_files
from skipless.data.image_files import prepare_images
from skipless.data.image_store import ImageManifest, ImageStore, read_images
from skipless.data.prepare import Preparation, prepare
from skipless.data.store import fingerprint, holds_images, read_manifest
from skipless.data.tokenizer import Bytes
from skipless.theory import kernels

Image = pytest.importorskip("PIL.Image")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return striped(tmp_path / "source", train=5, test=2)


def all_pixels(store: ImageStore) -> np.ndarray:
    rows = np.empty((len(store), *store.shape), np.uint8)
    store.gather(np.arange(len(store)), rows)
    return rows


def test_pixels_labels_and_statistics_are_those_of_the_files(source: Path, tmp_path: Path) -> None:
    manifest = prepare_images(source, tmp_path / "data")
    assert (manifest.side, manifest.channels, manifest.classes) == (16, 3, CLASSES)
    for split, part, count in (("train", "train", 10), ("valid", "test", 4)):
        store = ImageStore(tmp_path / "data", split)
        files = [
            (path, label) for label, name in enumerate(CLASSES) for path in sorted((source / part / name).iterdir())
        ]
        assert len(store) == count == len(files)
        assert store.labels.tolist() == [label for _, label in files]
        wanted = np.stack([np.asarray(Image.open(path)).transpose(2, 0, 1) for path, _ in files])
        np.testing.assert_array_equal(all_pixels(store), wanted)
    pixels = all_pixels(ImageStore(tmp_path / "data")).astype(np.float64)
    np.testing.assert_allclose(manifest.mean, pixels.mean(axis=(0, 2, 3)), atol=1e-4)
    np.testing.assert_allclose(manifest.std, pixels.std(axis=(0, 2, 3)), atol=1e-4)
    assert ImageManifest.from_json(json.loads(manifest.to_json())) == manifest == read_images(tmp_path / "data")


@pytest.mark.parametrize("kind", ["one tar", "a tar for each part", "a tar of classes"])
def test_a_tar_gives_the_same_as_its_folder(source: Path, tmp_path: Path, kind: str) -> None:
    if kind == "one tar":
        other = packed(source, "", tmp_path / "all.tar.gz", "w:gz")
    else:
        other = tmp_path / "tars"
        other.mkdir()
        packed(source, "test", other / "test.tar.xz")
        with tarfile.open(other / "train.tar", "w") as tar:
            tar.add(source / "train", arcname="." if kind == "a tar of classes" else "train")
    manifests = [prepare_images(each, tmp_path / str(number)) for number, each in enumerate((source, other))]
    for split in ("train", "valid"):
        one, two = (ImageStore(tmp_path / str(number), split) for number in range(2))
        order = [
            np.lexsort((all_pixels(store).reshape(len(store), -1).T.sum(axis=0), store.labels)) for store in (one, two)
        ]
        np.testing.assert_array_equal(all_pixels(one)[order[0]], all_pixels(two)[order[1]])
    assert manifests[0].mean == manifests[1].mean


def test_a_finished_folder_is_checked_and_left_and_another_source_refused(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "data"
    prepare_images(source, out)
    before, times = fingerprint(out), (out / "train-images.bin").stat().st_mtime_ns
    prepare_images(source, out)
    assert (out / "train-images.bin").stat().st_mtime_ns == times
    (out / "valid-labels.bin").unlink()
    prepare_images(source, out)
    assert fingerprint(out) == before
    (source / "train" / "along" / "new.png").write_bytes((source / "train" / "along" / "000.png").read_bytes())
    with pytest.raises(ValueError, match="was prepared with other options"):
        prepare_images(source, out)
    assert prepare_images(source, out, force=True).splits["train"].images == 11


def test_a_preparation_that_breaks_off_leaves_no_folder_that_looks_complete(source, tmp_path, monkeypatch) -> None:
    decode, seen = image_files.decode, []

    def breaks_off(*arguments):
        seen.append(0)
        if len(seen) == 7:
            raise KeyboardInterrupt
        return decode(*arguments)

    monkeypatch.setattr(image_files, "decode", breaks_off)
    with pytest.raises(KeyboardInterrupt):
        prepare_images(source, tmp_path / "data")
    assert not [file for file in (tmp_path / "data").iterdir() if file.suffix == ".bin" or "skipless-" in file.name]
    with pytest.raises(ValueError, match="is not a folder of prepared images"):
        ImageStore(tmp_path / "data")
    monkeypatch.undo()
    assert prepare_images(source, tmp_path / "data").splits["train"].images == 10


def picture(size: tuple[int, int] = (16, 16), mode: str = "RGB", kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.new(mode, size).save(file, kind)
    return file.getvalue()


def noisy(kind: str) -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (16, 16, 3), np.uint8)).save(file, kind)
    return file.getvalue()


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def declared(side: int) -> bytes:
    """A PNG of a few bytes that says it is large."""
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(bytes(100))) + chunk(b"IEND", b"")


def with_text(size: int) -> bytes:
    """A good PNG with a note that unpacks to so many bytes."""
    good = noisy("PNG")
    return good[:33] + chunk(b"zTXt", b"note\0\0" + zlib.compress(bytes(size), 1)) + good[33:]


def animation() -> bytes:
    file = io.BytesIO()
    frames = [Image.new("RGB", (16, 16), (60 * number, 0, 0)) for number in range(3)]
    frames[0].save(file, "PNG", save_all=True, append_images=frames[1:])
    return file.getvalue()


BAD = {
    "text": (b"no picture", "neither JPEG nor PNG"),
    "empty": (b"", "neither JPEG nor PNG"),
    "cut short": (noisy("PNG")[:400], "is no picture that can be used"),
    "a JPEG cut short": (noisy("JPEG")[:700], "is no picture that can be used"),
    "wide": (
        picture((16, 8)),
        "it is 16 × 8; pictures must be squares of at most 1024, as ImageOps.fit of Pillow cuts",
    ),
    "of another size": (picture((8, 8)), "it is 8 × 8, and those before it 16 × 16; all must be of one size"),
    "huge": (picture((2048, 2048), "1"), "it is 2048 × 2048; pictures must be squares of at most 1024"),
    "a bomb": (picture((20_000, 10_000), "1"), "exceeds limit"),
    "of 16 bits": (picture(mode="I;16"), "its pixels are of kind I;16"),
    "a GIF": (picture(kind="GIF"), "neither JPEG nor PNG"),
    "a declared giant": (declared(60_000), "exceeds limit"),
    "an animation": (animation(), "it is an animation of 3 pictures, and one is wanted"),
    "a bomb of text": (with_text(200_000_000), "Decompressed data too large"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_picture_that_cannot_be_used_is_named(source: Path, tmp_path: Path, name: str) -> None:
    data, words = BAD[name]
    bad = source / "train" / "along" / "bad.png"
    bad.write_bytes(data)
    with pytest.raises(ValueError, match=words) as found:
        prepare_images(source, tmp_path / "data")
    assert str(found.value).startswith(str(bad))
    assert "\n" not in str(found.value)
    assert not (tmp_path / "data" / "manifest.json").exists()


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "1", "CMYK"])
def test_other_kinds_of_pixels_become_rgb(source: Path, tmp_path: Path, mode: str) -> None:
    kind = "JPEG" if mode == "CMYK" else "PNG"
    (source / "train" / "along" / "other.jpg").write_bytes(picture(mode=mode, kind=kind))
    assert prepare_images(source, tmp_path / "data").splits["train"].images == 11


def test_sources_that_are_none(source: Path, tmp_path: Path) -> None:
    def refused(words: str, of: Path = source) -> None:
        with pytest.raises(ValueError, match=words):
            prepare_images(of, tmp_path / "data", force=True)

    refused("does not exist", tmp_path / "nosuch")
    (tmp_path / "text").mkdir()
    refused("holds nothing, and no train folder", tmp_path / "text")
    (tmp_path / "file.tar").write_bytes(b"no tar")
    refused("file.tar is no tar file, or damaged", tmp_path / "file.tar")
    whole = packed(source, "", tmp_path / "all.tar.xz").read_bytes()
    (tmp_path / "cut.tar.xz").write_bytes(whole[: len(whole) // 2])
    refused("cut.tar.xz is no tar file, or damaged", tmp_path / "cut.tar.xz")
    (source / "test" / "third").mkdir()
    (source / "test" / "third" / "a.png").write_bytes(picture())
    refused("test has the class 'third'; train must have every class")
    (source / "test" / "third" / "a.png").unlink()
    (source / "valid").mkdir()
    (source / "valid" / "along").mkdir()
    (source / "valid" / "along" / "a.png").write_bytes(picture())
    refused("there are both test and valid")
    shutil.rmtree(source / "valid")
    shutil.rmtree(source / "train" / "across")
    refused("train has 1 classes")


def test_classes_that_would_be_lost_or_not_shown_are_refused(source: Path, tmp_path: Path) -> None:
    def refused(words: str) -> None:
        with pytest.raises(ValueError, match=words):
            prepare_images(source, tmp_path / "data", force=True)

    third = source / "train" / "third"
    third.mkdir()
    refused("third is a class without pictures")
    (third / "a.webp").write_bytes(b"a kind that is not read")
    refused(r"third is a class without pictures \(\.jpg, \.jpeg, \.png\): put some into it, or take the folder away")
    (third / "a.png").write_bytes(noisy("PNG"))
    for name in ("red \x1b[31m", "two\nlines", os.fsdecode(b"\xff\xfe")):
        third.rename(source / "train" / name)
        refused("has a name that cannot be printed: rename its folder")
        (source / "train" / name).rename(third)
    packed(source, "train", source / "train.tar")
    refused("holds train and train.tar, which are the same part: take one away")


@pytest.mark.parametrize("part", ["", "train"])
def test_a_class_without_pictures_in_a_tar_is_refused(source: Path, tmp_path: Path, part: str) -> None:
    """In a tar of all parts, and in one of train alone, where the tar itself is the part."""
    third = source / "train" / "third"
    third.mkdir()
    (source / "test" / "third").mkdir()
    kept = tmp_path / "kept"
    kept.mkdir()
    tar = packed(source, part, kept / f"{part or 'all'}.tar.xz")
    with pytest.raises(ValueError, match=r"train/third is a class without pictures .*: put some into it, or take"):
        prepare_images(kept if part else tar, tmp_path / "out")
    third.rmdir()
    packed(source, part, tar)
    assert len(prepare_images(kept if part else tar, tmp_path / "out").classes) == 2


def test_links_are_followed_and_what_is_no_picture_is_counted(source: Path, tmp_path: Path) -> None:
    """A class may be a link to a folder elsewhere, as sets are put together; no file waits for a writer."""
    (source / "train" / "along").rename(tmp_path / "elsewhere")
    (source / "train" / "along").symlink_to(tmp_path / "elsewhere")
    os.mkfifo(source / "train" / "across" / "fifo.png")
    (source / "train" / "across" / "._000.png").write_bytes(b"of macOS")
    (source / "train" / "across" / "deeper").mkdir()
    (source / "train" / "across" / "deeper" / "a.png").write_bytes(picture())
    (source / "train" / "across" / os.fsdecode(b"\xff.png")).write_bytes(noisy("PNG"))
    said: list[str] = []
    progress = Progress(quiet=True)
    progress.say = said.append
    manifest = prepare_images(source, tmp_path / "data", progress=progress)
    assert manifest.splits["train"].images == 11
    assert said[0].startswith(
        "left out 3 files that are no pictures of a class (PART/CLASS/FILE with .jpg, .jpeg, .png)"
    )
    (tmp_path / "elsewhere" / "000.png").unlink()
    with pytest.raises(ValueError, match="was prepared with other options"):  # the link's files count too
        prepare_images(source, tmp_path / "data")
    (source / "train" / "along" / "gone.png").symlink_to("nowhere")
    with pytest.raises(OSError, match=r"gone\.png cannot be read"):
        prepare_images(source, tmp_path / "data", force=True)


def test_a_source_without_validation_says_so(source: Path, tmp_path: Path) -> None:
    shutil.rmtree(source / "test")
    said: list[str] = []
    progress = Progress(quiet=True)
    progress.say = said.append
    assert list(prepare_images(source, tmp_path / "data", progress=progress).splits) == ["train"]
    assert said[0].startswith("no pictures for validation")


def test_a_tar_writes_nowhere_else(source: Path, tmp_path: Path) -> None:
    """Links, devices and names that climb are members like others that are no pictures: counted, never unpacked."""
    with tarfile.open(tmp_path / "train.tar", "w") as tar:
        tar.add(source / "train", arcname="train")
        for name, kind in (("train/along/link.png", tarfile.SYMTYPE), ("train/along/fifo.png", tarfile.FIFOTYPE)):
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, "/etc/passwd"
            tar.addfile(member)
        member = tarfile.TarInfo("../../train/along/climbs.png")
        member.size = len(picture())
        tar.addfile(member, io.BytesIO(picture()))
    assert prepare_images(tmp_path / "train.tar", tmp_path / "data").splits["train"].images == 11
    assert not (tmp_path.parent / "train").exists()


def test_without_pillow_the_extra_is_named(source: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ValueError, match=r"needs Pillow, which is not installed: pip install 'skipless\[vision\]'"):
        prepare_images(source, tmp_path / "data")


def damage(path: Path, change) -> None:
    path.write_bytes(change(path.read_bytes()))


@pytest.mark.parametrize(
    ("file", "change", "words"),
    [
        ("train-images.bin", lambda data: data[:-1], "bytes instead of"),
        ("train-images.bin", lambda data: b"\xff" + data[1:], "is damaged"),
        ("train-labels.bin", lambda data: b"\x09" + data[1:], "is damaged"),
        ("manifest.json", lambda data: data.replace(b'"side": 16', b'"side": 8'), "does not fit them"),
        ("manifest.json", lambda data: data.replace(b'"along"', b'"across"'), "has 2 classes"),
        ("manifest.json", lambda data: data[:-9], "not JSON"),
    ],
)
def test_a_damaged_folder_is_refused(source: Path, tmp_path: Path, file: str, change, words: str) -> None:
    prepare_images(source, tmp_path / "data")
    damage(tmp_path / "data" / file, change)
    with pytest.raises(ValueError, match=words) as found:
        ImageStore(tmp_path / "data")
    assert file in str(found.value)


def test_a_file_that_is_cut_while_it_is_read(source: Path, tmp_path: Path) -> None:
    prepare_images(source, tmp_path / "data")
    store = ImageStore(tmp_path / "data")
    with (tmp_path / "data" / "train-images.bin").open("r+b") as file:
        file.truncate(100)
    with pytest.raises(ValueError, match="was cut short while it was in use"):
        all_pixels(store)


def test_tokens_and_images_are_not_taken_for_each_other(source: Path, tmp_path: Path) -> None:
    prepare_images(source, tmp_path / "images")
    (tmp_path / "text.txt").write_text("some text\n" * 50)
    prepare(Preparation(str(tmp_path / "text.txt"), tokenizer=Bytes()), tmp_path / "tokens", workers=1)
    assert [holds_images(tmp_path / name) for name in ("images", "tokens", "nosuch")] == [True, False, False]
    with pytest.raises(ValueError, match="is of images, and tokens are asked for"):
        read_manifest(tmp_path / "images")
    with pytest.raises(ValueError, match="is of tokens, and images are asked for"):
        read_images(tmp_path / "tokens")


def test_the_repeat_rate_is_half_of_how_alike_patches_are(source: Path, tmp_path: Path) -> None:
    """By the kernels of the images' own patches."""
    manifest = prepare_images(source, tmp_path / "data")
    store = ImageStore(tmp_path / "data")
    mean, std = (np.array(each)[:, None, None] for each in (manifest.mean, manifest.std))
    images = (all_pixels(store) - mean) / std
    products, norms = [], []
    for image in images:
        patches = np.stack([image[:, y : y + 4, x : x + 4].ravel() for y in range(0, 16, 4) for x in range(0, 16, 4)])
        kernel = kernels.of_activations(patches)
        products.append((kernel.sum() - np.trace(kernel)) / (16 * 15))
        norms.append(np.trace(kernel) / 16)
    assert store.repeat_rate(4) == pytest.approx(np.mean(products) / np.mean(norms) / 2, rel=1e-9)
    assert store.repeat_rate(16) == 0.0
