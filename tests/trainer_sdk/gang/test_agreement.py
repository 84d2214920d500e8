"""All ranks see the same verdict after the same step, however requests and steps interleave."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tests.support.trainer.dict_store import DictStore

from holdfast.connection.session import Session
from holdfast.gang.agreement import StepAgreement, Verdict
from holdfast.gang.store import GangStore
from holdfast_core.ids import JobUid, Rank, RestartRound
from holdfast_core.messages.schema import SaveRequested, StopRequested

ROUND = RestartRound(0)
SECRET = b"of the round"


def sessions(count: int) -> list[Session]:
    return [Session(JobUid("job"), Rank(rank), ROUND) for rank in range(count)]


def test_a_single_rank_follows_a_request_after_its_step() -> None:
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
def test_every_rank_comes_to_the_same_decision(
    asked: list[tuple[str, int, int]], orders: list[list[int]]
) -> None:
    """Within a step, ranks run in any order; only the step's collective synchronizes them."""
    store = GangStore(DictStore(), "r0", SECRET)
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
                    gang[rank].request_stop()
        verdicts[step] = {agreements[rank].after_step(step) for rank in order}
        assert len(verdicts[step]) == 1
        if verdicts[step].pop().stop:
            return
    wanted = [at for what, _, at in asked if what != "save" and at >= 1]
    assert not wanted or min(wanted) >= 8, "a stop was not met within two steps"


@given(
    st.lists(st.sets(st.integers(0, 2)), min_size=10, max_size=10),
    st.lists(st.permutations([0, 1, 2]), min_size=10, max_size=10),
    st.sampled_from([1, 2, 3]),
)
def test_all_ranks_or_none_skip_a_save(
    full: list[set[int]], orders: list[list[int]], interval: int
) -> None:
    """`full[s]`: the ranks that have no slot when step s + 1 starts. In each step, the ranks read and
    write the store in any order; only the step's collective synchronizes them."""
    store = GangStore(DictStore(), "r0", SECRET)
    agreements = [StepAgreement(s, store, Rank(r)) for r, s in enumerate(sessions(3))]
    told: set[int] = set()
    for step, order in enumerate(orders):
        seen = set()
        for rank in order:
            if step % interval == 0:
                seen.add(agreements[rank].is_left_out(step))
            if (step + 1) % interval == 0 and rank in full[step]:
                agreements[rank].leave_out(step + 1)
                told.add(step + 1)
        assert seen <= {step in told}


def test_a_request_without_the_secret_is_ignored() -> None:
    plain = DictStore()
    store = GangStore(plain, "r0", SECRET)
    gang = sessions(2)
    agreements = [StepAgreement(session, store, Rank(r)) for r, session in enumerate(gang)]
    for agreement in agreements:
        agreement.begin(0)
    for key in ("stop-wanted", *(f"at/0/{step}" for step in range(1, 9)), "full/0/0", "full/0/1"):
        plain.set(key, "stop" if key.startswith("at") else "1")
    for step in range(1, 9):
        assert [one.after_step(step) for one in agreements] == [Verdict(), Verdict()]
        assert not agreements[0].is_left_out(step)
    gang[1].request_stop()  # a request of the gang itself still counts
    for step in (9, 10):
        assert [one.after_step(step) for one in agreements] == [Verdict(), Verdict()]
    assert [one.after_step(11) for one in agreements] == [Verdict(stop=True)] * 2


def test_repeated_steps_are_agreed_on_again() -> None:
    store = GangStore(DictStore())
    (session,) = sessions(1)
    agreement = StepAgreement(session, store, Rank(0))
    session.push(SaveRequested(ROUND, "a"))
    agreement.begin(0)
    assert agreement.after_step(1) == Verdict(save=True)
    agreement.leave_out(2)
    agreement.roll_back()
    agreement.begin(0)
    assert agreement.after_step(1) == Verdict()
    assert not agreement.is_left_out(2)
