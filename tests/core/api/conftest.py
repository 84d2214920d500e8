"""One API server with the CRDs for the tests of the API."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from holdfast_core.api.crd import KINDS, crd
from holdfast_core.testing.control_plane import ControlPlane


@pytest.fixture(scope="session")
def api_server() -> Iterator[ControlPlane]:
    with ControlPlane() as cp:
        cp.apply(*(crd(kind) for kind in KINDS))
        cp.kubectl(
            "wait",
            "--for=condition=Established",
            "--timeout=60s",
            "crd",
            *(f"{kind.PLURAL}.holdfast.dev" for kind in KINDS),
        )
        cp.create_namespace("team-a")
        yield cp
