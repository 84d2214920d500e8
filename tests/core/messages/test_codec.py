"""Every message is decoded as it was encoded, and hostile JSON is refused with its path."""

from __future__ import annotations

import dataclasses
import typing

import pytest

from holdfast_core.errors import FormatError
from holdfast_core.ids import Digest, Level, Rank, RestartRound, Step, Worker
from holdfast_core.messages import schema
from holdfast_core.messages.bounds import body_limit_bytes, reply_limit_bytes
from holdfast_core.messages.codec import dumps, loads
from holdfast_core.messages.schema import (
    CoordinatorState,
    CopyAssignment,
    DeadRank,
    Exited,
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
    StepState,
)

STEP = StepState(Step(5), RestartRound(1), None, 1, 0, 0, 4)


def test_a_field_that_is_none_survives_also_without_a_default():
    state = CoordinatorState(3, RestartRound(1), steps=(STEP,))
    assert loads(CoordinatorState, dumps(state)) == state


def test_values_keep_their_types():
    state = CoordinatorState(
        3,
        RestartRound(1),
        steps=(dataclasses.replace(STEP, level=Level.LOCAL),),
        last_local=RestorePoint(Step(5), RestartRound(1), Digest("b3:" + "0" * 64)),
        progress=GangProgress(2, Step(7), Step(8), 15, 1.5),
    )
    back = loads(CoordinatorState, dumps(state))
    assert back == state
    assert back.steps[0].level is Level.LOCAL


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
        copies=(CopyAssignment(Worker(0), Worker(1)),),
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
    return b'{"round": 1, "rank": 0, "step": 1, "blockedSeconds": ' + blocked_seconds + b"}"


HOSTILE = {
    "not JSON": (Seal, b"{", "not valid JSON"),
    "duplicate keys": (Seal, b'{"round": 1, "round": 2}', "duplicate key 'round'"),
    "missing field": (Seal, b"{}", "Seal: field round is missing"),
    "wrong type": (Seal, b'{"round": "1"}', "Seal.round: expected int, found str"),
    "a boolean is no number": (Seal, b'{"round": true}', "Seal.round: expected int, found bool"),
    "over 64 bits": (
        Seal,
        b'{"round": 9223372036854775808}',
        "Seal.round: the number is not within",
    ),
    "thousands of digits": (Seal, b'{"round": ' + b"9" * 4000 + b"}", "is not within"),
    "below zero": (Seal, b'{"round": -1}', "Seal.round: the number is not within 0.."),
    "too large for a float": (Progress, progress(b"1" * 400), ".blockedSeconds: the number is too"),
    "infinite": (Progress, progress(b"1e999"), ".blockedSeconds: inf is not a number within 0"),
    "not a number": (Progress, progress(b"NaN"), ".blockedSeconds: nan is not a number within 0"),
    "negative time": (Progress, progress(b"-1"), ".blockedSeconds: -1.0 is not a number within 0"),
    "half a surrogate pair in a name": (
        GangRequest,
        b'{"round": 1, "token": "\\ud800"}',
        "GangRequest.token: the text has a surrogate without its pair",
    ),
    "a long name": (
        GangRequest,
        b'{"round": 1, "token": "' + b"x" * 2000 + b'"}',
        "GangRequest.token: 2000 characters, at most 1024",
    ),
    "a reason that no condition takes": (
        Failure,
        b'{"tier": "node", "reason": "", "message": ""}',
        "Failure.reason: '' does not match",
    ),
    "a long list": (
        Round,
        dumps(
            Round(RestartRound(1), 1, RestorePoint(), Worker(0), Worker(0), 1, (), (), Policy(5))
        ).replace(b'"pinned":[]', b'"pinned":[' + b"1," * 5000 + b"1]"),
        "Round.pinned: 5001 entries, at most 4096",
    ),
    "one bad item of many": (
        Round,
        dumps(
            Round(RestartRound(1), 1, RestorePoint(), Worker(0), Worker(0), 1, (), (), Policy(5))
        ).replace(b'"pinned":[]', b'"pinned":[1,2,"x"]'),
        "Round.pinned[2]: expected int, found str",
    ),
    "depth where nothing is known": (
        Seal,
        b'{"round": 1, "more": ' + b"[" * 40 + b"]" * 40 + b"}",
        "more than 32 objects and lists",
    ),
    "a list where an object belongs": (Seal, b"[]", "expected an object, found list"),
    "an unknown enum value": (
        StepState,
        b'{"step":1,"round":1,"level":"x","prepared":0,"replicated":0,"uploaded":0,"worldSize":1}',
        "'x' is not one of",
    ),
    "a wrong type deep inside": (
        Round,
        dumps(
            Round(RestartRound(1), 1, RestorePoint(), Worker(0), Worker(0), 1, (), (), Policy(5))
        ).replace(b'"intervalSteps":5', b'"intervalSteps":null'),
        "Round.policy.intervalSteps: expected int, found NoneType",
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


@pytest.mark.parametrize("kind", _messages(), ids=lambda k: k.__name__)
def test_every_message_has_hints_that_the_codec_knows(kind):
    """Otherwise a union of two types, or a set, would fail only when the message is sent."""
    for hint in typing.get_type_hints(kind).values():
        assert typing.get_origin(hint) is not set
        if typing.get_origin(hint) is typing.Union:
            assert len([a for a in typing.get_args(hint) if a is not type(None)]) == 1


def test_free_text_is_cut_and_repaired():
    data = b'{"round": 1, "rank": 0, "code": 1, "message": "' + b"x" * 4095 + b'\\ud83d\\ud83d"}'
    assert loads(Exited, data).message == "x" * 4095 + "?"


def test_what_a_script_reports_reaches_prometheus():
    """Names become label values of /metrics, which is UTF-8: one bad name would break the whole page."""
    values = ",".join(f'"n{i}": 1' for i in range(100))
    head = '{"round": 1, "rank": 0, "step": 1, "metrics": {"\\ud800": NaN, "big": 1e999, '
    found = loads(Progress, f"{head}{values}}}}}".encode()).metrics
    assert len(found) == 64
    assert list(found)[:2] == ["?", "big"]
    assert found["big"] == float("inf")


def test_the_largest_reply_follows_from_the_size_of_the_job():
    small = reply_limit_bytes(CoordinatorState, 8)
    assert small < 1 << 20
    assert reply_limit_bytes(Inventory, 1024) > 64 * small / 8
    assert reply_limit_bytes(Inventory, 1 << 18) == body_limit_bytes(Inventory)
    assert reply_limit_bytes(Refused, 1 << 18) == body_limit_bytes(Refused) < small


@pytest.mark.fault("A sidecar replies with millions of empty entries")
@pytest.mark.parametrize("kind", [Inventory, CoordinatorState])
@pytest.mark.parametrize("entry", [b"[],", b"{},", b'{"a":1},'])
def test_many_empty_entries_are_refused_before_they_are_parsed(kind, entry):
    """Such entries take thirty times their bytes in memory. Only parsing would find the broken end."""
    body = b'{"unknown":[' + entry * 100_000
    with pytest.raises(FormatError, match=f"^{kind.__name__}: more than .* objects and lists in"):
        loads(kind, body)


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
