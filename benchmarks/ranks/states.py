"""Played states of large models: the layout of each rank, without any tensor bytes.

The names and shapes are those of public models with AdamW, whose three tensors a parameter are the two
moments and the step. A layout is computed when it is asked for, because those of all ranks of the largest
states take gigabytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from tests.support.shards.placements import Placement, Tensor, box_of

from holdfast_core.format.payload import plan_payload
from holdfast_core.format.rank_layout import RankLayout, TensorSlice
from holdfast_core.ids import ByteRange, Rank

OBJECTS_BYTES = 64 << 10
"""Room for the state that is not a tensor, in the payload of each rank."""

_Lengths = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class PlayedState:
    """The state of a model on a mesh of ranks."""

    name: str
    tensors: Mapping[str, Tensor]
    mesh: tuple[int, ...]
    """Sizes of the mesh. The last dimension varies fastest with the rank."""
    world_size: int
    _places: dict[_Lengths, tuple[dict[str, ByteRange], ByteRange, int]] = field(
        default_factory=dict
    )
    """Byte ranges of the tensors and of the objects, and the payload's length, by the tensors' lengths.
    Most ranks hold pieces of the same lengths."""

    def on(self, ranks: int) -> PlayedState:
        """Return the same state on another number of ranks, which a mesh of one dimension has.

        A mesh of two dimensions keeps its second one; `ranks` is then rounded down to a multiple of it.
        """
        mesh = (ranks,) if len(self.mesh) == 1 else (ranks // self.mesh[1], self.mesh[1])
        return PlayedState(self.name, self.tensors, mesh, math.prod(mesh))

    def layout(self, rank: Rank) -> RankLayout:
        """Return the layout of one rank."""
        boxes = {fqn: box_of(tensor, self.mesh, rank) for fqn, tensor in self.tensors.items()}
        lengths = tuple(box.lengths for box in boxes.values())
        if lengths not in self._places:
            planned = plan_payload(
                ((fqn, t.dtype, boxes[fqn].lengths) for fqn, t in self.tensors.items()),
                OBJECTS_BYTES,
            )
            ranges = {tensor.fqn: tensor.byte_range for tensor in planned.tensors}
            self._places[lengths] = ranges, planned.objects, planned.total_bytes
        ranges, objects, total_bytes = self._places[lengths]
        return RankLayout(
            rank=rank,
            tensors={
                fqn: TensorSlice(
                    tensor.dtype,
                    tensor.shape,
                    boxes[fqn].offsets,
                    boxes[fqn].lengths,
                    ranges[fqn],
                )
                for fqn, tensor in self.tensors.items()
            },
            objects={"optim": objects, "rng": objects, "step": objects},
            payload_bytes=total_bytes,
        )


def llama_70b(ranks: int) -> PlayedState:
    """Return Llama 3 70B in fp32 under `fully_shard` over all ranks: 723 parameters, 2,892 tensors."""
    hidden, inner, words, keys = 8192, 28672, 128256, 1024
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (words, hidden)}
    for layer in range(80):
        name = f"model.layers.{layer}"
        shapes |= {
            f"{name}.self_attn.q_proj.weight": (hidden, hidden),
            f"{name}.self_attn.k_proj.weight": (keys, hidden),
            f"{name}.self_attn.v_proj.weight": (keys, hidden),
            f"{name}.self_attn.o_proj.weight": (hidden, hidden),
            f"{name}.mlp.gate_proj.weight": (inner, hidden),
            f"{name}.mlp.up_proj.weight": (inner, hidden),
            f"{name}.mlp.down_proj.weight": (hidden, inner),
            f"{name}.input_layernorm.weight": (hidden,),
            f"{name}.post_attention_layernorm.weight": (hidden,),
        }
    shapes |= {"model.norm.weight": (hidden,), "lm_head.weight": (words, hidden)}
    return _state("llama-70b", shapes, (ranks,), (0,))


def unfused_moe(ranks: int) -> PlayedState:
    """Return a mixture of experts with one module for each expert, under `fully_shard` over all ranks.

    It has the shapes of Qwen3 30B-A3B: 48 layers of 128 experts, 18,867 parameters, 75,468 tensors.
    """
    hidden, inner, words, head = 2048, 768, 151936, 128
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (words, hidden)}
    for layer in range(48):
        name = f"model.layers.{layer}"
        shapes |= {
            f"{name}.self_attn.q_proj.weight": (4096, hidden),
            f"{name}.self_attn.k_proj.weight": (512, hidden),
            f"{name}.self_attn.v_proj.weight": (512, hidden),
            f"{name}.self_attn.o_proj.weight": (hidden, 4096),
            f"{name}.self_attn.q_norm.weight": (head,),
            f"{name}.self_attn.k_norm.weight": (head,),
            f"{name}.mlp.gate.weight": (128, hidden),
            f"{name}.input_layernorm.weight": (hidden,),
            f"{name}.post_attention_layernorm.weight": (hidden,),
        }
        for expert in range(128):
            part = f"{name}.mlp.experts.{expert}"
            shapes |= {
                f"{part}.gate_proj.weight": (inner, hidden),
                f"{part}.up_proj.weight": (inner, hidden),
                f"{part}.down_proj.weight": (hidden, inner),
            }
    shapes |= {"model.norm.weight": (hidden,), "lm_head.weight": (words, hidden)}
    return _state("unfused-moe", shapes, (ranks,), (0,))


def moe_1t(ranks: int) -> PlayedState:
    """Return a mixture of experts of 1e12 parameters whose experts are fused to one tensor a layer.

    It has the shapes of Kimi K2: 61 layers, 384 experts of 60 of them. The mesh is (ranks / 64, 64): the
    experts are cut over the 64 ranks of the second dimension, and all tensors along their rows over the
    rest. `ranks` is a multiple of 64, or less than 64.
    """
    hidden, inner, words, experts = 7168, 2048, 163840, 384
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (words, hidden)}
    fused: dict[str, tuple[int, ...]] = {}
    for layer in range(61):
        name = f"model.layers.{layer}"
        shapes |= {
            f"{name}.self_attn.q_a_proj.weight": (1536, hidden),
            f"{name}.self_attn.q_a_layernorm.weight": (1536,),
            f"{name}.self_attn.q_b_proj.weight": (12288, 1536),
            f"{name}.self_attn.kv_a_proj_with_mqa.weight": (576, hidden),
            f"{name}.self_attn.kv_a_layernorm.weight": (512,),
            f"{name}.self_attn.kv_b_proj.weight": (16384, 512),
            f"{name}.self_attn.o_proj.weight": (hidden, 8192),
            f"{name}.input_layernorm.weight": (hidden,),
            f"{name}.post_attention_layernorm.weight": (hidden,),
        }
        part = f"{name}.mlp" if layer == 0 else f"{name}.mlp.shared_experts"
        wide = 18432 if layer == 0 else inner
        shapes |= {
            f"{part}.gate_proj.weight": (wide, hidden),
            f"{part}.up_proj.weight": (wide, hidden),
            f"{part}.down_proj.weight": (hidden, wide),
        }
        if layer > 0:
            shapes |= {
                f"{name}.mlp.gate.weight": (experts, hidden),
                f"{name}.mlp.gate.e_score_correction_bias": (experts,),
            }
            fused |= {
                f"{name}.mlp.experts.gate_proj": (experts, inner, hidden),
                f"{name}.mlp.experts.up_proj": (experts, inner, hidden),
                f"{name}.mlp.experts.down_proj": (experts, hidden, inner),
            }
    shapes |= {"model.norm.weight": (hidden,), "lm_head.weight": (words, hidden)}
    across = min(64, ranks)
    if ranks % across:
        raise ValueError(f"moe_1t: {ranks} ranks are no multiple of {across}")
    mesh = (ranks // across, across)
    return _state("moe-1t", shapes, mesh, (0, 0), fused, (1, 0))


def many_tensors(count: int, ranks: int) -> PlayedState:
    """Return a state of at least `count` small tensors a rank, under `fully_shard` over all ranks."""
    parameters = -(-count // 4)
    shapes = {f"model.blocks.{i // 64}.part{i % 64}.weight": (1024, 64) for i in range(parameters)}
    return _state(f"{count}-tensors", shapes, (ranks,), (0,))


def _state(
    name: str,
    shapes: Mapping[str, tuple[int, ...]],
    mesh: tuple[int, ...],
    placement: Placement,
    others: Mapping[str, tuple[int, ...]] | None = None,
    other_placement: Placement = (),
) -> PlayedState:
    """Return the state of parameters, and `others` with another placement, with AdamW's tensors."""
    parameters = {fqn: Tensor("F32", shape, placement) for fqn, shape in shapes.items()}
    for fqn, shape in (others or {}).items():
        parameters[fqn] = Tensor("F32", shape, other_placement)
    tensors = dict(parameters) | dict(_adamw(parameters))
    ranks = math.prod(mesh)
    return PlayedState(f"{name} on {ranks} ranks", tensors, mesh, ranks)


def _adamw(parameters: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of AdamW's state. Its steps are scalars that every rank holds."""
    for number, tensor in enumerate(parameters.values()):
        yield f"optim.state.{number}.exp_avg", tensor
        yield f"optim.state.{number}.exp_avg_sq", tensor
        yield f"optim.state.{number}.step", Tensor("F32", ())
