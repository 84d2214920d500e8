"""The reasons of conditions and Events, which users match in scripts and alerts."""

from __future__ import annotations

import pytest

from holdfast_operator.model.reasons import Reason


@pytest.mark.fault("A reason of a condition or an Event is renamed by mistake")
@pytest.mark.parametrize("reason", Reason)
def test_a_reason_is_its_name_in_camel_case(reason: Reason) -> None:
    words = {"OOM": "OOM"}
    name = "".join(words.get(word, word.capitalize()) for word in reason.name.split("_"))
    assert reason.value == name
