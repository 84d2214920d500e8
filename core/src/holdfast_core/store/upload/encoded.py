"""Upload of one pack that is compressed while it is sent.

The parts are made one by one, so length and checksum of the object are unknown before the last part. An
object that has the key already is not compared: the key contains the payload's digest, and the caller
examines the object. An interrupted upload is continued: the compressor's output is deterministic, so a
part that the store lists with the right length and CRC32C is not sent again.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future

from holdfast_core.errors import AlreadyExistsError
from holdfast_core.shards.pack import PackIndex
from holdfast_core.store.s3.client import S3Request, UploadedPart
from holdfast_core.store.s3.http import Body
from holdfast_core.store.upload.encode import EncodedPack, EncodedPart, PartSizes
from holdfast_core.store.upload.parts import PartPlan
from holdfast_core.store.upload.resume import fullest_upload, is_part
from holdfast_core.store.upload.sending import Transport, Upload
from holdfast_core.tiers.base import ShardReader
from holdfast_core.tiers.pooled import wait_all


class EncodedUpload(Upload):
    """One upload of one compressed pack. An object is used for one `run`."""

    def __init__(
        self,
        transport: Transport,
        key: str,
        reader: ShardReader,
        index: PackIndex,
        *,
        widths: bytes,
        sizes: PartSizes,
    ) -> None:
        super().__init__(transport, key, reader)
        self._index = index
        self._widths = widths
        self._sizes = sizes

    def run(self) -> PackIndex:
        """Upload the pack and return its index as stored. Block until the store holds the pack.

        Raises AlreadyExistsError if any object has the key, and whatever else ShardUpload.run raises.
        """
        return self._begin_again(self._attempt)

    def _attempt(self) -> PackIndex:
        self._expect_nothing()
        pack = EncodedPack(self._reader, self._index, self._widths, self._sizes.part_bytes)
        parts = pack.parts()
        made = deque([next(parts)])
        if made[0].is_last:
            what = f"upload of {self._key}"
            self._retrier.call(what, lambda: self._put_whole(pack.plan, lambda: made[0].body))
        else:
            self._multipart(pack, made, parts)
        return pack.index

    def _expect_nothing(self) -> None:
        found = self._retrier.call(f"look for {self._key}", lambda: self._client.head(self._key))
        if found is not None:
            where = self._client.describe(S3Request("HEAD", self._key))
            raise AlreadyExistsError(f"{where}: expected nothing, found {found.size_bytes} bytes")

    def _multipart(
        self, pack: EncodedPack, made: deque[EncodedPart], rest: Iterator[EncodedPart]
    ) -> None:
        leftovers = self._leftovers()
        upload_id = fullest_upload(leftovers) or self._begin()
        listed = {part.number: part for part in leftovers.get(upload_id, ())}
        kept: list[int] = []

        def send() -> tuple[PartPlan, list[str]]:
            etags = self._send_parts(upload_id, made, rest, listed, kept)
            return pack.plan, [etags[part.number] for part in pack.plan.parts]

        self._finish(upload_id, send, lambda: bool(kept), leftovers)

    def _send_parts(
        self,
        upload_id: str,
        made: deque[EncodedPart],
        rest: Iterator[EncodedPart],
        listed: Mapping[int, UploadedPart],
        kept: list[int],
    ) -> dict[int, str]:
        """Send the parts as they are made, and return the ETags by part number.

        No part is made while `at_once` parts wait or are in flight, or after one has failed. All parts
        in flight have ended before an error is raised, so that an abort cannot race with one of them.

        Args:
            upload_id: The multipart upload.
            made: The part that was made before `rest`. It is removed, so that its bytes are freed once
                it has been sent.
            rest: The remaining parts.
            listed: Parts that the store holds already, by number.
            kept: Receives the numbers of the parts that were not sent again.
        """
        etags: dict[int, str] = {}
        futures: dict[int, Future[str]] = {}
        failed, room = threading.Event(), threading.Semaphore(self._sizes.at_once - 1)
        try:
            encoded: EncodedPart | None = made.popleft()
            while encoded is not None:
                part, there = encoded.part, listed.get(encoded.part.number)
                if there is not None and is_part(part, there):
                    etags[part.number] = there.etag
                    kept.append(part.number)
                else:
                    sent = self._submit(upload_id, part, _held(encoded.body), failed)
                    sent.add_done_callback(lambda _: room.release())
                    futures[part.number] = sent
                    encoded = None  # The bytes are freed as soon as the worker has sent them.
                    room.acquire()
                encoded = None if failed.is_set() else next(rest, None)
        except BaseException:
            failed.set()
            raise
        finally:
            wait_all(futures.values())
        return etags | self._results(futures)


def _held(body: bytes) -> Callable[[], Body]:
    return lambda: body
