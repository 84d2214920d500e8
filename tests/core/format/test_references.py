"""The document that keeps earlier checkpoints' objects alive has one spelling. Every other one is refused."""

from __future__ import annotations

import pytest

from holdfast_core.errors import FormatError
from holdfast_core.format.references import References, parse_references
from holdfast_core.ids import CheckpointId, RestartRound, Step


def at(step: int, round: int = 0) -> CheckpointId:
    return CheckpointId(Step(step), RestartRound(round))


DOCUMENT = (
    b'{"formatVersion":1,"references":[{"bytes":7,"restartRound":0,"step":10},'
    b'{"bytes":9,"restartRound":1,"step":10}],"restartRound":1,"step":20}'
)


def test_references_are_parsed_from_their_bytes() -> None:
    references = References(at(20, 1), {at(10, 1): 9, at(10): 7})
    assert references.to_bytes() == DOCUMENT
    assert parse_references(DOCUMENT) == references


REFUSED = {
    "other spelling": DOCUMENT.replace(b",", b", ", 1),
    "newer version": DOCUMENT.replace(b'Version":1', b'Version":2'),
    "unknown field": DOCUMENT.replace(b'"step":20', b'"more":1,"step":20'),
    "itself": DOCUMENT.replace(b'"step":10}]', b'"step":20}]'),
    "twice": DOCUMENT.replace(b'"bytes":9,"restartRound":1', b'"bytes":9,"restartRound":0'),
    "out of order": DOCUMENT.replace(b'0,"step":10', b'0,"step":11'),
    "no bytes": DOCUMENT.replace(b'"bytes":7', b'"bytes":0'),
    "a step below zero": DOCUMENT.replace(b'"step":20', b'"step":-1'),
    "no list": b'{"formatVersion":1,"references":{},"restartRound":1,"step":20}',
}


@pytest.mark.parametrize("document", REFUSED.values(), ids=REFUSED.keys())
def test_anything_else_is_refused(document: bytes) -> None:
    with pytest.raises(FormatError, match="references"):
        parse_references(document)
