"""Choice of an unfinished multipart upload to continue, and of its parts that can be kept. Pure functions.

A listed part is kept only if its size and CRC32C match the plan: a store may list a part at full size
whose bytes it never received. Every other part is sent again under the same number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from holdfast_core.store.s3.client import UploadedPart
from holdfast_core.store.upload.parts import Part, PartPlan


@dataclass(frozen=True, slots=True)
class OpenUpload:
    """A multipart upload to continue."""

    upload_id: str
    etags: Mapping[int, str]
    """ETags of the parts that need not be sent again, by part number."""


def kept_etags(plan: PartPlan, listed: Sequence[UploadedPart]) -> dict[int, str]:
    """Return the ETags of the listed parts that match the plan, by part number."""
    found = {part.number: part for part in listed}
    return {
        part.number: there.etag
        for part in plan.parts
        if (there := found.get(part.number)) is not None and is_part(part, there)
    }


def is_part(part: Part, there: UploadedPart) -> bool:
    """Return whether the listed part has an ETag and the size and CRC32C of `part`."""
    same = (there.size_bytes, there.crc32c) == (part.span.length_bytes, part.crc32c)
    return bool(there.etag) and same


def fullest_upload(uploads: Mapping[str, Sequence[UploadedPart]]) -> str | None:
    """Return the id of the upload of which the store holds most bytes; None if it holds none of any.

    This is for objects whose parts are not known yet. Whether a stored part can be kept is decided when
    the part has been made.
    """

    def held(upload_id: str) -> int:
        return sum(part.size_bytes for part in uploads[upload_id])

    best = max(uploads, key=held, default=None)
    return best if best is not None and held(best) > 0 else None


def best_upload(plan: PartPlan, uploads: Mapping[str, Sequence[UploadedPart]]) -> OpenUpload | None:
    """Return the upload whose kept parts have the most bytes; None if no part can be kept.

    `uploads` are the listed parts of each upload by its id.
    """
    lengths = {part.number: part.span.length_bytes for part in plan.parts}

    def saved(upload: OpenUpload) -> int:
        return sum(lengths[number] for number in upload.etags)

    candidates = [OpenUpload(i, kept_etags(plan, parts)) for i, parts in uploads.items()]
    best = max(candidates, key=saved, default=None)
    return None if best is None or not best.etags else best
