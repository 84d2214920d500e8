"""Mutants of the trainer's state: its payload, the copies into it, and merges of several."""

from __future__ import annotations

from tools.mutants.model import Kind, Mutant

_STATE = "trainer_sdk/src/holdfast/state/"
_TESTS = "tests/trainer_sdk/state/"
_PIECES = (
    f"{_TESTS}test_pieces.py::test_every_piece_of_a_large_tensor_is_copied_from_its_own_place",
)
_BATCHES = (
    f"{_TESTS}test_pieces.py::test_small_tensors_are_batched_in_order_and_each_is_copied_once",
)
_DESTINATIONS = (f"{_TESTS}loading/test_destinations.py::test_pieces_of_any_length_give_every_bit",)
_MERGE = "trainer_sdk/src/holdfast/convert/merging.py"
_MERGES = "tests/trainer_sdk/convert/test_merge.py::"

OF_STATE = (
    Mutant(
        name="state/merge-rounded-twice",
        kind=Kind.MISSING_CHECK,
        file=_MERGE,
        original="    bits |= is_inexact\n",
        replacement="",
        loses="A merged bfloat16 weight is not the nearest one.",
        tests=(f"{_MERGES}test_a_type_is_reached_by_one_conversion",),
    ),
    Mutant(
        name="state/merge-weights-of-other-sources",
        kind=Kind.MISSING_CHECK,
        file=_MERGE,
        original="        given_weights = tuple(given_weights[i] for i in order)\n",
        replacement="        pass\n",
        loses="Sources that are not given from the oldest to the newest get each other's weights.",
        tests=(f"{_MERGES}test_the_order_of_the_sources_changes_nothing",),
    ),
    Mutant(
        name="state/merge-shapes-not-compared",
        kind=Kind.MISSING_CHECK,
        file=_MERGE,
        original="            _expect_same(name, source, newest)\n",
        replacement="            pass\n",
        loses="Checkpoints of different models are merged, or fail without the name of the tensor.",
        tests=(f"{_MERGES}test_checkpoints_that_differ_are_refused_by_name",),
    ),
    Mutant(
        name="state/third-piece-from-the-second",
        kind=Kind.OFF_BY_ONE,
        file=f"{_STATE}snapshot.py",
        original="_copy_piece(piece, number * count, position)",
        replacement="_copy_piece(piece, min(number, 1) * count, position)",
        loses="A tensor above 64 MiB comes back with wrong elements.",
        tests=_PIECES,
    ),
    Mutant(
        name="state/move-of-elements",
        kind=Kind.CHANGED_CONSTANT,
        file=f"{_STATE}snapshot.py",
        original="self._moves.append((place, place.data_ptr(), place.nbytes, position))",
        replacement="self._moves.append((place, place.data_ptr(), place.numel(), position))",
        loses="Three quarters of each float32 tensor above 128 KiB keep the values of an older save.",
        tests=(f"{_TESTS}test_snapshot.py::test_tensors_of_all_sizes_keep_their_places",),
    ),
    Mutant(
        name="state/last-batch-is-not-copied",
        kind=Kind.COMPARISON,
        file=f"{_STATE}snapshot.py",
        original="    if batched:\n        yield batched, batch.copy",
        replacement="    if batched > batch_bytes:\n        yield batched, batch.copy",
        loses="The last small tensors of a state are restored with the bytes of an older save.",
        tests=_BATCHES,
    ),
    Mutant(
        name="state/values-of-a-view-from-memory",
        kind=Kind.COMPARISON,
        file=f"{_STATE}snapshot.py",
        original="if source.is_neg() or source.is_conj():",
        replacement="if source.is_neg() and source.is_conj():",
        loses="A conjugate view of a tensor comes back with the wrong sign.",
        tests=(
            f"{_TESTS}test_snapshot.py::test_views_whose_values_are_not_in_memory_are_restored",
        ),
    ),
    Mutant(
        name="state/objects-one-byte-too-long",
        kind=Kind.OFF_BY_ONE,
        file=f"{_STATE}snapshot.py",
        original="len(snapshot.objects) <= self.payload.objects.length_bytes",
        replacement="len(snapshot.objects) <= self.payload.objects.length_bytes + 1",
        loses="A save whose counters have grown by one byte overwrites the first tensor, or fails.",
        tests=(f"{_TESTS}test_snapshot.py::test_objects_fit_up_to_the_last_byte_of_their_room",),
    ),
    Mutant(
        name="state/plan-of-another-structure",
        kind=Kind.MISSING_CHECK,
        file=f"{_STATE}snapshot.py",
        original="self.signature == snapshot.signature\n            and self.keys == snapshot.keys",
        replacement="self.keys == snapshot.keys",
        loses="A state whose tensors changed their shapes is written over the places of the old ones.",
        tests=(f"{_TESTS}test_snapshot.py::test_a_plan_is_kept_while_the_structure_is_the_same",),
    ),
    Mutant(
        name="state/old-objects-stay-in-the-room",
        kind=Kind.MISSING_CHECK,
        file=f"{_STATE}snapshot.py",
        original='target[place.start + len(text) : place.stop] = ord(" ")',
        replacement="",
        loses="A save whose objects became shorter cannot be read: the end of the old ones follows them.",
        tests=(f"{_TESTS}test_snapshot.py::test_numpy_arrays_come_back_as_arrays",),
    ),
    Mutant(
        name="state/middle-of-a-tensor-is-not-put",
        kind=Kind.OFF_BY_ONE,
        file=f"{_STATE}loading/destinations.py",
        original="first = max(0, bisect.bisect_right(self._starts, position) - 1)",
        replacement="first = bisect.bisect_left(self._starts, position)",
        loses="A tensor of several chunks is restored with its first chunk only.",
        tests=_DESTINATIONS,
    ),
    Mutant(
        name="state/header-of-another-read",
        kind=Kind.MISSING_CHECK,
        file=f"{_STATE}loading/destinations.py",
        original="            if low < high and not np.array_equal(",
        replacement="            if low > high and not np.array_equal(",
        loses="A payload that changed between two reads is restored with the objects of one and the tensors "
        "of the other.",
        tests=_DESTINATIONS,
    ),
    Mutant(
        name="state/uneven-part-of-a-tensor",
        kind=Kind.OFF_BY_ONE,
        file=f"{_STATE}tensors.py",
        original="piece = -(-lengths[dimension] // mesh.size(axis))",
        replacement="piece = lengths[dimension] // mesh.size(axis)",
        loses="A tensor that the ranks share unevenly cannot be saved, or comes back shifted.",
        tests=(
            f"{_TESTS}loading/test_restore_target.py::test_the_offsets_of_a_local_part_are_computed",
        ),
    ),
)
