"""An upload of which one part fails."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from tests.support.servers.credentials import StaticCredentials

from holdfast_core.contract import StoreConfig
from holdfast_core.errors import AccessDeniedError, TierError
from holdfast_core.format.canonical import crc32c
from holdfast_core.store.s3.client import S3Client, S3Reply, S3Request
from holdfast_core.store.s3.credentials import Keys
from holdfast_core.store.s3.errors import S3Failure
from holdfast_core.store.s3.store import S3ObjectStore
from holdfast_core.store.upload import WhileWanted
from holdfast_core.tiers.objects import Part

CONFIG = StoreConfig("localhost:1", False, "bucket", "", "", max_concurrency=1)
DENIED = S3Reply(403, {}, b"", S3Failure(403, "AccessDenied", "no", "PUT"))


@dataclass
class Counted:
    """An ObjectSource of four parts that counts those that were made."""

    made_while_sent: bool = True
    size_limit: int = 20 << 20
    made: int = 0

    def parts(self, part_bytes: int) -> Iterator[Part]:
        for number in range(4):
            self.made += 1
            data = bytes(part_bytes)
            yield Part((data,), len(data), crc32c(data), number == 3)

    def verify(self) -> None:
        """Do nothing."""


@pytest.mark.fault("A part of an upload fails while the next one waits for room")
def test_no_part_is_made_after_one_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Making a part takes processor time that training could use."""
    client = S3Client(CONFIG, StaticCredentials(Keys("access", "secret")))
    sent, aborted = list[str](), list[str]()

    def refuse(request: S3Request) -> S3Reply:
        sent.append(request.query["partNumber"])
        return DENIED

    monkeypatch.setattr(client, "head", lambda key: None)
    monkeypatch.setattr(client, "list_uploads", lambda prefix: ((), ""))
    monkeypatch.setattr(client, "create_upload", lambda key: "upload")
    monkeypatch.setattr(client, "abort_upload", lambda key, upload_id: aborted.append(upload_id))
    monkeypatch.setattr(client, "send", refuse)
    objects, source = S3ObjectStore(client), Counted()
    with pytest.raises(AccessDeniedError):
        objects.write("one", source)
    objects.close()
    assert (source.made, sent, aborted) == (1, ["1"], ["upload"])


def test_the_parts_of_a_file_are_made_once() -> None:
    """A store asks for them twice: for their checksums, and to send them."""
    source = Counted(made_while_sent=False)
    wanted = WhileWanted(source, threading.Event())
    assert list(wanted.parts(1 << 10)) == list(wanted.parts(1 << 10))
    assert source.made == 4


@pytest.mark.fault("The round of an upload is sealed while it sends a large shard")
def test_no_part_is_sent_after_an_upload_was_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest would take the bandwidth of the next round's restore and uploads."""
    client = S3Client(CONFIG, StaticCredentials(Keys("access", "secret")))
    sent, aborted, stopped = list[str](), list[str](), threading.Event()

    def stop(request: S3Request) -> S3Reply:
        sent.append(request.query["partNumber"])
        stopped.set()
        return S3Reply(200, {"etag": "1"}, b"", None)

    monkeypatch.setattr(client, "head", lambda key: None)
    monkeypatch.setattr(client, "list_uploads", lambda prefix: ((), ""))
    monkeypatch.setattr(client, "create_upload", lambda key: "upload")
    monkeypatch.setattr(client, "abort_upload", lambda key, upload_id: aborted.append(upload_id))
    monkeypatch.setattr(client, "send", stop)
    objects = S3ObjectStore(client)
    with pytest.raises(TierError, match="ended before its last part"):
        objects.write("one", WhileWanted(Counted(made_while_sent=False), stopped))
    objects.close()
    assert (sent, aborted) == (["1"], ["upload"])
