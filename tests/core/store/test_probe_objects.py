"""A probe by the calls that Holdfast makes of a store deletes what it wrote, however it ends."""

from __future__ import annotations

import pytest
from tests.support.tiers.objects import MemoryObjectStore

from holdfast_core.contract import StoreConfig
from holdfast_core.errors import HoldfastError, NotFoundError, TierError, UnavailableError
from holdfast_core.store.probe import ProbeReason, probe_objects

CONFIG = StoreConfig("host:1", True, "bucket", "prefix", "")


class FailingStore(MemoryObjectStore):
    """A store whose reads of ranges fail."""

    def __init__(self, error: HoldfastError) -> None:
        super().__init__()
        self._error = error

    def read_into(self, *_: object, **__: object) -> None:
        raise self._error


def test_a_good_store_is_available_and_stays_empty() -> None:
    store = MemoryObjectStore()
    assert probe_objects(CONFIG, lambda _: store).available
    assert store.list("").objects == ()


@pytest.mark.fault("A store fails in the middle of its probe")
@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (UnavailableError("no reply came in time"), ProbeReason.UNREACHABLE),
        (TierError("501"), ProbeReason.REFUSED),
        (NotFoundError("an object that was just written"), ProbeReason.INCONSISTENT),
    ],
)
def test_a_probe_that_fails_half_way_deletes_what_it_wrote(
    error: HoldfastError, reason: ProbeReason
) -> None:
    store = FailingStore(error)
    report = probe_objects(CONFIG, lambda _: store)
    assert (report.available, report.reason) == (False, reason)
    assert store.list("").objects == ()
