"""The reasons of conditions and Events, which users match in scripts and alerts."""

from __future__ import annotations

import pytest

from holdfast_operator.model.reasons import Reason


@pytest.mark.fault("A reason of a condition or an Event is renamed by mistake")
def test_a_reason_is_its_name_in_camel_case() -> None:
    words = {"OOM": "OOM"}
    for reason in Reason:
        name = "".join(words.get(word, word.capitalize()) for word in reason.name.split("_"))
        assert reason.value == name
