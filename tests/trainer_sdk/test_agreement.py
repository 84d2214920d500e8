"""All ranks see the same verdict after the same step, however requests and steps interleave."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from holdfast.agreement import StepAgreement, Verdict
from holdfast.session import Session
from holdfast_core.ids import JobUid, Rank, RestartRound
from holdfast_core.transfer.messages import SaveRequested, StopRequested

ROUND = RestartRound(0)


@dataclass
class DictStore:
    """The gang's store within one process."""

    values: dict[str, str] = field(default_factory=dict)

    def set(self, key: str, value: str, /) -> None:
        self.values[key] = value

    def get(self, key: str, /) -> bytes:
        return self.values[key].encode()

    def add(self, key: str, amount: int, /) -> int:
        raise NotImplementedError

    def check(self, keys: list[str], /) -> bool:
        return all(key in self.values for key in keys)


def sessions(count: int) -> list[Session]:
    return [Session(JobUid("job"), Rank(rank), ROUND) for rank in range(count)]


def test_alone_a_request_is_met_after_the_step() -> None:
    (session,) = sessions(1)
    agreement = StepAgreement(session, None, Rank(0))
    agreement.begin(0)
    assert agreement.after_step(1) == Verdict()
    session.push(SaveRequested(ROUND, "a"))
    session.push(SaveRequested(ROUND, "a"))
    assert agreement.after_step(2) == Verdict(save=True)
    assert agreement.after_step(3) == Verdict()
    session.push(StopRequested(ROUND, "b"))
    assert agreement.after_step(4) == Verdict(stop=True)


events = st.lists(
    st.tuples(st.sampled_from(["save", "stop", "signal"]), st.integers(0, 2), st.integers(0, 9)),
    max_size=4,
)


@given(events, st.lists(st.permutations([0, 1, 2]), min_size=10, max_size=10))
def test_every_rank_agrees(asked: list[tuple[str, int, int]], orders: list[list[int]]) -> None:
    """Within a step ranks run in any order; the step's collective keeps them together."""
    store = DictStore()
    gang = sessions(3)
    agreements = [StepAgreement(session, store, Rank(r)) for r, session in enumerate(gang)]
    for agreement in agreements:
        agreement.begin(0)
    verdicts: dict[int, set[Verdict]] = {}
    for step, order in enumerate(orders, start=1):
        for number, (what, rank, at) in enumerate(asked):
            if at == step:
                if what == "save":
                    gang[0].push(SaveRequested(ROUND, f"{number}"))
                elif what == "stop":
                    gang[0].push(StopRequested(ROUND, f"{number}"))
                else:
                    gang[rank].want_stop()
        verdicts[step] = {agreements[rank].after_step(step) for rank in order}
        assert len(verdicts[step]) == 1
        if verdicts[step].pop().stop:
            return
    wanted = [at for what, _, at in asked if what != "save" and at >= 1]
    assert not wanted or min(wanted) >= 8, "a stop was not met within two steps"
