"""Letters of a relay as bytes, and bodies that are none."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_core.errors import FormatError
from holdfast_core.ids import RestartRound, Worker
from holdfast_core.messages.report import Answer, Letter, Relay, RelayReply, decode, encode
from holdfast_core.messages.schema import Ok

workers = st.lists(st.integers(0, 4095).map(Worker), max_size=3).map(tuple)
letters = st.builds(Letter, st.text("/v1abc", max_size=9), workers, st.binary(max_size=50))
answers = st.builds(Answer, st.integers(0, 999), st.binary(max_size=50))


@given(st.lists(letters, max_size=5).map(tuple))
def test_letters_survive(sent: tuple[Letter, ...]) -> None:
    message = Relay(RestartRound(3), sent)
    assert decode(Relay, encode(message)) == message


@given(st.lists(answers, max_size=5).map(tuple))
def test_answers_survive(sent: tuple[Answer, ...]) -> None:
    message = RelayReply(RestartRound(3), sent)
    assert decode(RelayReply, encode(message)) == message


def test_other_messages_are_json() -> None:
    assert decode(Ok, encode(Ok(RestartRound(3), wants_shards=True))) == Ok(
        RestartRound(3), wants_shards=True
    )
    assert encode(Ok(RestartRound(3), wants_shards=True, stacks_token="a")) == (
        b'{"round":3,"wants_shards":true,"stacks_token":"a"}'
    )


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b'{"round":1,"parts":[]}', id="no end of the first line"),
        pytest.param(b'{"round":1,"parts":[]}\nx', id="bytes of no letter"),
        pytest.param(b'{"round":1,"parts":[{"size_bytes":2}]}\nx', id="cut short"),
        pytest.param(b'{"round":1,"parts":[{"size_bytes":-1}]}\n', id="a negative length"),
        pytest.param(b'{"round":1,"parts":[{"size_bytes":9e18}]}\n', id="a length that is no int"),
        pytest.param(
            b'{"round":1,"parts":[{"size_bytes":0,"workers":[4160]}]}\n', id="no such worker"
        ),
        pytest.param(b"[]\n", id="a list"),
    ],
)
@pytest.mark.parametrize("kind", [Relay, RelayReply])
def test_a_body_that_is_not_whole_is_refused(kind: type[object], body: bytes) -> None:
    with pytest.raises(FormatError):
        decode(kind, body)


@given(st.binary(max_size=200))
def test_any_bytes_are_letters_or_a_format_error(body: bytes) -> None:
    try:
        message = decode(Relay, body)
    except FormatError:
        return
    assert decode(Relay, encode(message)) == message
