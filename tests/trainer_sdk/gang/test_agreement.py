"""All ranks see the same verdict after the same step, however requests and steps interleave."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.trainer.dict_store import DictStore
from tests.support.trainer.polled import PolledByHand

from holdfast.connection.session import Session
from holdfast.gang.agreement import StepAgreement, Verdict
from holdfast.gang.store import GangStore
from holdfast_core.ids import JobUid, Rank, RestartRound, Step
from holdfast_core.messages.schema import Plan

ROUND = RestartRound(0)
SECRET = b"of the round"


def sessions(count: int) -> list[Session]:
    return [Session(JobUid("job"), Rank(rank), ROUND) for rank in range(count)]


class Gang:
    """Ranks that do their steps together. The test polls for them."""

    def __init__(self, count: int, *, interval_steps: int = 0, plain: DictStore | None = None):
        self.sessions = sessions(count)
        self._interval_steps = interval_steps
        store = GangStore(DictStore() if plain is None else plain, "r0", SECRET)
        self.proposals = [PolledByHand(store, count) for _ in range(count)]
        self.ranks = [
            StepAgreement(session, store, proposals)
            for session, proposals in zip(self.sessions, self.proposals, strict=True)
        ]
        self.begin(0)

    def begin(self, step: int) -> None:
        for rank in self.ranks:
            rank.begin(step, self._interval_steps)

    def after_step(self, step: int, order: list[int] | None = None) -> Verdict:
        """Let all ranks finish a step, in this order, and poll. Return the verdict, which is the same."""
        found = {self.ranks[rank].after_step(step) for rank in order or range(len(self.ranks))}
        self.poll()
        assert len(found) == 1
        return found.pop()

    def poll(self) -> None:
        for one in (*self.proposals, *self.proposals):
            one.poll()


def test_a_single_rank_follows_a_request_after_its_step() -> None:
    (session,) = sessions(1)
    agreement = StepAgreement(session, None, None)
    agreement.begin(0, 0)
    assert agreement.after_step(1) == Verdict()
    session.push(Plan(ROUND, save_from=Step(2)))
    session.push(Plan(ROUND, save_from=Step(2)))
    assert agreement.after_step(2) == Verdict(save=True)
    session.push(Plan(ROUND, save_from=Step(2)))  # after a new connection
    assert agreement.after_step(3) == Verdict()
    session.push(Plan(ROUND, save_from=Step(2), stop=True))
    assert agreement.after_step(4) == Verdict(stop=True)


@pytest.mark.fault("A save is requested while another rank is a step ahead of rank 0")
def test_a_request_waits_for_the_steps_that_other_ranks_had_done() -> None:
    """A save of an earlier step would not have what had been trained when the save was requested."""
    (session,) = sessions(1)
    agreement = StepAgreement(session, None, None)
    agreement.begin(0, 0)
    session.push(Plan(ROUND, save_from=Step(1)))
    session.push(Plan(ROUND, save_from=Step(3)))  # a second request, before the first one is met
    assert [agreement.after_step(step).save for step in range(1, 5)] == [False, False, True, False]
    session.push(Plan(ROUND, save_from=Step(6)))
    assert [agreement.after_step(step).save for step in range(5, 8)] == [False, True, False]


events = st.lists(
    st.tuples(st.sampled_from(["save", "stop", "signal"]), st.integers(0, 2), st.integers(1, 9)),
    max_size=4,
)


@given(events, st.lists(st.permutations([0, 1, 2]), min_size=20, max_size=20))
def test_every_rank_comes_to_the_same_decision(
    asked: list[tuple[str, int, int]], orders: list[list[int]]
) -> None:
    """Within a step, ranks run in any order."""
    gang = Gang(3)
    saved = stopped = 0
    for step, order in enumerate(orders, start=1):
        for what, rank, at in asked:
            if at == step:
                if what == "save":
                    gang.sessions[0].push(Plan(ROUND, save_from=Step(step + rank)))
                elif what == "stop":
                    gang.sessions[0].push(Plan(ROUND, stop=True))
                else:
                    gang.sessions[rank].requests.request_stop()
        verdict = gang.after_step(step, order)
        saved = step if verdict.save else saved
        stopped = step if verdict.stop else stopped
        if stopped:
            break
    stops = [at for what, _, at in asked if what != "save"]
    saves = [
        at + ahead
        for what, ahead, at in asked
        if what == "save" and at < (min(stops) if stops else 99)
    ]
    # A request may have to wait for the step that was named for the request before it.
    assert not stops or min(stops) < stopped <= min(stops) + 7
    assert not saves or saved >= max(saves) or stopped >= max(saves)


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
    gang = Gang(3, interval_steps=interval)
    vetoed: set[int] = set()
    for step, order in enumerate(orders):
        seen = set()
        for rank in order:
            if step % interval == 0:
                seen.add(gang.ranks[rank].is_vetoed(step))
            due = -(-(step + 1) // interval) * interval
            if rank in full[step]:
                gang.ranks[rank].veto(due, step + 1, interval)
                vetoed |= {due} if due == step + 1 else set()
        assert seen <= {step in vetoed}


def test_vetoes_are_read_at_the_first_saves_and_again_while_a_rank_is_short_of_slots() -> None:
    gang = Gang(2, interval_steps=2)

    def is_vetoed(due: int) -> bool:
        """Let rank 1 have no slot at `due`, and return whether all ranks leave that save out."""
        gang.ranks[1].veto(due, due, 2)
        found = {rank.is_vetoed(due) for rank in gang.ranks}
        assert len(found) == 1
        return found.pop()

    assert is_vetoed(32)
    for step in range(1, 100):  # a veto at step 32 renews them, for 16 saves
        assert gang.after_step(step) == Verdict()
    assert not is_vetoed(100)
    assert [gang.after_step(step) for step in range(100, 104)] == [Verdict()] * 4
    gang.poll()
    assert is_vetoed(104)
    assert is_vetoed(110)


@pytest.mark.fault("A stranger asks ranks to stop")
def test_a_request_without_the_secret_is_ignored() -> None:
    plain = DictStore()
    gang = Gang(2, interval_steps=1, plain=plain)
    for number in range(4):
        plain.set(f"proposal/{number}", '[0, 3, "stop", 0]')
        plain.set(f"decision/{number}", "accepted")
    plain.set("full/0/0", "2")
    plain.set("full/0/1", "3")
    for step in range(1, 9):
        assert gang.after_step(step) == Verdict()
        assert not gang.ranks[0].is_vetoed(step)
    gang.sessions[1].requests.request_stop()  # a request of the gang itself still counts
    assert [gang.after_step(step) for step in range(9, 12)] == [
        *[Verdict()] * 2,
        Verdict(stop=True),
    ]


def test_repeated_steps_are_agreed_on_again() -> None:
    gang = Gang(2, interval_steps=2)
    gang.sessions[0].push(Plan(ROUND, save_from=Step(1)))
    assert [gang.after_step(step).save for step in range(1, 4)] == [False, False, True]
    gang.ranks[1].veto(6, 6, 2)
    for rank in gang.ranks:
        rank.roll_back()
    gang.begin(0)
    assert not any(gang.after_step(step).save for step in range(1, 9))
    assert not gang.ranks[0].is_vetoed(6)
