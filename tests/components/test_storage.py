"""Shared storage: a mounted disk, or whatever fsspec knows. S3 itself is in tests/pipelines/test_faults.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from components.errors import StorageError
from components.storage import Storage, joined


@pytest.fixture(params=["path", "file", "fsspec"])
def storage(request, tmp_path: Path) -> Storage:
    root = tmp_path / "shared"
    return Storage({"path": str(root), "file": f"file://{root}", "fsspec": f"local://{root}"}[request.param])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "local"
    (folder / "inner").mkdir(parents=True)
    (folder / "a.txt").write_text("a")
    (folder / "inner" / "b.txt").write_text("b")
    return folder


def test_what_is_put_can_be_got_listed_and_removed(storage, folder, tmp_path):
    assert storage.names() == []
    assert not storage.get("x", tmp_path / "nothing")
    (storage / "run").put(folder, "x")
    (storage / "run").put(folder / "a.txt", "single.txt")
    assert (storage / "run").names() == ["single.txt", "x"]
    assert (storage / "run").get("x", tmp_path / "back")
    assert (tmp_path / "back" / "inner" / "b.txt").read_text() == "b"
    assert storage.get("run/single.txt", tmp_path / "single")
    assert (tmp_path / "single").read_text() == "a"
    (storage / "run").remove("x")
    (storage / "run").remove_file("single.txt")
    (storage / "run").remove_file("single.txt")
    assert (storage / "run").names() == []
    (storage / "run").remove("")
    (storage / "run").remove("")
    assert storage.names() == []


def test_a_file_is_written_over(storage, folder):
    storage.put(folder / "a.txt", "a.txt")
    (folder / "a.txt").write_text("again")
    storage.put(folder / "a.txt", "a.txt")
    assert storage.get("a.txt", folder / "back.txt")
    assert (folder / "back.txt").read_text() == "again"


def test_the_file_that_says_it_is_whole_comes_last(storage, folder, monkeypatch):
    import pyarrow.fs

    copied: list[str] = []
    copy = pyarrow.fs.copy_files

    def noted(source: str, *arguments: object) -> None:
        copied.append(Path(source).name)
        copy(source, *arguments)

    monkeypatch.setattr(pyarrow.fs, "copy_files", noted)
    storage.put(folder, "x", last=("a.txt",))
    assert copied == ["b.txt", "a.txt"]


def test_a_store_that_cannot_be_opened_or_written_is_an_error(tmp_path, folder):
    with pytest.raises(StorageError, match=r"resources\.storage_path: nonsense://x cannot be opened"):
        Storage("nonsense://x")
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot be written"):
        Storage(str(tmp_path / "file")).put(folder, "x")


def test_a_uris_query_stays_at_its_end():
    assert joined("s3://bucket/runs/?region=x", "a/b") == "s3://bucket/runs/a/b?region=x"
    assert joined("/mnt/runs", "a") == "/mnt/runs/a"
