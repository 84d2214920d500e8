"""A fresh Debian has no certificates of authorities. The scripts that download then say what to install."""

from __future__ import annotations

import os
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from tests.support.servers.pki import Authority

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def untrusted(tmp_path: Path) -> Iterator[str]:
    """URL of a server whose authority is unknown to this machine."""
    certificate, key = Authority().leaf("127.0.0.1")
    (tmp_path / "server.pem").write_bytes(certificate + key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "server.pem")
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"https://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.mark.parametrize(
    ("script", "variable"), [("install_uv.py", "PIP_INDEX_URL"), ("install_go.py", "GOPROXY")]
)
def test_an_unknown_authority_is_explained(
    tmp_path: Path, untrusted: str, script: str, variable: str
) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / script), str(tmp_path / "folder")],
        env={**os.environ, variable: untrusted, "PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "apt-get install ca-certificates" in done.stderr
    assert not (tmp_path / "folder").exists()
