"""Only the policy of the accepted ROUND decides whether payloads may leave TLS."""

from __future__ import annotations

import pytest
from tests.support.sidecar.rounds import accepted, round_message

from holdfast_core.ids import RestartRound, Worker
from holdfast_core.messages.schema import Policy
from holdfast_sidecar.base.rounds import RoundState
from holdfast_sidecar.wire.bulk import plain_copies

ROUND = RestartRound(5)


def accepting(policy: Policy) -> RoundState:
    return accepted(round_message(ROUND, policy=policy))


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        pytest.param(RoundState(Worker(0), 1, ROUND, "gpt-0-r0"), False, id="sealed"),
        pytest.param(accepting(Policy(1)), False, id="by default"),
        pytest.param(accepting(Policy(1, peer_encryption="TLS")), False, id="TLS"),
        pytest.param(accepting(Policy(1, peer_encryption="None")), True, id="None"),
        pytest.param(accepting(Policy(1, peer_encryption="none")), False, id="an unknown word"),
        pytest.param(accepting(Policy(1, peer_encryption="")), False, id="no word"),
    ],
)
def test_payloads_leave_tls_only_if_the_policy_allows_it(state: RoundState, expected: bool) -> None:
    assert plain_copies(state) is expected
