"""A probe by the calls that Holdfast makes of a store deletes what it wrote, however it ends."""

from __future__ import annotations

import pytest
from tests.support.tiers.objects import MemoryObjectStore

from holdfast_core.contract import StoreConfig
from holdfast_core.errors import HoldfastError, NotFoundError, TierError, UnavailableError
from holdfast_core.store.probe import ProbeReason, probe_objects
from holdfast_core.tiers.objects import ObjectSource

CONFIG = StoreConfig("host:1", True, "bucket", "prefix", "")


class FailingStore(MemoryObjectStore):
    """A store whose reads of ranges fail."""

    def __init__(self, error: HoldfastError) -> None:
        super().__init__()
        self._error = error

    def read_into(self, *_: object, **__: object) -> None:
        raise self._error


class UnconditionalStore(MemoryObjectStore):
    """A store that looks at a key first, and whose server then ignores the condition of the write."""

    def write(self, key: str, source: ObjectSource, *, replace: bool = False) -> None:
        super().write(key, source, replace=replace or self.size(key) is None)


def test_a_good_store_is_available_and_stays_empty() -> None:
    store = MemoryObjectStore()
    report = probe_objects(CONFIG, lambda _: store)
    assert report.available
    assert report.features.conditional_put
    assert store.list("").objects == ()


@pytest.mark.fault("A store ignores the condition of a write, which its client hides by a look")
def test_a_store_that_replaces_what_was_written_since_its_look_is_reported() -> None:
    store = UnconditionalStore()
    report = probe_objects(CONFIG, lambda _: store)
    assert not report.features.conditional_put
    assert "ignores conditional writes" in report.message
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
