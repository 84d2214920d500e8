"""What an earlier attempt left of a multipart upload, and which of its parts can be kept. Pure.

A listed part is believed only when its size and CRC32C are those that the shard's own table says:
a store may list a part at full size whose bytes never came. Everything else is sent again, over the
same number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from holdfast_core.store.s3.client import UploadedPart
from holdfast_core.store.upload.parts import Part, PartPlan


@dataclass(frozen=True, slots=True)
class OpenUpload:
    """A multipart upload to go on with."""

    upload_id: str
    etags: Mapping[int, str]
    """Of the parts that need not be sent again, by number."""


def kept_etags(plan: PartPlan, listed: Sequence[UploadedPart]) -> dict[int, str]:
    """ETags, by number, of the listed parts that hold exactly the bytes of the plan's part."""
    found = {part.number: part for part in listed}
    return {
        part.number: there.etag
        for part in plan.parts
        if (there := found.get(part.number)) is not None and is_part(part, there)
    }


def is_part(part: Part, there: UploadedPart) -> bool:
    """What is listed holds exactly the bytes of the part."""
    same = (there.size_bytes, there.crc32c) == (part.span.length_bytes, part.crc32c)
    return bool(there.etag) and same


def fullest_upload(uploads: Mapping[str, Sequence[UploadedPart]]) -> str | None:
    """The upload, by id, of which most is there, for an object whose parts are not known yet; None
    where nothing is. Whether a part can be kept shows when it is made."""

    def held(upload_id: str) -> int:
        return sum(part.size_bytes for part in uploads[upload_id])

    best = max(uploads, key=held, default=None)
    return best if best is not None and held(best) > 0 else None


def best_upload(plan: PartPlan, uploads: Mapping[str, Sequence[UploadedPart]]) -> OpenUpload | None:
    """The upload, by id, that saves the most bytes; None when none saves any."""
    lengths = {part.number: part.span.length_bytes for part in plan.parts}

    def saved(upload: OpenUpload) -> int:
        return sum(lengths[number] for number in upload.etags)

    candidates = [OpenUpload(i, kept_etags(plan, parts)) for i, parts in uploads.items()]
    best = max(candidates, key=saved, default=None)
    return None if best is None or not best.etags else best
