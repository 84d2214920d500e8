"""A peer as a store: the contract of stores that are read by ranges, over the members' TLS."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest
from tests.support.hang import HANG_SECONDS
from tests.support.peer.bulk_pair import OPTIONS, SERVER, Handler

from holdfast.testing import RangedStoreContract
from holdfast_core.errors import NotFoundError, UnavailableError
from holdfast_core.ids import ByteRange
from holdfast_core.net import TlsFiles, client_context, server_context
from holdfast_core.peer.protocol import Peer
from holdfast_core.peer.server import BulkServer
from holdfast_core.peer.store import PeerStore
from holdfast_core.tasks import Closing


@dataclass
class OpenBytes(Closing):
    """An object in memory."""

    data: bytes

    @property
    def size_bytes(self) -> int:
        return len(self.data)

    def read_file(self, ranges: Iterable[ByteRange]) -> Generator[memoryview]:
        for wanted in ranges:
            yield memoryview(self.data)[wanted.start : wanted.stop]

    def close(self) -> None:
        """Do nothing."""


@dataclass
class Objects:
    """The objects that a peer serves."""

    found: dict[str, bytes] = field(default_factory=dict)

    def open(self, key: str) -> OpenBytes:
        if key not in self.found:
            raise NotFoundError(f"no object {key!r}")
        return OpenBytes(self.found[key])


@pytest.fixture
def served() -> Objects:
    return Objects()


@pytest.fixture
def put(served: Objects) -> Callable[[str, bytes], object]:
    return served.found.__setitem__


@pytest.fixture
def objects(certificates: tuple[TlsFiles, TlsFiles], served: Objects) -> Iterator[PeerStore]:
    server = BulkServer(Handler(), served.open, server_context(certificates[0]))
    port = server.start("127.0.0.1", 0)
    peer = Peer("127.0.0.1", port, SERVER, client_context(certificates[1]), OPTIONS)
    with PeerStore(peer) as store:
        yield store
    server.close()


class TestPeerStore(RangedStoreContract):
    """A peer passes the tests of every store that is read."""


def test_a_read_in_progress_ends_when_the_store_is_closed(
    certificates: tuple[TlsFiles, TlsFiles],
) -> None:
    asked, release = threading.Event(), threading.Event()

    def opened(key: str) -> OpenBytes:
        asked.set()
        release.wait(HANG_SECONDS)
        return OpenBytes(b"")

    server = BulkServer(Handler(), opened, server_context(certificates[0]))
    port = server.start("127.0.0.1", 0)
    store = PeerStore(Peer("127.0.0.1", port, SERVER, client_context(certificates[1]), OPTIONS))
    with ThreadPoolExecutor(1) as helper:
        size = helper.submit(store.size, "a/one")
        assert asked.wait(HANG_SECONDS)
        store.close()
        with pytest.raises(UnavailableError, match="being closed"):
            size.result(HANG_SECONDS)
    release.set()
    server.close()
