"""A folder anywhere that pyarrow or fsspec reaches: a mounted disk, S3-compatible storage, GCS, Azure.

Where workers do not share the run's folder, what one of them writes reaches the others and the driver through it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

import pyarrow
import pyarrow.fs as fs

from components.errors import StorageError

log = logging.getLogger(__name__)

_TROUBLE = (OSError, pyarrow.ArrowException)


class Storage:
    """A folder of files in some file system. Names are relative to it, with slashes.

    Args:
        uri: A path, or a URI as `ray.train.RunConfig(storage_path=...)` takes it: `s3://bucket/prefix`, with
            `?endpoint_override=...` for a store of one's own, `gs://`, `abfs://`, or any protocol that fsspec knows.
            Credentials come from where the file system looks for them, never from here.

    Raises:
        StorageError: There is no such file system, or it cannot be reached.
    """

    def __init__(self, uri: str) -> None:
        self.uri = uri
        self._filesystem, root = _open(uri)
        self._root = PurePosixPath(root)

    def __truediv__(self, name: str) -> Storage:
        """The folder `name` in this one."""
        inner = object.__new__(Storage)
        inner.uri = joined(self.uri, name)
        inner._filesystem, inner._root = self._filesystem, self._root / name
        return inner

    def put(self, local: Path, name: str, last: Sequence[str] = ()) -> None:
        """Copies a file, or a folder's files, writing over what is there.

        Args:
            local: The file or folder.
            name: Its name here.
            last: Files of the folder to copy after all others: who sees them finds the rest.

        Raises:
            StorageError: It cannot be written.
        """
        target = self._root / name
        files = [local] if local.is_file() else sorted(path for path in local.rglob("*") if path.is_file())
        files.sort(key=lambda path: path.name in last)
        try:
            for file in files:
                where = target if local.is_file() else target / file.relative_to(local).as_posix()
                self._filesystem.create_dir(str(where.parent), recursive=True)
                fs.copy_files(str(file), str(where), fs.LocalFileSystem(), self._filesystem)
        except _TROUBLE as problem:
            raise StorageError(f"{self.uri}/{name} cannot be written: {problem}") from problem

    def get(self, name: str, local: Path) -> bool:
        """Copies a file or folder from here; false where there is none.

        Raises:
            StorageError: It cannot be read.
        """
        source = str(self._root / name)
        try:
            info = self._filesystem.get_file_info(source)
            if info.type == fs.FileType.NotFound:
                return False
            local.parent.mkdir(parents=True, exist_ok=True)
            if info.type == fs.FileType.Directory:
                local.mkdir(exist_ok=True)
            fs.copy_files(source, str(local), self._filesystem, fs.LocalFileSystem())
        except _TROUBLE as problem:
            raise StorageError(f"{self.uri}/{name} cannot be read: {problem}") from problem
        return True

    def names(self, folder: str = "") -> list[str]:
        """What a folder holds, sorted; nothing where there is no such folder.

        Raises:
            StorageError: It cannot be read.
        """
        selector = fs.FileSelector(str(self._root / folder), allow_not_found=True)
        try:
            return sorted(info.base_name for info in self._filesystem.get_file_info(selector))
        except _TROUBLE as problem:
            raise StorageError(f"{self.uri}/{folder} cannot be read: {problem}") from problem

    def remove_file(self, name: str) -> None:
        """Removes a file, if it is there.

        Raises:
            StorageError: It cannot be removed.
        """
        path = str(self._root / name)
        try:
            if self._filesystem.get_file_info(path).type == fs.FileType.File:
                self._filesystem.delete_file(path)
        except _TROUBLE as problem:
            raise StorageError(f"{self.uri}/{name} cannot be removed: {problem}") from problem

    def remove(self, name: str) -> None:
        """Removes a folder and what is in it, if it is there.

        Raises:
            StorageError: It cannot be removed.
        """
        try:
            self._filesystem.delete_dir_contents(str(self._root / name), missing_dir_ok=True)
            if self._filesystem.get_file_info(str(self._root / name)).type == fs.FileType.Directory:
                self._filesystem.delete_dir(str(self._root / name))
        except _TROUBLE as problem:
            raise StorageError(f"{self.uri}/{name} cannot be removed: {problem}") from problem


def joined(uri: str, name: str) -> str:
    """The path or URI of `name` in a folder; a URI's query stays at its end."""
    head, mark, query = uri.partition("?")
    return f"{head.rstrip('/')}/{name}{mark}{query}"


def _open(uri: str) -> tuple[fs.FileSystem, str]:
    if "://" not in uri:
        return fs.LocalFileSystem(), str(Path(uri).expanduser().resolve())
    try:
        return fs.FileSystem.from_uri(uri)
    except pyarrow.ArrowException:
        pass  # a scheme that pyarrow does not know, or was built without: fsspec's plug-ins may
    except OSError as problem:
        raise StorageError(f"resources.storage_path: {uri} cannot be opened: {problem}") from problem
    import fsspec

    try:
        filesystem, root = fsspec.core.url_to_fs(uri)
    except (ValueError, ImportError, OSError) as problem:
        raise StorageError(f"resources.storage_path: {uri} cannot be opened: {problem}") from problem
    return fs.PyFileSystem(fs.FSSpecHandler(filesystem)), root
