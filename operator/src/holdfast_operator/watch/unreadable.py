"""Records of objects that exist and cannot be parsed. Pure.

After a rollback an object may hold a value that only a newer release can parse. Such an object must
not count as deleted, because the operator would then delete what belongs to it (ADR 0002).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from holdfast_operator.model import labels
from holdfast_operator.model.job import Unreadable
from holdfast_operator.model.ownership import controller_of

MAX_VALUE_CHARACTERS = 80
MAX_PROBLEM_CHARACTERS = 500


def unreadable(kind: str, raw: Mapping[str, Any], error: Exception) -> Unreadable:
    """Return the record of an object whose parser raised `error`."""
    meta = raw["metadata"]
    its_labels = meta.get("labels")
    job = its_labels.get(labels.JOB_NAME) if isinstance(its_labels, Mapping) else None
    return Unreadable(
        kind=kind,
        namespace=str(meta.get("namespace") or ""),
        name=str(meta["name"]),
        uid=str(meta["uid"]),
        problem=problem_of(error),
        owner=controller_of(raw),
        job=None if job is None else str(job),
    )


def problem_of(error: Exception) -> str:
    """Describe the first field that could not be parsed: what was expected and what was found."""
    if not isinstance(error, ValidationError):
        return f"{type(error).__name__}: {error}"[:MAX_PROBLEM_CHARACTERS]
    first, *others = error.errors(include_url=False)
    field = ".".join(str(part) for part in first["loc"]) or "the object"
    found = repr(first.get("input"))
    if len(found) > MAX_VALUE_CHARACTERS:
        found = f"{found[:MAX_VALUE_CHARACTERS]}..."
    text = f"{field}: {first['msg']}, found {found}"
    if others:
        text = f"{text} (and {len(others)} more fields)"
    return text[:MAX_PROBLEM_CHARACTERS]
