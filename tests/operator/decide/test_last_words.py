"""The status shows the error of a dead rank without the output around it."""

from __future__ import annotations

import pytest

from holdfast_core.ids import Rank, Worker
from holdfast_core.messages.schema import DeadRank
from holdfast_operator.model.reasons import LAST_OUTPUT_CHARACTERS, how_it_ended

TORCH = """\
[rank2]:     ^^^^^^^^^^^^^^^^^^^^^
[rank2]:   File "/usr/lib/python3/dist-packages/torch/autograd/graph.py", line 823, in _engine_run_backward
[rank2]:     return Variable._execution_engine.run_backward(  # Calls into the C++ engine
[rank2]:            ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
[rank2]: RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.244.4.2]:4711
"""

TWO_LINES = """\
step 3 loss 4.2
Traceback (most recent call last):
  File "/app/train.py", line 3, in <module>
    main()
holdfast.CapacityError: the shared memory volume has 1 MiB free,
this state needs 37 MiB: raise spec.checkpoint.memory
"""


INDENTED = """\
[rank0]:   File "/app/train.py", line 3, in <module>
[rank0]:     ckpt.restore(state)
[rank0]:     ~~~~~~~~~~~~^^^^^^^
[rank0]: holdfast.StateMismatchError: the checkpoint does not fit this state in 1 places:
[rank0]:   model.w: expected float32 [4], found float32 [3]
[rank0]: nothing was loaded
"""


@pytest.mark.parametrize(
    ("code", "output", "text"),
    [
        (
            1,
            TORCH,
            "ended with code 1: RuntimeError: [../gloo/transport/tcp/pair.cc:534] "
            "Connection closed by peer [10.244.4.2]:4711",
        ),
        (
            1,
            TWO_LINES,
            "ended with code 1: holdfast.CapacityError: the shared memory volume has 1 MiB free,\n"
            "this state needs 37 MiB: raise spec.checkpoint.memory",
        ),
        (2, "usage: x\nx: error: no data\n", "ended with code 2: usage: x\nx: error: no data"),
        (
            1,
            INDENTED,
            "ended with code 1: holdfast.StateMismatchError: the checkpoint does not fit this state in "
            "1 places:\n  model.w: expected float32 [4], found float32 [3]\nnothing was loaded",
        ),
        (3, "", "ended with code 3"),
        (-9, "restored step 50 from memory", "was killed by SIGKILL"),
        (-15, "step 3 loss 4.2", "was killed by SIGTERM"),
        (-6, "what(): std::bad_alloc", "ended with code -6: what(): std::bad_alloc"),
        (1, "Traceback:\n  File x\n    cut", "ended with code 1: Traceback:\n  File x\n    cut"),
    ],
)
def test_the_end_of_a_rank_is_described(code: int, output: str, text: str) -> None:
    assert how_it_ended(DeadRank(Rank(2), Worker(1), code, output)) == text


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (-9, "was killed by SIGKILL, and its container ran out of memory: limit 4,096 MiB"),
        (1, "ended with code 1, and its container ran out of memory: limit 4,096 MiB: boom"),
    ],
)
def test_the_end_of_a_rank_for_want_of_memory_names_the_memory(code: int, text: str) -> None:
    dead = DeadRank(Rank(2), Worker(1), code, "boom", out_of_memory="limit 4,096 MiB")
    assert how_it_ended(dead) == text


def test_a_long_termination_message_is_cut() -> None:
    dead = DeadRank(Rank(0), Worker(0), 1, "x" * 2048)
    assert len(how_it_ended(dead)) <= LAST_OUTPUT_CHARACTERS + len("ended with code 1: ")
