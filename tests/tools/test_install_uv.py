"""`make` on a machine that has neither uv nor pip, against an index of the test's own."""

from __future__ import annotations

import hashlib
import io
import json
import os
import platform
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from tools.install_uv import TAGS, VERSION

ROOT = Path(__file__).resolve().parents[2]
TAG = TAGS[(platform.system(), platform.machine())]
WHEEL = f"uv-{VERSION}-py3-none-{TAG}.whl"
COMMANDS = ("bash", "sh", "env", "make", "cat")
"""All that a fresh machine is expected to have, besides python3."""


def wheel() -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        archive.writestr(f"uv-{VERSION}.data/scripts/uv", "#!/bin/sh\necho this is uv\n")
    return data.getvalue()


class Index(ThreadingHTTPServer):
    """A package index with one wheel; `served` is what a download of it gets."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.named = wheel()
        self.served = self.named
        self.downloads = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/simple"


class Handler(BaseHTTPRequestHandler):
    server: Index

    def do_GET(self) -> None:
        if self.path == "/simple/uv/":
            digest = hashlib.sha256(self.server.named).hexdigest()
            other = {"filename": "uv-0.0.1-py3-none-any.whl", "url": "x", "hashes": {}}
            ours = {"filename": WHEEL, "url": "../../w", "hashes": {"sha256": digest}}
            self._reply(json.dumps({"files": [other, ours]}).encode())
        elif self.path == "/w":
            self.server.downloads += 1
            self._reply(self.server.served)
        else:
            self.send_error(404)

    def _reply(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        return


@pytest.fixture
def index() -> Iterator[Index]:
    with Index() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()


def make(tmp_path: Path, index: Index) -> subprocess.CompletedProcess[str]:
    """`make prerequisites`. The python3 there has no pip: it is that of a bare environment."""
    commands = tmp_path / "bin"
    if not commands.exists():
        bare = tmp_path / "bare"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(bare)], check=True)
        commands.mkdir()
        for name in COMMANDS:
            found = shutil.which(name)
            assert found is not None
            (commands / name).symlink_to(found)
        (commands / "python3").symlink_to(bare / "bin/python3")
    return subprocess.run(
        ["make", "--no-print-directory", "prerequisites", f"UV_FOLDER={tmp_path / 'tools/uv'}"],
        cwd=ROOT,
        env={"PATH": str(commands), "PIP_INDEX_URL": index.url, "HOME": os.environ["HOME"]},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.fault("A machine has neither uv nor pip")
def test_make_installs_uv_once(tmp_path: Path, index: Index) -> None:
    first = make(tmp_path, index)
    assert first.returncode == 0, first.stderr
    binary = tmp_path / "tools/uv/bin/uv"
    assert subprocess.check_output([str(binary)], text=True) == "this is uv\n"
    second = make(tmp_path, index)
    assert second.returncode == 0, second.stderr
    assert index.downloads == 1


@pytest.mark.fault("A download of uv is not what the index names")
def test_a_file_with_another_digest_is_not_installed(tmp_path: Path, index: Index) -> None:
    index.served = b"something else"
    done = make(tmp_path, index)
    assert done.returncode != 0
    assert "does not have the SHA-256" in done.stderr
    assert "https://docs.astral.sh/uv/" in done.stderr
    assert not (tmp_path / "tools/uv").exists()
