"""One object into the store whose bytes are known before the first is sent: a shard file, or a pack of
its chunks as they are."""

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
    """One upload of one shard or pack; not reused. `run` blocks until the store holds it."""

    def __init__(
        self,
        transport: Transport,
        key: str,
        reader: ShardReader,
        plan: PartPlan,
        body: Callable[[Part], Body] | None = None,
    ) -> None:
        """`body`: the bytes of a part; None: those of its span in the reader's file."""
        super().__init__(transport, key, reader)
        self._plan = plan
        self._part_body = body or self._file_body

    def run(self) -> None:
        """Raises AlreadyExistsError, AccessDeniedError, CapacityError, NotFoundError (bucket),
        CorruptionError (the local shard), UnavailableError."""
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
        """ETags in the order of the parts; what is there already is not sent. When one fails for
        good, none is begun after it and all have ended before the error goes on: an abort must not
        race with a part in flight."""
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
