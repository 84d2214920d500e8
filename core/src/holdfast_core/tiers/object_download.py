"""One shard file out of the store, into a writer that verifies it.

Ranged GETs carry no checksum, so nothing here is believed: the writer checks chunk CRCs, identity
and BLAKE3. A broken transfer goes on at the last byte received. Whole shards are never buffered.
"""

from __future__ import annotations

import logging

from holdfast_core.errors import CorruptionError, NotFoundError, UnavailableError
from holdfast_core.ids import ShardRef
from holdfast_core.tiers.base import CopyWriter, OpenWriter, ShardRecord
from holdfast_core.tiers.retry import Retrier
from holdfast_core.tiers.s3_client import S3Client, S3Request

_LOG = logging.getLogger(__name__)
_BUFFER_BYTES = 1 << 20
_PROGRESS_BYTES = 1 << 20
"""A broken transfer that brought this much is not a failure: it goes on with a fresh budget. Less
counts, or a server that cuts after every byte would be asked for ever."""
_READS = 2
"""A shard that does not verify is read once more: the bit may have flipped on the way."""


def download_shard(
    client: S3Client, retrier: Retrier, key: str, ref: ShardRef, open_writer: OpenWriter
) -> ShardRecord:
    """Blocks until the writer has committed. Raises NotFoundError, CorruptionError (the second read
    of the store's bytes did not verify either), UnavailableError, and what the writer raises."""
    for _ in range(_READS - 1):
        try:
            return _download_once(client, retrier, key, ref, open_writer)
        except CorruptionError as error:
            _LOG.warning("%s did not verify, reading it once more: %s", key, error)
    return _download_once(client, retrier, key, ref, open_writer)


def _download_once(
    client: S3Client, retrier: Retrier, key: str, ref: ShardRef, open_writer: OpenWriter
) -> ShardRecord:
    found = retrier.call(f"look for {key}", lambda: client.head(key))
    if found is None:
        raise NotFoundError(f"{client.describe(S3Request('HEAD', key))}: no such shard")
    writer = open_writer(ref, found.size_bytes)
    try:
        while writer.offset < found.size_bytes:
            retrier.call(f"download of {key}", lambda: _pull(client, key, writer, found.size_bytes))
    except BaseException:
        writer.abort()
        raise
    return writer.commit()


def _pull(client: S3Client, key: str, writer: CopyWriter, size_bytes: int) -> None:
    """One GET from the writer's offset to the end. Returns early when it broke after progress."""
    start = writer.offset
    buffer = memoryview(bytearray(_BUFFER_BYTES))
    try:
        with client.stream_range(key, start, size_bytes) as reply:
            while (left := size_bytes - writer.offset) > 0:
                count = reply.read_into(buffer[: min(left, _BUFFER_BYTES)])
                if count == 0:
                    raise UnavailableError(
                        f"{client.describe(S3Request('GET', key))}: the reply ended at byte "
                        f"{writer.offset}, expected {size_bytes}"
                    )
                writer.write(buffer[:count])
    except UnavailableError:
        if writer.offset - start < _PROGRESS_BYTES:
            raise
