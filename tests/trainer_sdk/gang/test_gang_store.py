"""A rank accepts a value of the gang's store only if a rank of the same round signed it for that key."""

from __future__ import annotations

import threading

import pytest
from tests.support.hang import HANG_SECONDS
from tests.support.trainer.dict_store import DictStore

from holdfast.gang.store import GangStore

SECRET = b"of round 3"


def signed(key: str, value: str, context: str = "r3", secret: bytes = SECRET) -> str:
    plain = DictStore()
    GangStore(plain, context, secret).publish(key, value)
    return plain.values[key]


def test_a_value_that_a_rank_wrote_is_read() -> None:
    store = GangStore(DictStore(), "r3", SECRET)
    assert store.read("key") is None
    store.publish("key", "value \N{SNOWMAN}")
    assert store.read("key") == "value \N{SNOWMAN}"
    assert store.wait("key") == "value \N{SNOWMAN}"


def test_the_secret_is_not_in_the_store() -> None:
    assert SECRET.decode() not in signed("key", "value")
    assert SECRET.hex() not in signed("key", "value")


@pytest.mark.fault("A value in the store is forged, replayed or moved")
@pytest.mark.parametrize(
    "forged",
    [
        pytest.param("value", id="unsigned"),
        pytest.param("", id="empty"),
        pytest.param("0" * 64 + "value", id="wrong"),
        pytest.param("\N{SNOWMAN}" * 70, id="no ASCII"),
        pytest.param(signed("other", "value"), id="another key"),
        pytest.param(signed("key", "value", context="r2"), id="another round"),
        pytest.param(signed("key", "value", secret=b"of round 2"), id="another secret"),
        pytest.param(signed("key", "value")[:-1], id="cut"),
        pytest.param(signed("key", "value") + "s", id="longer"),
        pytest.param(signed("key", "value").upper(), id="upper case"),
        pytest.param(signed("ke", "yvalue"), id="moved border"),
    ],
)
def test_a_value_without_the_ranks_signature_counts_as_absent(
    forged: str, caplog: pytest.LogCaptureFixture
) -> None:
    plain = DictStore()
    store = GangStore(plain, "r3", SECRET)
    plain.set("key", forged)
    assert store.read("key") is None
    assert store.read("key") is None
    assert [one.name for one in caplog.records].count("holdfast.gang.store") == 1
    store.publish("key", "value")
    assert store.read("key") == "value"


def test_bytes_that_are_not_text_count_as_absent() -> None:
    class Bytes(DictStore):
        def get(self, key: str, /) -> bytes:
            return b"\xff" * 80

    plain = Bytes({"key": ""})
    assert GangStore(plain, "r3", SECRET).read("key") is None


def test_waiting_ends_with_the_value_of_a_rank() -> None:
    plain = DictStore()
    store = GangStore(plain, "r3", SECRET)
    plain.set("key", "forged")
    found: list[str] = []
    waiting = threading.Thread(target=lambda: found.append(store.wait("key")), daemon=True)
    waiting.start()
    store.publish("key", "value")
    waiting.join(HANG_SECONDS)
    assert found == ["value"]


def test_without_a_secret_every_value_is_accepted() -> None:
    plain = DictStore()
    plain.set("key", "value")
    assert GangStore(plain).read("key") == "value"
