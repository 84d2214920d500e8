"""Every rank acts on the same proposals after the same steps, in any order of requests, and with deaths.

No collective synchronises the ranks of these tests. A rank may be many steps ahead of another one.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.hang import HANG_SECONDS
from tests.support.trainer.dict_store import DictStore

from holdfast.gang.agreement import Proposals, Purpose
from holdfast.gang.store import GangStore


class Died(BaseException):
    """Raised in a thread whose process the test has killed."""


class Turns:
    """Runs threads one at a time. Each stops before its next request to the store."""

    def __init__(self) -> None:
        self._actors: dict[str, _Actor] = {}
        self._by_thread: dict[int, _Actor] = {}

    def add(self, name: str, work: Callable[[], None]) -> None:
        """Start a thread, which stops before its first statement."""
        self._actors[name] = _Actor(self._by_thread, work)

    @property
    def waiting(self) -> list[str]:
        """Names of the threads that have not ended."""
        return [name for name, actor in self._actors.items() if not actor.has_ended]

    def let_run(self, name: str) -> None:
        """Let a thread run until it stops before its next request, or ends. Raise what it raised."""
        self._actors[name].run()

    def kill(self, name: str) -> None:
        """End a thread in the place where it waits."""
        self._actors[name].kill()

    def stop_here(self) -> None:
        """Called by a thread: wait until the test lets it run."""
        self._by_thread[threading.get_ident()].stop_here()


class _Actor:
    def __init__(self, by_thread: dict[int, _Actor], work: Callable[[], None]) -> None:
        self.has_ended = False
        self._by_thread = by_thread
        self._work = work
        self._may_run = threading.Semaphore(0)
        self._has_stopped = threading.Semaphore(0)
        self._is_killed = False
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._main, daemon=True)
        self._thread.start()
        self._has_stopped.acquire()

    def run(self) -> None:
        self._may_run.release()
        self._has_stopped.acquire()
        if self._error is not None:
            raise self._error

    def kill(self) -> None:
        if not self.has_ended:
            self._is_killed = True
            self.run()

    def stop_here(self) -> None:
        self._has_stopped.release()
        self._may_run.acquire()
        if self._is_killed:
            raise Died

    def _main(self) -> None:
        self._by_thread[threading.get_ident()] = self
        try:
            self.stop_here()
            self._work()
        except Died:
            pass
        except Exception as error:  # noqa: BLE001 - `run` raises it in the test
            self._error = error
        finally:
            self.has_ended = True
            self._has_stopped.release()


class TurnStore(DictStore):
    """Store whose every request is one turn of the calling thread."""

    def __init__(self, turns: Turns) -> None:
        super().__init__()
        self._turns = turns

    def set(self, key: str, value: str, /) -> None:
        self._turns.stop_here()
        super().set(key, value)

    def get(self, key: str, /) -> bytes:
        self._turns.stop_here()
        return super().get(key)

    def check(self, keys: list[str], /) -> bool:
        self._turns.stop_here()
        return super().check(keys)

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        self._turns.stop_here()
        return super().compare_set(key, expected, desired)

    def add(self, key: str, amount: int, /) -> int:
        self._turns.stop_here()
        return super().add(key, amount)


SECRET = b"of the round"
RANKS = 3
STEPS = 12
Acts = dict[int, Purpose]
"""What a rank did, by step."""


class Gang:
    """Ranks whose training thread and polling thread take turns before every request to the store."""

    def __init__(self, wishes: dict[tuple[int, int], Purpose]) -> None:
        self.turns = Turns()
        self.acts: list[Acts] = [{} for _ in range(RANKS)]
        self.done = [0] * RANKS
        self._wishes = wishes
        store = GangStore(TurnStore(self.turns), "r0", SECRET)
        for rank in range(RANKS):
            proposals = Proposals(store, RANKS)
            proposals.begin(0)
            self.turns.add(f"{rank} trains", partial(self._train, rank, proposals))
            self.turns.add(f"{rank} polls", partial(self._poll, proposals))

    def _train(self, rank: int, proposals: Proposals) -> None:
        wish: Purpose | None = None
        for step in range(1, STEPS + 1):
            self.turns.stop_here()
            accepted = proposals.reach(step)
            if accepted is not None:
                self.acts[rank][step] = accepted.purpose
                wish = None if accepted.purpose is wish else wish
            self.done[rank] = step
            wish = self._wishes.get((rank, step), wish)
            if wish is not None:
                proposals.propose(wish)

    def _poll(self, proposals: Proposals) -> None:
        while True:
            self.turns.stop_here()
            proposals.poll()

    def kill(self, rank: int) -> None:
        for thread in ("trains", "polls"):
            self.turns.kill(f"{rank} {thread}")

    def end(self) -> None:
        for name in self.turns.waiting:
            self.turns.kill(name)


wishes = st.dictionaries(
    st.tuples(st.integers(0, RANKS - 1), st.integers(1, STEPS)),
    st.sampled_from([Purpose.SAVE, Purpose.STOP]),
    max_size=4,
)


@pytest.mark.fault("A rank dies between its vote and the named step")
@settings(max_examples=400, deadline=None)
@given(
    wishes,
    st.integers(0, 2**32),
    st.none() | st.tuples(st.integers(0, RANKS - 1), st.integers(0, 200)),
)
def test_all_ranks_save_the_same_steps_in_any_order_of_their_requests(
    asked: dict[tuple[int, int], Purpose], seed: int, death: tuple[int, int] | None
) -> None:
    """A killed rank has acted as the others did, up to the step that it had done."""
    gang = Gang(asked)
    order = random.Random(seed)
    speeds = {name: order.choice([1, 1, 5, 20]) for name in gang.turns.waiting}
    try:
        turn = 0
        # No rank waits for another one, so that every living rank trains to the end.
        while any(name.endswith("trains") for name in gang.turns.waiting):
            if death is not None and turn == death[1]:
                gang.kill(death[0])
            waiting = gang.turns.waiting
            (name,) = order.choices(waiting, [speeds[one] for one in waiting])
            gang.turns.let_run(name)
            turn += 1
    finally:
        gang.end()
    for rank, acts in enumerate(gang.acts):
        for other, theirs in enumerate(gang.acts):
            common = min(gang.done[rank], gang.done[other])
            assert _until(acts, common) == _until(theirs, common)


def _until(acts: Acts, step: int) -> Acts:
    return {done: purpose for done, purpose in acts.items() if done <= step}


class Lockstep:
    """Ranks that do their steps together. Every rank polls after each step."""

    def __init__(self, plain: DictStore | None = None) -> None:
        store = GangStore(plain or DictStore(), "r0", SECRET)
        self.ranks = [Proposals(store, RANKS) for _ in range(RANKS)]
        for rank in self.ranks:
            rank.begin(0)

    def poll(self) -> None:
        for _ in range(2):
            for rank in self.ranks:
                rank.poll()

    def steps_until(self, wish: Purpose, first: int, *, asks: int = 0) -> int:
        """Do steps from `first` on until all ranks act on the wish of one. Return how many they did."""
        for step in range(first, first + 1000):
            found = {rank.reach(step) for rank in self.ranks}
            assert len(found) == 1
            accepted = found.pop()
            if accepted is not None:
                assert (accepted.purpose, accepted.step) == (wish, step)
                return step - first + 1
            self.ranks[asks].propose(wish)
            self.poll()
        raise AssertionError("the ranks have not agreed within 1000 steps")

    def nothing_at(self, step: int) -> bool:
        return all(rank.reach(step) is None for rank in self.ranks)


def test_ranks_in_lockstep_meet_a_request_within_three_steps_and_once() -> None:
    gang = Lockstep()
    assert gang.steps_until(Purpose.SAVE, 1) == 3
    gang.poll()
    assert all(gang.nothing_at(step) for step in range(5, 20))


@pytest.mark.fault("A rank has passed the step that a proposal names")
def test_a_rank_that_has_passed_the_step_makes_the_gang_agree_on_a_later_one() -> None:
    gang = Lockstep()
    gang.ranks[0].propose(Purpose.SAVE)
    gang.ranks[2].reach(100)
    gang.poll()
    assert gang.nothing_at(101)
    assert gang.steps_until(Purpose.SAVE, 102) == 5  # four steps ahead, instead of two


@pytest.mark.fault("A rank votes for nothing")
def test_a_rank_that_never_polls_delays_no_rank_and_nothing_is_agreed() -> None:
    gang = Lockstep()
    for step in range(1, 100):
        gang.ranks[0].propose(Purpose.STOP)
        gang.ranks[0].poll()
        gang.ranks[1].poll()
        assert gang.nothing_at(step)


def test_late_votes_move_the_named_step_further_ahead() -> None:
    """Rank 2 polls once in ten steps. The ranks agree as soon as the named step is that far ahead."""
    gang = Lockstep()
    for step in range(1, 1000):
        found = [rank.reach(step) for rank in gang.ranks]
        assert len(set(found)) == 1
        if found[0] is not None:
            assert step > 10
            return
        gang.ranks[0].propose(Purpose.SAVE)
        for rank in gang.ranks[: 3 if step % 10 == 0 else 2]:
            rank.poll()
    raise AssertionError("the ranks have not agreed")


def test_a_rollback_drops_what_was_agreed_for_the_repeated_steps() -> None:
    gang = Lockstep()
    gang.ranks[0].propose(Purpose.SAVE)
    gang.poll()
    for rank in gang.ranks:
        rank.roll_back()
        rank.begin(0)
    assert all(gang.nothing_at(step) for step in range(1, 9))
    assert gang.steps_until(Purpose.SAVE, 9, asks=1) == 3


def test_a_proposal_of_before_a_rollback_is_not_voted_for_after_it() -> None:
    gang = Lockstep()
    gang.ranks[0].propose(Purpose.STOP)
    for rank in gang.ranks:
        rank.roll_back()
        rank.begin(0)
    gang.poll()
    assert all(gang.nothing_at(step) for step in range(1, 9))


def test_entries_of_a_foreign_process_only_use_up_numbers() -> None:
    plain = DictStore()
    gang = Lockstep(plain)
    for number in range(3):
        plain.set(f"proposal/{number}", '[0, 9, "stop", 0]')
        plain.set(f"decision/{number}", "accepted")
    for step in range(1, 5):
        gang.poll()
        assert gang.nothing_at(step)
    assert gang.steps_until(Purpose.SAVE, 5) == 3


@pytest.mark.parametrize("text", ["", "null", "[1]", '[0, 9, "sing", 0]', "[" * 100_000])
def test_without_a_secret_an_invalid_proposal_only_uses_up_its_number(text: str) -> None:
    plain = DictStore({"proposal/0": text})
    ranks = [Proposals(GangStore(plain), 2) for _ in range(2)]
    for rank in ranks:
        rank.begin(0)
        rank.poll()
    ranks[0].propose(Purpose.SAVE)
    for rank in ranks:
        rank.poll()
    assert [rank.reach(9) is not None for rank in ranks] == [True, True]


@pytest.mark.fault("The gang's store ends")
def test_a_store_that_fails_raises_in_the_training_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.gang.agreement._CLOSE_SECONDS", HANG_SECONDS)

    class Gone(DictStore):
        failed = threading.Event()

        def check(self, keys: list[str], /) -> bool:
            self.failed.set()
            raise ConnectionResetError("the store's process has ended")

    store = Gone()
    one = Proposals(GangStore(store, "r0", SECRET), 2)
    one.begin(0)
    one.start()
    assert store.failed.wait(HANG_SECONDS)
    one.close()
    with pytest.raises(ConnectionResetError, match="has ended"):
        one.reach(1)


@pytest.mark.fault("A Checkpointer is collected in its own polling thread")
def test_the_polling_thread_itself_may_close() -> None:
    """The collector may run in it and find that the Checkpointer is not referenced any more."""
    errors: list[Exception] = []
    closed = threading.Event()

    class Closing(DictStore):
        def check(self, keys: list[str], /) -> bool:
            try:
                one.close()
            except RuntimeError as error:
                errors.append(error)
            closed.set()
            return False

    one = Proposals(GangStore(Closing(), "r0", SECRET), 2)
    one.begin(0)
    one.start()
    assert closed.wait(HANG_SECONDS)
    assert errors == []
