"""What comes in from outside: archives that would lead out, grow, link; folders with links; limits."""

from __future__ import annotations

import io
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from serving.errors import ConfigInvalid, ExportInvalid
from serving.release.sources import Limits, fetch


def tarred(path: Path, *members: tarfile.TarInfo | tuple[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for member in members:
            if isinstance(member, tarfile.TarInfo):
                archive.addfile(member)
                continue
            info = tarfile.TarInfo(member[0])
            info.size = len(member[1])
            archive.addfile(info, io.BytesIO(member[1]))
    return path


def zipped(path: Path, *members: tuple[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members:
            archive.writestr(name, content)
    return path


def link(name: str, target: str, kind: bytes = tarfile.SYMTYPE) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


GRAPH = ("m/saved_model.pb", b"graph")


@pytest.mark.parametrize("pack", [tarred, zipped])
def test_an_archive_is_unpacked(pack: Callable[..., Path], tmp_path: Path) -> None:
    archive = pack(tmp_path / "a", GRAPH, ("m/variables/v.index", b"i"))
    (tmp_path / "to").mkdir()
    folder = fetch(str(archive), tmp_path / "to")
    assert (folder / "saved_model.pb").read_bytes() == b"graph"
    assert (folder / "variables" / "v.index").read_bytes() == b"i"


@pytest.mark.parametrize("pack", [tarred, zipped])
@pytest.mark.parametrize("name", ["../out", "/out", "a/../../out", "a\\..\\out"])
def test_nothing_is_written_outside(pack: Callable[..., Path], name: str, tmp_path: Path) -> None:
    archive = pack(tmp_path / "a", GRAPH, (name, b"x"))
    (tmp_path / "to").mkdir()
    with pytest.raises(ExportInvalid, match="outside of its folder"):
        fetch(str(archive), tmp_path / "to")
    assert {p.name for p in tmp_path.iterdir()} == {"a", "to"}


@pytest.mark.parametrize(
    "member",
    [
        link("l", "/etc/passwd"),
        link("l", "m/saved_model.pb", tarfile.LNKTYPE),
        link("f", "", tarfile.FIFOTYPE),
    ],
    ids=["symlink", "hard link", "fifo"],
)
def test_links_and_devices_are_refused(member: tarfile.TarInfo, tmp_path: Path) -> None:
    archive = tarred(tmp_path / "a", GRAPH, member)
    (tmp_path / "to").mkdir()
    with pytest.raises(ExportInvalid, match="a link or a device"):
        fetch(str(archive), tmp_path / "to")


def test_a_link_in_a_zip_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a", "w") as archive:
        archive.writestr(*GRAPH)
        info = zipfile.ZipInfo("l")
        info.external_attr = 0o120777 << 16
        archive.writestr(info, "/etc/passwd")
    (tmp_path / "to").mkdir()
    with pytest.raises(ExportInvalid, match="a link or a device"):
        fetch(str(tmp_path / "a"), tmp_path / "to")


@pytest.mark.parametrize("pack", [tarred, zipped])
def test_a_bomb_stops_at_the_limit(pack: Callable[..., Path], tmp_path: Path) -> None:
    archive = pack(tmp_path / "a", GRAPH, ("m/zeros", bytes(50 << 20)))
    assert archive.stat().st_size < 1 << 20
    (tmp_path / "to").mkdir()
    with pytest.raises(ExportInvalid, match="larger than 1048576 bytes"):
        fetch(str(archive), tmp_path / "to", Limits(bytes=1 << 20))
    assert sum(p.stat().st_size for p in (tmp_path / "to").rglob("*") if p.is_file()) <= 2 << 20


@pytest.mark.parametrize("pack", [tarred, zipped])
def test_too_many_files_and_names_that_come_twice(pack: Callable[..., Path], tmp_path: Path) -> None:
    many = pack(tmp_path / "a", GRAPH, *((f"m/{i}", b"") for i in range(20)))
    (tmp_path / "to").mkdir()
    with pytest.raises(ExportInvalid, match="more than 10 files"):
        fetch(str(many), tmp_path / "to", Limits(files=10))
    if pack is tarred:
        twice = pack(tmp_path / "b", GRAPH, GRAPH)
        (tmp_path / "to2").mkdir()
        with pytest.raises(ExportInvalid, match="twice"):
            fetch(str(twice), tmp_path / "to2")


@pytest.mark.parametrize("content", [b"", b"not an archive at all", b"\x1f\x8b\x08\x00 cut"])
def test_what_is_no_archive(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(content)
    (tmp_path / "to").mkdir()
    with pytest.raises(ExportInvalid):
        fetch(str(tmp_path / "a"), tmp_path / "to")


def test_an_archive_that_is_cut(tmp_path: Path) -> None:
    whole = tarred(tmp_path / "a", ("m/saved_model.pb", bytes(range(256)) * 4000)).read_bytes()
    (tmp_path / "a").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "to").mkdir()
    with pytest.raises(ExportInvalid, match="can't be unpacked"):
        fetch(str(tmp_path / "a"), tmp_path / "to")


def test_folders(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "saved_model.pb").write_bytes(b"g")
    (source / "l").symlink_to("/etc/passwd")
    (tmp_path / "to").mkdir()
    with pytest.raises(ExportInvalid, match="is a link"):
        fetch(str(source), tmp_path / "to")
    (source / "l").unlink()
    (source / "2").mkdir()
    (source / "2" / "saved_model.pb").write_bytes(b"g")
    (tmp_path / "to2").mkdir()
    with pytest.raises(ExportInvalid, match="holds 2 SavedModels"):
        fetch(str(source), tmp_path / "to2")
    for place in ("nobody://x/y", "memory://a::zip://b"):
        (tmp_path / place[:6]).mkdir()
        with pytest.raises(ConfigInvalid):
            fetch(place, tmp_path / place[:6])
