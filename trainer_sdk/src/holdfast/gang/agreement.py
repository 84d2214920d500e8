"""Agreement of all ranks on the steps to save and on the last step, without an additional collective.

 * Saves at the interval follow from the step number and need no agreement. If rank 0 measures the interval,
   it proposes the number of steps when that changes, and all ranks use it after the same step.
 * For a request (save now, stop) a rank proposes a step ahead. Rank 0 receives the requests of the operator,
   and every rank may have received a signal to stop.
 * A step is committed only if every rank saved it, and ranks that decided alone would seldom skip the same
   steps. A rank without a free slot therefore vetoes the next save:
    1. It writes `full/<lap>/<parity>` before it starts the step at which the save is due.
    2. No rank leaves the collective of that step before all ranks have entered it.
    3. After the step, every rank reads this key. All ranks read the same value.

A proposal is an atomic commit that never blocks (ADR 0017). Its decision is a key of the gang's store that is
written once:
 1. A rank writes proposal n. It names a step that no rank is expected to have done when it has read it.
 2. The polling thread of each rank reads the proposal. If the rank has not done the step, the rank votes
    for it by a counter. Otherwise it writes the decision `rejected`.
 3. The rank whose vote completes the counter writes the decision `accepted`.
 4. A rank that has done the step writes `rejected`, and reads the decision with the same request.
The first write of the decision counts. `accepted` therefore means that every rank has voted and reads the
decision after the step. After a rejection, a rank proposes its request again for a later step. No collective
is needed, and no rank waits. If a rank or the rank that proposed dies, the decision is `accepted` or
`rejected` for all other ranks, too. The training thread sends a request to the store only after a named step.

Reading vetoes costs a request of every rank at each save. Ranks therefore read them at the first saves of
a run, and later only while a proposal for `Purpose.VETO` lasts. A rank whose slots are all busy makes one.
A rank whose slots fill up when no vetoes are read skips its save alone, until its proposal is accepted.

The values are signed with the secret of the round (see `gang.store`), so that only its ranks can request
a stop.
"""

from __future__ import annotations

import atexit
import json
import os
import random
import threading
from dataclasses import dataclass
from enum import StrEnum

from holdfast.connection.session import Session
from holdfast.gang.store import GangStore

_ACCEPTED = "accepted"
_REJECTED = "rejected"
_SHORTEST_PERIOD_SECONDS = 0.05
_POLLS_PER_SECOND = 2000.0
"""Requests of a whole gang to its store, while there is no proposal. A store serves about 30,000."""
_CLOSE_SECONDS = 1.0
_LEAST_STEPS = 2
"""The rank that proposes may be one step behind another rank, and both may be at the end of a step."""
_RANKS_PER_STEP = 1000
"""In a larger gang, the polls and the votes take longer, and so do the steps."""
_MOST_STEPS = 1 << 20


_VETOED_SAVES = 16
"""Saves at the interval for which one proposal lets the ranks veto."""


class Purpose(StrEnum):
    """What all ranks do after the named step."""

    SAVE = "save"
    STOP = "stop"
    VETO = "veto"
    """From the next step on, ranks can veto saves at the interval, for `Proposal.argument` steps."""
    INTERVAL = "interval"
    """From the next step on, the interval between saves is `Proposal.argument` steps."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """What a rank wants all ranks to do after a step."""

    lap: int
    """Number of rollbacks before. Steps that are repeated after a rollback are other steps."""
    step: int
    purpose: Purpose
    argument: int

    def encode(self) -> str:
        return json.dumps([self.lap, self.step, self.purpose, self.argument])

    @classmethod
    def decode(cls, text: str) -> Proposal | None:
        """Parse what `encode` returns. Return None for other text, which only a foreign process writes."""
        try:
            lap, step, purpose, argument = json.loads(text)
            return cls(int(lap), int(step), Purpose(purpose), int(argument))
        except (ValueError, TypeError, RecursionError):
            return None


class Proposals:
    """The proposals of a gang, as one rank sees them.

    The training thread calls `begin`, `reach`, `propose` and `roll_back`. A thread of this object calls
    `poll` between `start` and `close`.

    Args:
        store: The gang's store.
        world_size: Number of ranks, all of which have to vote.
    """

    def __init__(self, store: GangStore, world_size: int) -> None:
        self._store = store
        self._world_size = world_size
        self.period_seconds = max(_SHORTEST_PERIOD_SECONDS, world_size / _POLLS_PER_SECOND)
        self._least_steps = _LEAST_STEPS + world_size // _RANKS_PER_STEP
        self._steps_ahead = self._least_steps
        """Distance of the step that the next proposal names. It does not follow from the time of the last
        steps: if they were unusually short, a request to stop would name a step that is hours away."""
        self._lock = threading.Lock()
        self._lap = 0
        self._done: int | None = None
        """The newest step that this rank has done. None: it does not train, and votes for nothing."""
        self._number = 0
        """Number of the proposal that this rank settles next."""
        self._proposed = -1
        self._voted: Proposal | None = None
        """Proposal `_number`, after this rank's vote for it."""
        self._error: Exception | None = None
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()

    def start(self) -> None:
        """Start to poll. Further calls have no effect."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="holdfast-gang", daemon=True)
            self._thread.start()
            atexit.register(self.close)

    def close(self) -> None:
        """Stop to poll. Before the interpreter ends, no thread may be inside of torch's store client."""
        if self._thread is None or os.getpid() != self._pid:
            return
        self._closing.set()
        # The collector may release an unreferenced Checkpointer in any thread, this one included.
        if threading.current_thread() is not self._thread:
            self._thread.join(_CLOSE_SECONDS)
        atexit.unregister(self.close)

    # ------------------------------------------------------------------ the training thread

    def begin(self, step: int) -> None:
        """Record that `step` steps are done and the next one is about to start."""
        with self._lock:
            self._done = step

    def roll_back(self) -> None:
        """Forget the steps that the ranks repeat. Every rank must call it."""
        with self._lock:
            self._lap += 1
            self._done = None
            if self._voted is not None:
                self._settle(is_late=False)

    def reach(self, step: int) -> Proposal | None:
        """Record that `step` is done. Return the accepted proposal that names it, or None.

        All ranks get the same answer for a step. Raises the error that ended the polling thread.
        """
        with self._lock:
            if self._error is not None:
                raise self._error
            self._done = step
            number, voted = self._number, self._voted
        if voted is None or step < voted.step:
            return None
        is_accepted = self._store.decide(_decision(number), _REJECTED) == _ACCEPTED
        with self._lock:
            self._settle(is_late=not is_accepted)
        return voted if is_accepted else None

    def propose(self, purpose: Purpose, argument: int = 0) -> None:
        """Propose a step for `purpose`, unless a proposal is under way. Call it again until it succeeds.

        Args:
            purpose: What to do after the step.
            argument: A number of steps, see `Purpose`.
        """
        with self._lock:
            number = self._number
            if self._done is None or self._voted is not None or self._proposed == number:
                return
            self._proposed = number
            step = self._done + self._steps_ahead
            proposal = Proposal(self._lap, step, purpose, argument)
        self._store.decide(_proposal(number), proposal.encode())

    # ------------------------------------------------------------------ the polling thread

    def poll(self) -> None:
        """Vote for the next proposal. After a vote, the training thread reads the decision."""
        with self._lock:
            number, has_voted = self._number, self._voted is not None
        if not has_voted and self._store.has(_proposal(number)):
            self._vote(number)

    def _vote(self, number: int) -> None:
        text = self._store.read(_proposal(number))
        # An entry without a valid signature only uses up the number.
        proposal = None if text is None else Proposal.decode(text)
        with self._lock:
            is_ahead = (
                proposal is not None
                and proposal.lap == self._lap
                and self._done is not None
                and self._done < proposal.step
            )
            # From here on the training thread reads the decision after the step.
            self._voted = proposal if is_ahead else None
        if not is_ahead:
            self._store.decide(_decision(number), _REJECTED)
            with self._lock:
                self._settle(is_late=proposal is not None and proposal.lap == self._lap)
        elif self._store.count(f"votes/{number}") == self._world_size:
            self._store.decide(_decision(number), _ACCEPTED)

    def _run(self) -> None:
        # The ranks start together but should not poll together. The script's generators stay untouched.
        jitter = random.Random()
        while not self._closing.wait(self.period_seconds * jitter.uniform(0.75, 1.25)):
            try:
                self.poll()
            except Exception as error:  # noqa: BLE001 - `reach` raises it in the training thread
                self._error = error
                return

    # ------------------------------------------------------------------ inside

    def _settle(self, *, is_late: bool) -> None:
        """Go on to the next proposal. `is_late`: this one named a step that a rank had passed."""
        self._number += 1
        self._voted = None
        steps = 2 * self._steps_ahead if is_late else self._steps_ahead // 2
        self._steps_ahead = min(_MOST_STEPS, max(self._least_steps, steps))


def _proposal(number: int) -> str:
    return f"proposal/{number}"


def _decision(number: int) -> str:
    return f"decision/{number}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What all ranks must do after a step, in addition to saves at the interval."""

    save: bool = False
    stop: bool = False
    interval_steps: int | None = None
    """The interval from the next step on. None: it stays as it is."""


class StepAgreement:
    """Agreement of the ranks during a run of steps.

    Call `begin` before the first step, and `after_step` once after each step, on every rank.

    Args:
        session: Receives this rank's requests to save or stop.
        store: The gang's store, or None for a gang of one rank.
        proposals: The gang's proposals, or None for a gang of one rank.
    """

    def __init__(
        self, session: Session, store: GangStore | None, proposals: Proposals | None
    ) -> None:
        self._session = session
        self._store = store
        self._proposals = proposals
        self._lap = 0
        """Number of rollbacks so far. It keeps the keys apart when the ranks repeat steps."""
        self._save_requested = False
        self._has_stopped = False
        self._interval_steps: int | None = None
        """The interval that a gang of one rank uses from the next step on, if it changes."""
        self._vetoes: tuple[int, int] | None = None
        """Vetoes of saves after the first of these steps are read, up to the second one."""

    def close(self) -> None:
        """End the polling thread."""
        if self._proposals is not None:
            self._proposals.close()

    def roll_back(self) -> None:
        """Forget what was agreed for the steps that the ranks repeat. Every rank must call it."""
        self._lap += 1
        self._has_stopped = False
        self._interval_steps = None
        self._vetoes = None
        if self._proposals is not None:
            self._proposals.roll_back()

    def begin(self, step: int, interval_steps: int) -> None:
        """Start to agree when `step` steps are done and the next one is about to start."""
        if self._proposals is None:
            return
        if self._vetoes is None:
            self._vetoes = step, step + _VETOED_SAVES * interval_steps
        self._proposals.begin(step)
        self._proposals.start()
        self._propose_requests(self._proposals)

    def after_step(self, step: int) -> Verdict:
        """Return the verdict for `step`, which is the same on every rank."""
        if self._proposals is None:
            save = self._session.requests.take_save(step)
            interval_steps, self._interval_steps = self._interval_steps, None
            return Verdict(save, self._session.requests.stop, interval_steps)
        # A request that has arrived by now is met by a save after this step.
        self._save_requested |= self._session.requests.take_save(step)
        accepted = self._proposals.reach(step)
        verdict = Verdict()
        if accepted is not None:
            match accepted.purpose:
                case Purpose.SAVE:
                    verdict = Verdict(save=True)
                    self._save_requested = False
                case Purpose.STOP:
                    verdict = Verdict(stop=True)
                    self._has_stopped = True
                case Purpose.VETO:
                    self._extend_vetoes(accepted.step, accepted.argument)
                case Purpose.INTERVAL:
                    steps = max(1, accepted.argument)
                    verdict = Verdict(interval_steps=steps)
                    self._extend_vetoes(accepted.step, _VETOED_SAVES * steps)
        self._propose_requests(self._proposals)
        return verdict

    def propose_interval(self, steps: int) -> None:
        """Let all ranks save every `steps` steps. Call it after each step until the verdict says so."""
        if self._proposals is None:
            self._interval_steps = steps
        elif not self._has_stopped:
            self._proposals.propose(Purpose.INTERVAL, steps)

    def veto(self, due: int, next_step: int, interval_steps: int) -> None:
        """Before `next_step` starts, make the gang leave out the save of step `due`, if it is that step.

        Call it before each step while this rank has no free slot.

        Args:
            due: The next step at which a save is due by the interval.
            next_step: The step that is about to start.
            interval_steps: Steps between saves.
        """
        if self._store is None or self._proposals is None:
            return
        if due == next_step and self._may_veto(due):
            self._store.publish(self._full(due), str(due))
        if not self._may_veto(due + _VETOED_SAVES // 2 * interval_steps):
            self._proposals.propose(Purpose.VETO, _VETOED_SAVES * interval_steps)

    def is_vetoed(self, step: int) -> bool:
        """Return whether a rank had no slot when `step` started. Then no rank saves it.

        The answer is the same on every rank.
        """
        if self._store is None or not self._may_veto(step):
            return False
        return self._store.read(self._full(step)) == str(step)

    def _propose_requests(self, proposals: Proposals) -> None:
        if self._has_stopped:
            return
        if self._session.requests.stop:
            proposals.propose(Purpose.STOP)
        elif self._save_requested:
            proposals.propose(Purpose.SAVE)

    def _may_veto(self, step: int) -> bool:
        return self._vetoes is not None and self._vetoes[0] < step <= self._vetoes[1]

    def _extend_vetoes(self, step: int, steps: int) -> None:
        """Read vetoes for `steps` steps after `step`."""
        first, until = step, step + steps
        if self._vetoes is not None and step <= self._vetoes[1]:
            first, until = self._vetoes[0], max(until, self._vetoes[1])
        self._vetoes = first, until

    def _full(self, step: int) -> str:
        """Return the key of `step`, one of two that alternate.

        No rank writes the key for step s + 2 before all ranks have read it after step s.
        """
        return f"full/{self._lap}/{step % 2}"
