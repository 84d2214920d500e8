"""`import holdfast` is cheap: it imports neither torch nor Kubernetes."""

from __future__ import annotations

import subprocess
import sys

import pytest

FORBIDDEN = ("torch", "kubernetes", "kopf", "minio", "aiohttp", "pydantic")


@pytest.mark.parametrize(
    "module", ["holdfast", "holdfast.__main__", "holdfast.directory.persister.__main__"]
)
def test_an_import_loads_no_large_package(module: str) -> None:
    program = f"import {module}, sys; print(*sorted({{m.split('.')[0] for m in sys.modules}}))"
    done = subprocess.run(
        [sys.executable, "-I", "-c", program], capture_output=True, text=True, check=True
    )
    assert not set(FORBIDDEN) & set(done.stdout.split())


def test_the_version_command_prints_the_version() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "holdfast", "version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("holdfast ")
