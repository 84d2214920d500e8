"""Upload of one object whose parts are known in advance: a shard file, or a pack without compression."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from concurrent.futures import Future

from holdfast_core.store.s3.http import Body, FileBody
from holdfast_core.store.upload.parts import Part, PartPlan
from holdfast_core.store.upload.resume import OpenUpload, best_upload
from holdfast_core.store.upload.sending import Transport, Upload
from holdfast_core.tiers.base import ShardReader
from holdfast_core.tiers.pooled import wait_all


class ShardUpload(Upload):
    """One upload of one shard or pack. An object is used for one `run`."""

    def __init__(
        self,
        transport: Transport,
        key: str,
        reader: ShardReader,
        plan: PartPlan,
        body: Callable[[Part], Body] | None = None,
    ) -> None:
        """Prepare the upload.

        Args:
            transport: Client, retries and workers of the tier.
            key: Key of the object.
            reader: The shard on the node.
            plan: The parts of the object and their checksums.
            body: Returns the bytes of a part; by default those of its span in the reader's file.
        """
        super().__init__(transport, key, reader)
        self._plan = plan
        self._part_body = body or self._file_body

    def run(self) -> None:
        """Upload the object. Block until the store holds it; send nothing if it does already.

        Raises:
            AlreadyExistsError: The store holds other bytes under the key.
            AccessDeniedError: The store refuses the credentials.
            CapacityError: The store is full.
            NotFoundError: The bucket does not exist.
            CorruptionError: The local shard is damaged.
            UnavailableError: The retry policy is spent, or the tier is being closed.
        """
        if len(self._plan.parts) == 1:
            (part,) = self._plan.parts
            self._retrier.call(
                f"upload of {self._key}",
                lambda: self._put_whole(self._plan, lambda: self._part_body(part)),
            )
        else:
            self._begin_again(self._multipart)

    def _multipart(self) -> None:
        if self._retrier.call(f"look for {self._key}", lambda: self._confirm(self._plan)):
            return
        leftovers = self._leftovers()
        upload = best_upload(self._plan, leftovers) or OpenUpload(self._begin(), {})
        self._finish(
            upload.upload_id,
            lambda: (self._plan, self._send_parts(upload)),
            lambda: bool(upload.etags),
            leftovers,
        )

    def _send_parts(self, upload: OpenUpload) -> list[str]:
        """Send the parts that the store does not hold yet, and return all ETags in the order of the parts.

        After a part has failed no other part is begun. All parts in flight have ended before the error
        is raised, because an abort must not race with a part in flight.
        """
        failed = threading.Event()
        futures: dict[int, Future[str]] = {}
        try:
            for part in self._plan.parts:
                if part.number not in upload.etags:
                    body = functools.partial(self._part_body, part)
                    futures[part.number] = self._submit(upload.upload_id, part, body, failed)
            wait_all(futures.values())
        except BaseException:
            failed.set()
            raise
        finally:
            wait_all(futures.values())
        etags = {**upload.etags, **self._results(futures)}
        return [etags[part.number] for part in self._plan.parts]

    def _file_body(self, part: Part) -> FileBody:
        return FileBody(self._reader.fd, part.span.start, part.span.length_bytes)
