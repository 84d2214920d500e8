"""The played states have as many parameters as their models, and each rank's layout is valid."""

import math

import pytest
from benchmarks.ranks.states import PlayedState, llama_70b, many_tensors, moe_1t, unfused_moe

from holdfast_core.format.rank_layout import parse_rank_layout
from holdfast_core.ids import Rank


@pytest.mark.parametrize(
    ("state", "parameters", "tensors"),
    [
        (llama_70b(256), 70_553_706_496, 2892),
        (unfused_moe(8), 30532122624, 75_468),
        (moe_1t(4096), 1026408232448, 4140),
        (many_tensors(1000, 4), 250 * 1024 * 64, 1000),
    ],
)
def test_states_have_the_sizes_of_their_models(
    state: PlayedState, parameters: int, tensors: int
) -> None:
    weights = [t for fqn, t in state.tensors.items() if not fqn.startswith("optim.")]
    assert sum(math.prod(tensor.shape) for tensor in weights) == parameters
    assert len(state.tensors) == tensors


@pytest.mark.parametrize("state", [llama_70b(3), moe_1t(4), many_tensors(100, 3)])
def test_the_ranks_together_hold_every_element_once(state: PlayedState) -> None:
    held = dict.fromkeys(state.tensors, 0)
    for rank in range(state.world_size):
        layout = state.layout(Rank(rank))
        assert parse_rank_layout(layout.to_bytes()) == layout
        for fqn, item in layout.tensors.items():
            held[fqn] += math.prod(item.lengths)
    whole = {fqn: math.prod(t.shape) for fqn, t in state.tensors.items() if t.placement}
    assert {fqn: held[fqn] for fqn in whole} == whole
