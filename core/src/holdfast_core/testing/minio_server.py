"""A real MinIO server for tests: its own process, port and directory, gone when the test ends.

For tests only. The object tier is never tested against a mock: what matters is what servers do.
"""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import tempfile
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

from minio import Minio

from holdfast_core.clock import SystemClock
from holdfast_core.contract import StoreConfig
from holdfast_core.errors import UnavailableError
from holdfast_core.testing.settings import TESTBED_DIR_VARIABLE, find_tool, testbed_dir
from holdfast_core.tiers.s3_client import S3Client, S3Request
from holdfast_core.tiers.s3_credentials import Keys, StaticCredentials
from holdfast_core.tiers.s3_http import Timeouts

ACCESS_KEY = "holdfast-test"
SECRET_KEY = "holdfast-test-secret"
REGION = "us-east-1"
START_SECONDS = 30.0


class ServerUnavailableError(AssertionError):
    """The server could not be started; a test that needs it fails with these words."""


class MinioServer:
    """`with MinioServer() as server:` gives a running server with one bucket."""

    def __init__(self, bucket: str = "holdfast") -> None:
        self.bucket = bucket
        self._port = 0
        self._root: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self._port}"

    @property
    def credentials(self) -> StaticCredentials:
        return StaticCredentials(Keys(ACCESS_KEY, SECRET_KEY))

    @property
    def data_dir(self) -> Path:
        """Where the server keeps objects; valid while it runs."""
        if self._root is None:
            raise ServerUnavailableError("MinIO was not started")
        return self._root / "data"

    def config(self, prefix: str, *, endpoint: str | None = None) -> StoreConfig:
        """A store on this server, or on a proxy in front of it."""
        return StoreConfig(
            endpoint=endpoint or self.endpoint,
            secure=False,
            bucket=self.bucket,
            prefix=prefix,
            region=REGION,
            part_size_mib=5,
        )

    def admin(self) -> Minio:
        """A client of another make than ours, for preparing and for looking."""
        return Minio(
            self.endpoint,
            access_key=ACCESS_KEY,
            secret_key=SECRET_KEY,
            secure=False,
            region=REGION,
        )

    def start(self) -> None:
        """Raises ServerUnavailableError."""
        binary = find_tool("minio")
        if binary is None:
            raise ServerUnavailableError(
                "no minio executable: looked in PATH and in "
                f"{testbed_dir() / 'bin'} ({TESTBED_DIR_VARIABLE} moves it); "
                "`make cluster-up` builds it"
            )
        self._root = Path(tempfile.mkdtemp(prefix="holdfast-minio-"))
        self._port = free_port()
        self._launch(binary)

    def kill(self) -> None:
        """SIGKILL, as a node loss would; data and port stay for `revive`."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()

    def revive(self) -> None:
        """Start again on the same port and data."""
        binary = find_tool("minio")
        if binary is None:
            raise ServerUnavailableError("the minio executable is gone")
        self._launch(binary)

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

    def _launch(self, binary: Path) -> None:
        root = self.data_dir.parent
        with (root / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    str(binary),
                    "server",
                    "--quiet",
                    "--address",
                    self.endpoint,
                    "--config-dir",
                    str(root / "config"),
                    str(root / "data"),
                ],
                env={
                    "HOME": str(root),
                    "MINIO_ROOT_USER": ACCESS_KEY,
                    "MINIO_ROOT_PASSWORD": SECRET_KEY,
                    "MINIO_BROWSER": "off",
                    "MINIO_UPDATE": "off",
                    "MINIO_CI_CD": "on",
                },
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self._await_ready(self._process, root / "log")

    def _await_ready(self, process: subprocess.Popen[bytes], log: Path) -> None:
        # Its health check says ready before requests are served, so ask for what tests need.
        clock, pause = SystemClock(), threading.Event()
        client = S3Client(self.config(""), self.credentials, timeouts=Timeouts(2.0, 2.0))
        deadline = clock.monotonic() + START_SECONDS
        said = "nothing"
        while clock.monotonic() < deadline and process.poll() is None:
            try:
                failure = client.send(S3Request("PUT")).failure
                if failure is None or failure.code == "BucketAlreadyOwnedByYou":
                    client.close()
                    return
                said = failure.words
            except UnavailableError as error:
                said = str(error)
            pause.wait(0.05)
        state = "exited" if process.poll() is not None else f"not ready after {START_SECONDS:g} s"
        words = log.read_text(errors="replace")[-2000:]
        raise ServerUnavailableError(
            f"MinIO on {self.endpoint}: {state}; it said {said}; its log: {words}"
        )


def free_port() -> int:
    """A loopback port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
