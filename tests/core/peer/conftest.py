from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from tests.support.peer.bulk_pair import CLIENT, SERVER, Pair, Wire, started
from tests.support.servers.pki import Authority
from tests.support.tiers.scratch import ScratchTier

from holdfast_core.net import TlsFiles


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> tuple[TlsFiles, TlsFiles]:
    root = tmp_path_factory.mktemp("certs")
    authority = Authority()
    return (
        TlsFiles.in_directory(authority.write_leaf(root / "server", SERVER)),
        TlsFiles.in_directory(authority.write_leaf(root / "client", CLIENT)),
    )


@pytest.fixture
def pair(certificates: tuple[TlsFiles, TlsFiles]) -> Iterator[Pair]:
    yield from started(certificates, ScratchTier())


@pytest.fixture
def wires(pair: Pair) -> Iterator[Callable[..., Wire]]:
    """Return a function that puts a Wire before the pair's server."""
    made: list[Wire] = []

    def wire(**options: object) -> Wire:
        made.append(Wire(pair.port, **options))  # type: ignore[arg-type]
        return made[-1]

    yield wire
    for each in made:
        each.close()
