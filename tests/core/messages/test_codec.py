"""Every message is decoded as it was encoded, and hostile JSON is refused with its path."""

from __future__ import annotations

import contextlib
import dataclasses
import tracemalloc
import typing
from collections.abc import Iterator
from typing import Any

import pytest
from msgspec import inspect
from tests.fuzz.examples import example

from holdfast_core.errors import FormatError
from holdfast_core.ids import Digest, Rank, RestartRound, Step, TierName, Worker
from holdfast_core.messages import schema
from holdfast_core.messages.codec import body_limit_bytes, dumps, loads, reply_limit_bytes
from holdfast_core.messages.schema import (
    CoordinatorState,
    DeadRank,
    Failure,
    GangProgress,
    GangRequest,
    Inventory,
    Member,
    Policy,
    Progress,
    Refused,
    RestorePoint,
    Round,
    Seal,
    StepOutcome,
)


def test_a_field_that_is_none_survives_also_without_a_default():
    failure = Failure(None, TierName.NODE, "NodeVolumeFull", "the volume is full")
    assert loads(Failure, dumps(failure)) == failure


def test_values_keep_their_types():
    state = CoordinatorState(
        3,
        RestartRound(1),
        last_local=RestorePoint(Step(5), RestartRound(1), Digest("b3:" + "0" * 64)),
        progress=GangProgress(Step(7), Step(8), 15, 1.5),
        restored_from={TierName.PEER: 2},
    )
    back = loads(CoordinatorState, dumps(state))
    assert back == state
    assert [type(tier) for tier in back.restored_from or ()] == [TierName]


def round_message(**changes: object) -> Round:
    message = Round(
        round=RestartRound(3),
        version=1,
        restore_point=RestorePoint(Step(5), RestartRound(1), Digest("b3:" + "0" * 64)),
        coordinator=Worker(0),
        store_host=Worker(1),
        workers=2,
        members=(
            Member(Worker(0), "gpt-0-r0", "10.0.0.1"),
            Member(Worker(1), "gpt-1-r3", "fd00::1"),
        ),
        copies={Worker(0): (Worker(1),)},
        policy=Policy(5),
        pinned=(Step(2), Step(4)),
    )
    return dataclasses.replace(message, **changes)  # type: ignore[arg-type]  # a builder of tests


def test_sender_and_receiver_of_a_round_have_the_same_digest_of_its_content():
    sent = round_message()
    received = loads(Round, dumps(sent))
    assert received.content_digest() == sent.content_digest()


@pytest.mark.parametrize(
    ("changes", "same"),
    [
        pytest.param({"version": 9}, True, id="version"),
        pytest.param({"last_persisted": RestorePoint(Step(7))}, True, id="newest persisted step"),
        pytest.param({"coordinator": Worker(1)}, False, id="coordinator"),
        pytest.param({"members": (Member(Worker(0), "gpt-0-r0", ""),)}, False, id="addresses"),
        pytest.param({"pinned": ()}, False, id="pinned steps"),
    ],
)
def test_the_content_of_a_round_is_all_but_its_version(changes: dict[str, object], same: bool):
    changed = round_message(**changes).content_digest()
    assert (changed == round_message().content_digest()) == same


def test_unknown_fields_of_a_newer_sender_are_ignored():
    assert loads(Seal, b'{"round": 3, "colour": "red"}') == Seal(RestartRound(3))


def progress(blocked_seconds: bytes) -> bytes:
    return b'{"round": 1, "rank": 0, "step": 1, "blocked_seconds": ' + blocked_seconds + b"}"


HOSTILE = {
    "not JSON": (Seal, b"{", "Seal: Input data was truncated"),
    "missing field": (Seal, b"{}", "Seal: Object missing required field `round`"),
    "wrong type": (Seal, b'{"round": "1"}', "Seal.round: Expected `int`, got `str`"),
    "a boolean is no number": (Seal, b'{"round": true}', "Seal.round: Expected `int`, got `bool`"),
    "over 64 bits": (
        Seal,
        b'{"round": 9223372036854775808}',
        "Seal.round: Expected `int` <= 999999",
    ),
    "thousands of digits": (
        Seal,
        b'{"round": ' + b"9" * 4000 + b"}",
        "Seal.round: Expected `int` <= ",
    ),
    "below zero": (Seal, b'{"round": -1}', "Seal.round: Expected `int` >= 0"),
    "too large for a float": (
        Progress,
        progress(b"1" * 400),
        ".blocked_seconds: Number out of range",
    ),
    "infinite": (Progress, progress(b"1e999"), ".blocked_seconds: Number out of range"),
    "not a number": (Progress, progress(b"NaN"), "Progress: JSON is malformed"),
    "negative time": (Progress, progress(b"-1"), ".blocked_seconds: Expected `float` >= 0"),
    "half a surrogate pair in a name": (
        GangRequest,
        b'{"round": 1, "token": "\\ud800"}',
        "GangRequest: Input data was truncated",
    ),
    "a long name": (
        GangRequest,
        b'{"round": 1, "token": "' + b"x" * 2000 + b'"}',
        "GangRequest.token: Expected `str` of length <= 1024",
    ),
    "a reason that no condition takes": (
        Failure,
        b'{"tier": "node", "reason": "", "message": ""}',
        "Failure.reason: Expected `str` matching regex",
    ),
    "a long list": (
        Round,
        dumps(
            Round(RestartRound(1), 1, RestorePoint(), Worker(0), Worker(0), 1, (), {}, Policy(5))
        ).replace(b'"pinned":[]', b'"pinned":[' + b"1," * 5000 + b"1]"),
        "Round.pinned: Expected `array` of length <= 4096",
    ),
    "one bad item of many": (
        Round,
        dumps(
            Round(RestartRound(1), 1, RestorePoint(), Worker(0), Worker(0), 1, (), {}, Policy(5))
        ).replace(b'"pinned":[]', b'"pinned":[1,2,"x"]'),
        "Round.pinned[2]: Expected `int`, got `str`",
    ),
    "depth where nothing is known": (
        Seal,
        b'{"round": 1, "more": ' + b"[" * 1500 + b"]" * 1500 + b"}",
        "Seal: maximum recursion depth exceeded",
    ),
    "a list where an object belongs": (Seal, b"[]", "Seal: Expected `object`, got `array`"),
    "an unknown enum value": (
        StepOutcome,
        b'{"step":1,"round":1,"level":"x"}',
        "StepOutcome.level: Invalid enum value 'x'",
    ),
    "a wrong type deep inside": (
        Round,
        dumps(
            Round(RestartRound(1), 1, RestorePoint(), Worker(0), Worker(0), 1, (), {}, Policy(5))
        ).replace(b'"interval_steps":5', b'"interval_steps":null'),
        "Round.policy.interval_steps: Expected `int`, got `null`",
    ),
}


@pytest.mark.fault("A message holds hostile JSON")
@pytest.mark.fault("A shard, a manifest or a layout is hostile")
@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_input_is_refused_with_its_path(case):
    kind, data, text = HOSTILE[case]
    with pytest.raises(FormatError) as caught:
        loads(kind, data)
    assert text in str(caught.value)


def test_deep_nesting_is_refused():
    with pytest.raises(FormatError):
        loads(Seal, b"[" * 100_000)


def test_too_large_is_refused_before_it_is_parsed():
    with pytest.raises(FormatError, match="at most 10"):
        loads(Seal, b'{"round": 1, "x": "..."}', limit_bytes=10)


def _messages() -> list[type]:
    return [
        kind
        for kind in vars(schema).values()
        if isinstance(kind, type) and dataclasses.is_dataclass(kind)
    ]


def _unbounded(found: Any) -> Iterator[Any]:
    """Yield each type within a type of msgspec that takes numbers, texts or lists of any size."""
    match found:
        case inspect.Metadata():
            yield from _unbounded(found.type)
        case inspect.UnionType():
            for kind in found.types:
                yield from _unbounded(kind)
        case inspect.DataclassType() | inspect.NamedTupleType():
            for field in found.fields:
                yield from _unbounded(field.type)
        case inspect.TupleType():
            for kind in found.item_types:
                yield from _unbounded(kind)
        case inspect.VarTupleType(max_length=int()):
            yield from _unbounded(found.item_type)
        case inspect.DictType(max_length=int()):
            yield from _unbounded(found.key_type)
            yield from _unbounded(found.value_type)
        case inspect.IntType(ge=int(), le=int()) | inspect.StrType(max_length=int()):
            return
        case inspect.StrType(pattern=str()):
            return
        case inspect.FloatType() | inspect.EnumType() | inspect.BoolType() | inspect.NoneType():
            return  # JSON has no number that is infinite or NaN
        case _:
            yield found


@pytest.mark.parametrize("kind", _messages(), ids=lambda k: k.__name__)
def test_each_value_of_a_message_is_bounded(kind: type) -> None:
    assert list(_unbounded(inspect.type_info(kind))) == []


@pytest.mark.parametrize("kind", _messages(), ids=lambda k: k.__name__)
def test_texts_for_people_are_cut_and_repaired_where_a_message_is_made(kind: type) -> None:
    """A path may not be Unicode, and the output of a rank has any length. Neither may lose the message."""
    texts = {
        name: note.max_length
        for name, hint in typing.get_type_hints(kind, include_extras=True).items()
        for note in getattr(hint, "__metadata__", ())
        if note.extra == {"clip": True}
    }
    if not texts:
        return
    message = dataclasses.replace(
        example(kind, full=True), **{name: "\udc80" + "x" * 5000 for name in texts}
    )
    for name, limit in texts.items():
        assert getattr(message, name) == "?" + "x" * (limit - 1)
    assert loads(kind, dumps(message)) == message


def test_a_text_that_no_person_reads_must_be_unicode() -> None:
    with pytest.raises(FormatError, match=r"GangRequest: cannot be written: .* surrogates"):
        dumps(GangRequest(RestartRound(1), "\ud800"))


def test_a_quoted_value_does_not_make_an_error_long() -> None:
    data = b'{"tier": "' + b"x" * 100_000 + b'", "step": 1, "reason": "A", "message": ""}'
    with pytest.raises(FormatError, match=r"Failure\.tier: Invalid enum value 'xxx") as caught:
        loads(Failure, data)
    assert len(str(caught.value)) < 300


def test_the_largest_reply_follows_from_the_size_of_the_job():
    small = reply_limit_bytes(CoordinatorState, 8)
    assert small < 1 << 20
    assert reply_limit_bytes(Inventory, 1024) > 64 * small / 8
    assert reply_limit_bytes(Inventory, 1 << 18) == body_limit_bytes(Inventory)
    assert reply_limit_bytes(Refused, 1 << 18) == body_limit_bytes(Refused) < small


@pytest.mark.fault("A sidecar replies with millions of empty entries")
@pytest.mark.parametrize("kind", [Inventory, CoordinatorState])
@pytest.mark.parametrize("field", ["unknown", "manifests", "steps"])
@pytest.mark.parametrize("entry", [b"[],", b"{},", b'{"a":1},', b"1,"])
def test_empty_entries_take_little_memory(kind: type, field: str, entry: bytes) -> None:
    """As objects of Python they would take thirty times their bytes."""
    head = b'{"round":0,"version":0,"worker":0,"pod":"a","%s":[' % field.encode()
    body = head + entry * (2_000_000 // len(entry)) + entry[:-1] + b"]}"
    tracemalloc.start()
    with contextlib.suppress(FormatError):
        loads(kind, body, limit_bytes=len(body))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < len(body)


@pytest.mark.fault("A sidecar replies with the smallest entries that are valid")
def test_the_smallest_honest_entries_are_not_too_many():
    dead = tuple(DeadRank(Rank(0), Worker(0), 1) for _ in range(200_000))
    state = CoordinatorState(0, RestartRound(0), dead=dead)
    assert loads(CoordinatorState, dumps(state)) == state


@pytest.mark.fault("The last output of many ranks contains many brackets")
def test_brackets_in_texts_are_no_entries() -> None:
    """The text is the last output of many ranks with the same failure: arrays and nested lists."""
    text = ("array([[1, 0], [0, 1], [1, 1], [0, 0]]) " * 60)[:2048]
    dead = tuple(DeadRank(Rank(rank), Worker(rank), 1, text) for rank in range(256))
    state = CoordinatorState(0, RestartRound(0), dead=dead)
    assert loads(CoordinatorState, dumps(state)) == state
