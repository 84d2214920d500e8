"""A peer's rank that saves with `async_save` of torch.distributed.checkpoint to an S3 store.

torch reads and writes stores through fsspec. This file system sends the same files with the standard library,
so that the image needs no further package.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import (
    FileSystemBase,
    FileSystemReader,
    FileSystemWriter,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save

from benchmarks.recovery.peers.s3 import download, upload
from benchmarks.recovery.peers.training import name_latest, rank, train

_FOLDER = f"/tmp/dcp-{os.getpid()}"
"""Files on their way to or from the store."""


class S3FileSystem(FileSystemBase):
    """The files of a checkpoint as objects. A path is the key of an object."""

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        local = self._local(path)
        if "r" in mode and not download(os.fspath(path), local):
            raise FileNotFoundError(f"the store has no object {path}")
        with open(local, mode) as stream:
            yield stream
        if "r" in mode:
            os.unlink(local)
        elif not os.fspath(path).endswith(".tmp"):  # such a file is renamed next
            self._send(path)

    def concat_path(self, path: str | os.PathLike[str], suffix: str) -> str:
        return os.path.join(path, suffix)

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        os.rename(self._local(path), self._local(new_path))
        self._send(new_path)

    def init_path(self, path: str | os.PathLike[str]) -> str:
        return os.fspath(path)

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        os.makedirs(_FOLDER, exist_ok=True)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True

    def exists(self, path: str | os.PathLike[str]) -> bool:
        return False  # a file of an earlier attempt is overwritten

    def rm_file(self, path: str | os.PathLike[str]) -> None:
        raise NotImplementedError("no file exists, so torch removes none")

    def _local(self, path: str | os.PathLike[str]) -> str:
        return os.path.join(_FOLDER, os.fspath(path).replace("/", "_"))

    def _send(self, path: str | os.PathLike[str]) -> None:
        local = self._local(path)
        upload(local, os.fspath(path))
        os.unlink(local)


def _in_store(files: Any, step: int) -> Any:
    """Return this reader or writer of files after it has been moved to the store."""
    files.fs, files.path = S3FileSystem(), str(step)
    return files


class DcpAsync:
    def __init__(self) -> None:
        self._saving: Any = None
        self._group: Any = None
        os.makedirs(_FOLDER, exist_ok=True)

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Wait for the save before, and begin this one. It returns when the state is copied."""
        if self._saving is not None:
            self._saving.result()
        if self._group is None:  # collectives of a save must not meet those of the training
            self._group = dist.new_group(backend="gloo")
        writer = _in_store(FileSystemWriter(str(step)), step)
        self._saving = async_save(state, storage_writer=writer, process_group=self._group)
        if rank() == 0:
            threading.Thread(
                target=_name_when_saved, args=(self._saving, step), daemon=True
            ).start()

    def load(self, step: int, state: dict[str, Any]) -> None:
        load(state, storage_reader=_in_store(FileSystemReader(str(step)), step))


def _name_when_saved(saving: Any, step: int) -> None:
    saving.result()
    name_latest(step)


if __name__ == "__main__":
    train(DcpAsync())
