"""A real server of a store for tests, with a process, port and directory that are removed when the test ends.

For tests only. The object tier is never tested against a mock, because the behaviour of real servers
matters. The servers are in minio_server, azurite_server and tests/integration/object_store/conftest.py.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import threading
from abc import ABC, abstractmethod
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Self

from minio import Minio
from tests.support.hang import HANG_SECONDS
from tests.support.servers.credentials import StaticCredentials
from tests.support.servers.ports import free_port
from tests.support.servers.settings import TESTBED_DIR_VARIABLE, find_tool, testbed_dir

from holdfast_core.clock import SystemClock
from holdfast_core.contract import StoreConfig
from holdfast_core.errors import UnavailableError
from holdfast_core.store.s3.client import S3Client, S3Request
from holdfast_core.store.s3.credentials import Keys
from holdfast_core.store.s3.http import Timeouts

ACCESS_KEY = "holdfast-test"
SECRET_KEY = "holdfast-test-secret"
REGION = "us-east-1"
START_SECONDS = HANG_SECONDS


class ServerUnavailableError(AssertionError):
    """The server could not be started or administered. A test that needs it fails with this message."""


class LocalServer(ABC):
    """Base of the servers: `with MinioServer() as server:` gives a running server with one bucket."""

    tool: ClassVar[str]
    """Name of the executable."""

    @abstractmethod
    def command(self) -> list[str]:
        """Return the arguments of the executable.

        It must listen on `endpoint` and keep objects in `data_dir`.
        """

    @abstractmethod
    def environment(self) -> dict[str, str]:
        """Return the environment of the process, without HOME."""

    @abstractmethod
    def create_bucket(self) -> str:
        """Create the bucket. Return "", or why the server did not do it yet."""

    def __init__(self, bucket: str = "holdfast") -> None:
        self.bucket = bucket
        self._port = 0
        self._root: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self._port}"

    @property
    def data_dir(self) -> Path:
        """Directory in which the server keeps objects while it runs."""
        if self._root is None:
            raise ServerUnavailableError(f"{self.tool} was not started")
        return self._root / "data"

    def cpu_seconds(self) -> float:
        """Return the CPU seconds, user and system, that the process has used."""
        if self._process is None:
            raise ServerUnavailableError(f"{self.tool} was not started")
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def start(self) -> None:
        """Start the server with a bucket. Raises ServerUnavailableError."""
        binary = self._binary()
        self._root = Path(tempfile.mkdtemp(prefix=f"holdfast-{self.tool}-"))
        self.data_dir.mkdir()
        self._port = free_port()
        self._launch(binary)

    def kill(self) -> None:
        """Send SIGKILL to the server, as a node loss would. Data and port stay for `revive`."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()

    def revive(self) -> None:
        """Start again on the same port and data."""
        self._launch(self._binary())

    def stop(self) -> None:
        self.kill()
        self._process = None
        if self._root is not None:
            shutil.rmtree(self._root, ignore_errors=True)
            self._root = None

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def _binary(self) -> Path:
        binary = find_tool(self.tool)
        if binary is None:
            raise ServerUnavailableError(
                f"no {self.tool} executable: looked in PATH and in "
                f"{testbed_dir() / 'bin'} ({TESTBED_DIR_VARIABLE} moves it); `make tools` builds it"
            )
        return binary

    def _launch(self, binary: Path) -> None:
        root = self.data_dir.parent
        with (root / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [str(binary), *self.command()],
                env={"HOME": str(root), **self.environment()},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self._await_ready(self._process, root / "log")

    def _await_ready(self, process: subprocess.Popen[bytes], log: Path) -> None:
        # A health check may succeed before the server accepts requests, so create the bucket, which tests
        # need.
        clock, pause = SystemClock(), threading.Event()
        deadline = clock.monotonic() + START_SECONDS
        answer = "nothing"
        while clock.monotonic() < deadline and process.poll() is None:
            answer = self.create_bucket()
            if not answer:
                return
            pause.wait(0.05)
        state = "exited" if process.poll() is not None else f"not ready after {START_SECONDS:g} s"
        text = log.read_text(errors="replace")[-2000:]
        raise ServerUnavailableError(
            f"{self.tool} on {self.endpoint}: {state}; its answer was {answer}; its log: {text}"
        )


class StoreServer(LocalServer):
    """Base of the S3 servers."""

    @abstractmethod
    def add_user(self, keys: Keys, prefix: str) -> None:
        """Grant `keys` the rights that Holdfast needs below `prefix`, and no others."""

    @abstractmethod
    def remove_user(self, keys: Keys) -> None:
        """Revoke `keys`. The server refuses them from the next request on."""

    @property
    def credentials(self) -> StaticCredentials:
        return StaticCredentials(Keys(ACCESS_KEY, SECRET_KEY))

    def config(self, prefix: str, *, endpoint: str | None = None) -> StoreConfig:
        """Return the configuration of a store on this server, or on a proxy in front of it."""
        return StoreConfig(
            endpoint=endpoint or self.endpoint,
            secure=False,
            bucket=self.bucket,
            prefix=prefix,
            region=REGION,
            part_size_mib=5,
        )

    def admin(self) -> Minio:
        """Return a client that is independent of Holdfast's, to prepare and inspect the store."""
        return Minio(
            self.endpoint,
            access_key=ACCESS_KEY,
            secret_key=SECRET_KEY,
            secure=False,
            region=REGION,
        )

    def create_bucket(self) -> str:
        client = S3Client(self.config(""), self.credentials, timeouts=Timeouts(2.0, 2.0))
        try:
            failure = client.send(S3Request("PUT")).failure
        except UnavailableError as error:
            return str(error)
        finally:
            client.close()
        if failure is None or failure.code == "BucketAlreadyOwnedByYou":
            return ""
        return failure.text


def prefix_policy(bucket: str, prefix: str, principal: dict[str, object]) -> dict[str, object]:
    """Return a policy with the least rights that Holdfast needs below `prefix`.

    It includes the right to list unfinished uploads, which no store limits to a prefix. Without that right
    an interrupted upload starts again from the beginning.
    """
    objects = [
        "s3:PutObject",
        "s3:GetObject",
        "s3:DeleteObject",
        "s3:AbortMultipartUpload",
        "s3:ListMultipartUploadParts",
    ]
    return {
        "Version": "2012-10-17",
        "Statement": [
            {
                "Effect": "Allow",
                **principal,
                "Action": objects,
                "Resource": [f"arn:aws:s3:::{bucket}/{prefix}/*"],
            },
            {
                "Effect": "Allow",
                **principal,
                "Action": ["s3:ListBucket"],
                "Resource": [f"arn:aws:s3:::{bucket}"],
                "Condition": {"StringLike": {"s3:prefix": [f"{prefix}/*"]}},
            },
            {
                "Effect": "Allow",
                **principal,
                "Action": ["s3:ListBucketMultipartUploads"],
                "Resource": [f"arn:aws:s3:::{bucket}"],
            },
        ],
    }
