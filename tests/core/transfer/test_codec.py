"""The codec: every message survives the wire, and hostile JSON is refused with its path."""

from __future__ import annotations

import dataclasses
import typing

import pytest

from holdfast_core.errors import FormatError
from holdfast_core.ids import Digest, Level, RestartRound, Step, Worker
from holdfast_core.transfer import messages
from holdfast_core.transfer.codec import dumps, loads
from holdfast_core.transfer.messages import (
    CoordinatorState,
    Policy,
    RankProgress,
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
        progress=(RankProgress(0, Step(7), {"loss": 1.5}),),
    )
    back = loads(CoordinatorState, dumps(state))
    assert back == state
    assert back.steps[0].level is Level.LOCAL


def test_unknown_fields_of_a_newer_sender_are_ignored():
    assert loads(Seal, b'{"round": 3, "colour": "red"}') == Seal(RestartRound(3))


HOSTILE = {
    "not JSON": (Seal, b"{", "not valid JSON"),
    "duplicate keys": (Seal, b'{"round": 1, "round": 2}', "duplicate key 'round'"),
    "missing field": (Seal, b"{}", "Seal: field round is missing"),
    "wrong type": (Seal, b'{"round": "1"}', "Seal.round: expected int, found str"),
    "a boolean is no number": (Seal, b'{"round": true}', "Seal.round: expected int, found bool"),
    "over 64 bits": (Seal, b'{"round": 9223372036854775808}', "does not fit 64 bits"),
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


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_input_is_refused_with_its_path(case):
    kind, data, words = HOSTILE[case]
    with pytest.raises(FormatError) as caught:
        loads(kind, data)
    assert words in str(caught.value)


def test_deep_nesting_is_refused():
    with pytest.raises(FormatError):
        loads(Seal, b"[" * 100_000)


def test_too_large_is_refused_before_it_is_parsed():
    with pytest.raises(FormatError, match="at most 10"):
        loads(Seal, b'{"round": 1, "x": "..."}', limit_bytes=10)


def _messages() -> list[type]:
    return [
        kind
        for kind in vars(messages).values()
        if isinstance(kind, type) and dataclasses.is_dataclass(kind)
    ]


@pytest.mark.parametrize("kind", _messages(), ids=lambda k: k.__name__)
def test_every_message_has_hints_that_the_codec_knows(kind):
    """A union of two types, or a set, would fail only when the message is sent."""
    for hint in typing.get_type_hints(kind).values():
        assert typing.get_origin(hint) is not set
        if typing.get_origin(hint) is typing.Union:
            assert len([a for a in typing.get_args(hint) if a is not type(None)]) == 1
