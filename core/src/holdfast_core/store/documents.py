"""Storage of small documents: manifests, layouts and references.

A document is one object. It is written only if its key is free, and it is read back and compared. This
module handles keys and bytes and does not parse the documents.
"""

from __future__ import annotations

from holdfast_core.errors import (
    AlreadyExistsError,
    CorruptionError,
    NotFoundError,
    UnavailableError,
)
from holdfast_core.format.digest import crc32c
from holdfast_core.store.s3.client import (
    CHECKSUM_HEADER,
    CHECKSUM_MODE,
    IF_ABSENT,
    S3Client,
    S3Request,
    decode_crc,
    encode_crc,
)
from holdfast_core.store.s3.retry import Retrier
from holdfast_core.store.upload.sending import confirm_written

MAX_DOCUMENT_BYTES = 64 << 20


class DocumentStore:
    """Store of documents by key. Safe for use by many threads."""

    def __init__(self, client: S3Client, retrier: Retrier) -> None:
        self._client = client
        self._retrier = retrier

    def put(self, key: str, document: bytes) -> None:
        """Write the document if the key is free. Return normally if the key already holds the same bytes.

        If several writers put different documents, exactly one succeeds. A store that ignores
        If-None-Match guarantees this only for writers that do not overlap in time.

        Raises:
            AlreadyExistsError: The key holds another document.
        """
        self._retrier.call(f"put of {key}", lambda: self._put_once(key, document))

    def get(self, key: str) -> bytes:
        """Return the document.

        Raises:
            NotFoundError: The store has no such key at three looks.
            CorruptionError: Two reads in a row did not match the store's checksum.
        """
        document = self._retrier.look(f"get of {key}", lambda: self._read(key))
        if document is None:
            raise NotFoundError(f"{self._client.describe(S3Request('GET', key))}: not there")
        return document

    def _put_once(self, key: str, document: bytes) -> None:
        if self._is_there(key, document):
            return
        crc = crc32c(document)
        headers = {CHECKSUM_HEADER: encode_crc(crc), "Content-Type": "application/json"}
        if self._client.config.conditional_put:
            headers |= IF_ABSENT
        reply = self._client.send(S3Request("PUT", key, {}, headers, document))
        if reply.failure is None:
            confirm_written(self._client, key, len(document), crc)
        elif not reply.failure.is_precondition:
            raise reply.failure.error()
        elif not self._is_there(key, document):
            raise UnavailableError(
                f"{reply.failure.request}: {reply.failure.text}; yet nothing is there"
            )

    def _is_there(self, key: str, document: bytes) -> bool:
        found = self._read(key)
        if found is None:
            return False
        if found == document:
            return True
        raise AlreadyExistsError(
            f"{self._client.describe(S3Request('PUT', key))}: another document is there: expected "
            f"{len(document)} bytes with CRC32C {crc32c(document):08x}, found {len(found)} bytes "
            f"with CRC32C {crc32c(found):08x}"
        )

    def _read(self, key: str) -> bytes | None:
        try:
            return self._read_once(key)
        except CorruptionError:
            return self._read_once(key)

    def _read_once(self, key: str) -> bytes | None:
        request = S3Request("GET", key, headers=CHECKSUM_MODE)
        reply = self._client.send(request, limit_bytes=MAX_DOCUMENT_BYTES)
        if reply.failure is not None:
            if reply.failure.is_absent and reply.failure.code != "NoSuchBucket":
                return None
            raise reply.failure.error()
        expected = decode_crc(reply.headers.get(CHECKSUM_HEADER))
        found = crc32c(reply.body)
        if expected is not None and expected != found:
            raise CorruptionError(
                f"{self._client.describe(request)}: expected CRC32C {expected:08x}, found "
                f"{found:08x} over {len(reply.body)} bytes"
            )
        return reply.body
