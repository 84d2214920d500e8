"""Go is installed on a machine that has none, or an older one, from a module proxy of the test's own."""

from __future__ import annotations

import hashlib
import io
import os
import re
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from tests.support.servers.ports import closed_port
from tools import install_go
from tools.install_go import MINIMUM, VERSION, NotInstalledError, install, target

ROOT = Path(__file__).resolve().parents[2]
NAME = f"v0.0.1-go{VERSION}.{target()}"


def archive() -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as found:
        folder = f"golang.org/toolchain@{NAME}"
        found.writestr(f"{folder}/bin/go", "#!/bin/sh\necho this is go\n")
        found.writestr(f"{folder}/pkg/tool/any/compile", "#!/bin/sh\n")
        found.writestr(f"{folder}/src/_go.mod", "module std\n")
    return data.getvalue()


class Proxy(ThreadingHTTPServer):
    """A module proxy with one archive."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.archive = archive()
        self.downloads = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Proxy

    def do_GET(self) -> None:
        if self.path != f"/golang.org/toolchain/@v/{NAME}.zip":
            self.send_error(404)
            return
        self.server.downloads += 1
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.server.archive)))
        self.end_headers()
        self.wfile.write(self.server.archive)

    def log_message(self, format: str, *arguments: object) -> None:
        return


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    with Proxy() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        monkeypatch.setenv("GOPROXY", f"{server.url},direct")
        yield server
        server.shutdown()


def digests(proxy: Proxy) -> dict[str, str]:
    return {target(): hashlib.sha256(proxy.archive).hexdigest()}


def run_script(folder: Path, commands: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "tools/install_go.py"), str(folder)],
        env={**os.environ, "PATH": str(commands)},
        capture_output=True,
        text=True,
        check=False,
    )


def machine_with_go(tmp_path: Path, version: str) -> Path:
    """Return a folder for the PATH whose `go` says that it has this version."""
    commands = tmp_path / "commands"
    commands.mkdir()
    program = commands / "go"
    program.write_text(f"#!/bin/sh\necho go version {version} linux/amd64\n")
    program.chmod(0o755)
    return commands


def test_the_toolchain_is_downloaded_and_runs(tmp_path: Path, proxy: Proxy) -> None:
    folder = tmp_path / "tools/go"
    folder.parent.mkdir()
    install(folder, digests(proxy))
    assert subprocess.check_output([str(folder / "bin/go")], text=True) == "this is go\n"
    assert os.access(folder / "pkg/tool/any/compile", os.X_OK)
    assert (folder / "src/go.mod").read_text() == "module std\n"
    assert [p.name for p in folder.parent.iterdir()] == ["go"]


def test_an_interrupted_installation_is_replaced(tmp_path: Path, proxy: Proxy) -> None:
    folder = tmp_path / "go"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin/half").write_text("")
    install(folder, digests(proxy))
    assert (folder / "bin/go").exists()
    assert not (folder / "bin/half").exists()


@pytest.mark.fault("A download of Go is not the pinned archive")
def test_an_archive_with_another_digest_is_not_installed(tmp_path: Path, proxy: Proxy) -> None:
    wanted = digests(proxy)
    proxy.archive += b"more"
    with pytest.raises(NotInstalledError, match="does not have the SHA-256"):
        install(tmp_path / "go", wanted)
    assert not (tmp_path / "go").exists()


def test_a_platform_without_an_archive_is_named(tmp_path: Path, proxy: Proxy) -> None:
    with pytest.raises(NotInstalledError, match=target()):
        install(tmp_path / "go", {"plan9-386": "0"})
    assert proxy.downloads == 0


@pytest.mark.parametrize("version", [f"go{VERSION}", "go1.27", "go2.0.1"])
def test_a_go_that_is_new_enough_is_used(tmp_path: Path, proxy: Proxy, version: str) -> None:
    done = run_script(tmp_path / "go", machine_with_go(tmp_path, version))
    assert done.returncode == 0, done.stderr
    assert proxy.downloads == 0
    assert not (tmp_path / "go").exists()


@pytest.mark.fault("A machine has no Go, or one that is too old for the test bed")
@pytest.mark.parametrize("version", ["go1.19.8", "go1.26", "nonsense"])
def test_an_older_go_is_not_used(tmp_path: Path, proxy: Proxy, version: str) -> None:
    done = run_script(tmp_path / "go", machine_with_go(tmp_path, version))
    assert proxy.downloads == 1
    # The archive of the test does not have the digest in the script.
    assert done.returncode == 1
    assert "does not have the SHA-256" in done.stderr
    assert "https://go.dev/dl/" in done.stderr


def test_a_machine_without_go_and_without_a_proxy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closed_port() as port:
        monkeypatch.setenv("GOPROXY", f"http://127.0.0.1:{port},direct")
        done = run_script(tmp_path / "go", tmp_path)
    assert done.returncode == 1
    assert "Install Go >=" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("", install_go.PROXY),
        ("off", install_go.PROXY),
        ("direct,https://a.example/", "https://a.example"),
        ("https://a.example|https://b.example", "https://a.example"),
    ],
)
def test_the_first_proxy_is_asked(
    monkeypatch: pytest.MonkeyPatch, setting: str, expected: str
) -> None:
    monkeypatch.setenv("GOPROXY", setting)
    assert install_go.proxy() == expected


def test_the_version_is_enough_for_every_tool_of_the_test_bed() -> None:
    modules = sorted(ROOT.glob("testbed/tools/*/go.mod"))
    assert modules
    for module in modules:
        found = re.search(r"^go (\d+(?:\.\d+)*)$", module.read_text(), re.MULTILINE)
        assert found is not None, module
        needed = tuple(int(n) for n in found[1].split("."))
        assert needed <= MINIMUM, f"{module} needs Go {found[1]}"
    assert tuple(int(n) for n in VERSION.split(".")) >= MINIMUM
