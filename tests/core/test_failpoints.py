"""The rules of the failpoints, which the tests turn on."""

from __future__ import annotations

import pytest
from tests.support.crash.failpoints import parse_rules

from holdfast_core.errors import ConfigError


@pytest.mark.parametrize("text", ["x", "x=", "x=boom", "x=err@y", "x=sleep:z"])
def test_failpoint_rules_that_make_no_sense(text: str) -> None:
    with pytest.raises(ConfigError, match="no rule"):
        parse_rules(text)


def test_failpoint_rules() -> None:
    (a, b) = parse_rules("node.write=err@3,x.y=sleep:0.5")
    assert (a.name, a.action, a.at) == ("node.write", "err", 3)
    assert (b.name, b.action, b.seconds, b.at) == ("x.y", "sleep", 0.5, None)
