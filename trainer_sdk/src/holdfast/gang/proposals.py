"""Agreement of all ranks to do something after one step that is named ahead (ADR 0017).

A proposal is an atomic commit that never blocks. Its decision is a key of the gang's store that is written
once:
 1. A rank writes proposal n. It names a step that no rank is expected to have done when it has read it.
 2. The polling thread of each rank reads the proposal. If the rank has not done the step, the rank votes
    for it by a counter. Otherwise it writes the decision `rejected`.
 3. The rank whose vote completes the counter writes the decision `accepted`.
 4. A rank that has done the step before it knows the decision writes `rejected`.
The first write of the decision counts. `accepted` therefore means that every rank has voted and reads the
decision after the step. After a rejection, a rank proposes its request again for a later step.

No collective is needed, and no rank waits. If a rank or the rank that proposed dies, the decision is
`accepted` or `rejected` for all other ranks, too. The training thread sends a request to the store only
after a named step.
"""

from __future__ import annotations

import atexit
import json
import os
import random
import threading
from dataclasses import dataclass
from enum import StrEnum

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
        self._is_accepted = False
        """Whether it is known that `_voted` was accepted."""
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
            number, voted, accepted = self._number, self._voted, self._is_accepted
        if voted is None or step < voted.step:
            return None
        if not accepted:
            accepted = self._store.decide(_decision(number), _REJECTED) == _ACCEPTED
        with self._lock:
            if self._number == number:
                self._settle(is_late=not accepted)
        return voted if accepted else None

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
        """Vote for the next proposal, or read whether the current one was accepted."""
        with self._lock:
            number, voted, is_known = self._number, self._voted, self._is_accepted
        if voted is None:
            if self._store.has(_proposal(number)):
                self._vote(number)
        elif not is_known:
            decision = self._store.read(_decision(number))
            if decision is not None:
                self._learn(number, accepted=decision == _ACCEPTED)

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

    def _learn(self, number: int, *, accepted: bool) -> None:
        """Take over the decision about the proposal that this rank has voted for, if it is news."""
        with self._lock:
            if self._number != number or self._is_accepted:
                return
            self._is_accepted = accepted
            if not accepted:
                self._settle(is_late=True)

    def _settle(self, *, is_late: bool) -> None:
        """Go on to the next proposal. `is_late`: this one named a step that a rank had passed."""
        self._number += 1
        self._voted, self._is_accepted = None, False
        steps = 2 * self._steps_ahead if is_late else self._steps_ahead // 2
        self._steps_ahead = min(_MOST_STEPS, max(self._least_steps, steps))


def _proposal(number: int) -> str:
    return f"proposal/{number}"


def _decision(number: int) -> str:
    return f"decision/{number}"
