"""Peers that upload a file to an S3-compatible store, with the defaults of each."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol


class Uploader(Protocol):
    def prepare(self, step: int) -> Path:
        """Make the file that `upload` sends."""
        ...

    def upload(self, step: int) -> None:
        """Return when the store has the file."""
        ...

    def remove(self, step: int) -> None: ...


class _Uploads:
    """Uploads one file, under a new key each time."""

    def __init__(
        self,
        directory: Path,
        mib: int,
        upload: Callable[[Path, str], object],
        remove: Callable[[str], object],
    ) -> None:
        self._path = directory / "source"
        self._path.write_bytes(os.urandom(1 << 20) * mib)
        self._upload = upload
        self._remove = remove

    def prepare(self, step: int) -> Path:
        return self._path

    def upload(self, step: int) -> None:
        self._upload(self._path, f"peer/{step}")

    def remove(self, step: int) -> None:
        self._remove(f"peer/{step}")


def _boto3_client(store: dict[str, str]) -> Any:
    import boto3

    return boto3.client(
        "s3",
        endpoint_url=f"http://{store['endpoint']}",
        aws_access_key_id=store["access_key"],
        aws_secret_access_key=store["secret_key"],
        region_name=store["region"],
    )


def _remover(store: dict[str, str]) -> Callable[[str], object]:
    client = _boto3_client(store)
    return lambda key: client.delete_object(Bucket=store["bucket"], Key=key)


def boto3_default(store: dict[str, str], directory: Path, mib: int) -> Uploader:
    client = _boto3_client(store)
    return _Uploads(
        directory,
        mib,
        lambda path, key: client.upload_file(str(path), store["bucket"], key),
        _remover(store),
    )


def minio_py(store: dict[str, str], directory: Path, mib: int) -> Uploader:
    from minio import Minio

    client = Minio(
        endpoint=store["endpoint"],
        access_key=store["access_key"],
        secret_key=store["secret_key"],
        secure=False,
        region=store["region"],
    )
    return _Uploads(
        directory,
        mib,
        lambda path, key: client.fput_object(
            bucket_name=store["bucket"], object_name=key, file_path=str(path)
        ),
        _remover(store),
    )


def s3torchconnector(store: dict[str, str], directory: Path, mib: int) -> Uploader:
    os.environ.update(
        AWS_ACCESS_KEY_ID=store["access_key"], AWS_SECRET_ACCESS_KEY=store["secret_key"]
    )
    from s3torchconnector import S3Checkpoint, S3ClientConfig

    checkpoint = S3Checkpoint(
        region=store["region"],
        endpoint=f"http://{store['endpoint']}",
        s3client_config=S3ClientConfig(force_path_style=True),
    )
    buffer = bytearray(8 << 20)

    def upload(path: Path, key: str) -> None:
        with (
            checkpoint.writer(f"s3://{store['bucket']}/{key}") as writer,
            path.open("rb", buffering=0) as file,
        ):
            while count := file.readinto(buffer):
                writer.write(memoryview(buffer)[:count])

    return _Uploads(directory, mib, upload, _remover(store))


UPLOADERS: dict[str, Callable[[dict[str, str], Path, int], Uploader]] = {
    "boto3": boto3_default,
    "minio-py": minio_py,
    "s3torchconnector": s3torchconnector,
}
