"""Mutants of the folder: commit, pruning, and the processes that use it."""

from __future__ import annotations

from tools.mutants.model import Kind, Mutant

_FOLDER = "trainer_sdk/src/holdfast/directory/"
_TESTS = "tests/trainer_sdk/directory/"
_PRUNE = (f"{_TESTS}test_directory_prune.py",)
_KEPT = (f"{_TESTS}test_directory_kept.py",)
_ROUNDS = (f"{_TESTS}test_directory_rounds.py",)
_PROCESSES = (f"{_TESTS}test_directory_processes.py",)
_CHOICE = (f"{_TESTS}test_directory_choice.py",)

OF_FOLDER = (
    Mutant(
        name="folder/pruned-under-a-reader",
        kind=Kind.MISSING_CHECK,
        file=f"{_FOLDER}commit.py",
        original="RetentionReason.BEING_READ: claimed_checkpoints(self.records_dir.parent),",
        replacement="",
        loses="A process that restores or exports a checkpoint finds its shards gone.",
        tests=_PRUNE,
    ),
    Mutant(
        name="folder/record-after-shard",
        kind=Kind.SWAPPED_WRITES,
        file=f"{_FOLDER}commit.py",
        original=(
            "        for files in runs_in(self.records_dir):\n"
            "            files.remove(record.checkpoint, record.header.rank)\n"
            "        self._delete(record)\n"
        ),
        replacement=(
            "        self._delete(record)\n"
            "        for files in runs_in(self.records_dir):\n"
            "            files.remove(record.checkpoint, record.header.rank)\n"
        ),
        loses="A kill leaves the record of a shard that is gone, and rank 0 tries to commit it.",
        tests=_PRUNE,
    ),
    Mutant(
        name="folder/commit-without-lock",
        kind=Kind.DROPPED_LOCK,
        file=f"{_FOLDER}commit.py",
        original='    return locked(root / ".prune")\n',
        replacement="    return contextlib.nullcontext()\n",
        loses="One process commits a checkpoint whose shards another one deletes.",
        tests=_PRUNE,
    ),
    Mutant(
        name="folder/restore-point-is-pruned",
        kind=Kind.MISSING_CHECK,
        file=f"{_FOLDER}saves.py",
        original="return waiting if protected is None else waiting | {protected}",
        replacement="return waiting",
        loses="A run that restarts in place cannot restore the checkpoint that it began from.",
        tests=_KEPT,
    ),
    Mutant(
        name="folder/waiting-upload-is-pruned",
        kind=Kind.MISSING_CHECK,
        file=f"{_FOLDER}saves.py",
        original="return waiting if protected is None else waiting | {protected}",
        replacement="return frozenset() if protected is None else frozenset({protected})",
        loses="A checkpoint is deleted before it is in the store, so that the store never gets it.",
        tests=_KEPT,
    ),
    Mutant(
        name="folder/one-checkpoint-too-few",
        kind=Kind.OFF_BY_ONE,
        file=f"{_FOLDER}commit.py",
        original="Level.LOCAL, self.keep_last or None, needed",
        replacement="Level.LOCAL, self.keep_last - 1, needed",
        loses="The folder keeps fewer checkpoints than keep_last.",
        tests=_PRUNE,
    ),
    Mutant(
        name="folder/unfinished-save-is-pruned",
        kind=Kind.COMPARISON,
        file=f"{_FOLDER}commit.py",
        original="older = age_of(checkpoint) < age_of(newest)",
        replacement="older = age_of(checkpoint) != age_of(newest)",
        loses="The shard of a newer save is deleted before all ranks have saved, and the save fails.",
        tests=_PRUNE,
    ),
    Mutant(
        name="folder/newest-checkpoint-makes-room",
        kind=Kind.OFF_BY_ONE,
        file=f"{_FOLDER}commit.py",
        original="for checkpoint in committed[:-1]:",
        replacement="for checkpoint in committed:",
        loses="A full disk costs the only checkpoint, and the save that needed the room fails as well.",
        tests=_PRUNE,
    ),
    Mutant(
        name="folder/restore-point-makes-room",
        kind=Kind.MISSING_CHECK,
        file=f"{_FOLDER}commit.py",
        original="if checkpoint not in kept and (has_own or checkpoint != protected):",
        replacement="if checkpoint not in kept:",
        loses="A run whose first save fails on a full disk has lost the checkpoint that it began from.",
        tests=_PRUNE,
    ),
    Mutant(
        name="folder/deleted-while-in-use",
        kind=Kind.MISSING_CHECK,
        file=f"{_FOLDER}commit.py",
        original="if not claimed_checkpoints(root).isdisjoint(wanted):",
        replacement="if not claimed_checkpoints(root).issuperset(()):",
        loses="`delete` removes the checkpoint that another process is reading.",
        tests=_PRUNE,
    ),
    Mutant(
        name="folder/commit-without-its-shard",
        kind=Kind.MISSING_CHECK,
        file=f"{_FOLDER}commit.py",
        original=(
            "        entries = [self._entry(record.shard, first.world_size) for record in records]\n"
        ),
        replacement=(
            "        entries = [\n"
            "            r.shard.shard.entry(r.shard.layout) for r in records if r.shard.layout is not None\n"
            "        ]\n"
        ),
        loses="The newest checkpoint has no shards, and older ones that could be restored are pruned.",
        tests=(
            f"{_TESTS}test_directory_commit.py::test_a_checkpoint_without_its_shards_is_never_committed",
        ),
    ),
    Mutant(
        name="folder/commit-without-its-layout",
        kind=Kind.MISSING_CHECK,
        file=f"{_FOLDER}commit.py",
        original="if not self.tier.keep_layout(layout.layout):",
        replacement="if self.tier.keep_layout(layout.layout) is None:",
        loses="A checkpoint is committed that no other number of ranks can restore.",
        tests=(
            f"{_TESTS}test_directory_commit.py::test_a_checkpoint_without_its_layouts_is_never_committed",
        ),
    ),
    Mutant(
        name="folder/commit-without-the-last-rank",
        kind=Kind.OFF_BY_ONE,
        file=f"{_FOLDER}commit.py",
        original="others = range(1, first.world_size)",
        replacement="others = range(1, first.world_size - 1)",
        loses="A checkpoint is committed without the shard of the last rank.",
        tests=(f"{_TESTS}test_directory_commit.py::test_an_incomplete_save_is_not_committed",),
    ),
    Mutant(
        name="folder/older-save-is-committed",
        kind=Kind.COMPARISON,
        file=f"{_FOLDER}commit.py",
        original="if age_of(checkpoint) > newest:",
        replacement="if age_of(checkpoint) != newest:",
        loses="A checkpoint is committed whose shards another process is deleting.",
        tests=(
            f"{_TESTS}test_directory_commit.py::test_a_save_below_a_committed_step_is_not_committed",
        ),
    ),
    Mutant(
        name="folder/shards-of-two-runs",
        kind=Kind.MISSING_CHECK,
        file=f"{_FOLDER}commit.py",
        original='return self.directory / f"r{self.round:06d}-{self.run_id}"',
        replacement='return self.directory / f"r{self.round:06d}-run"',
        loses="A checkpoint mixes the weights of two trainings.",
        tests=_ROUNDS,
    ),
    Mutant(
        name="folder/round-that-was-reserved-meanwhile",
        kind=Kind.MISSING_CHECK,
        file=f"{_FOLDER}open_folder.py",
        original="        if max(reserved) > round_:\n            continue\n",
        replacement="",
        loses="Two runs save under the same round, and their shards are mixed.",
        tests=_ROUNDS,
    ),
    Mutant(
        name="folder/round-of-two-runs",
        kind=Kind.CHANGED_CONSTANT,
        file=f"{_FOLDER}open_folder.py",
        original="flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC",
        replacement="flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC",
        loses="Two runs that start at the same time get the same round.",
        tests=_ROUNDS,
    ),
    Mutant(
        name="folder/claim-of-a-removed-file",
        kind=Kind.MISSING_CHECK,
        file=f"{_FOLDER}processes.py",
        original=(
            "                if path.stat().st_ino == os.fstat(descriptor).st_ino:\n"
            "                    return descriptor"
        ),
        replacement="                return descriptor",
        loses="A process holds a lock that no other one can see, and its checkpoint is pruned.",
        tests=_PROCESSES,
    ),
    Mutant(
        name="folder/claim-kept-by-a-child",
        kind=Kind.DROPPED_LOCK,
        file=f"{_FOLDER}processes.py",
        original="os.register_at_fork(after_in_child=_forget_all)\n",
        replacement="",
        loses="A data loader that outlives its trainer blocks the next run for ten minutes.",
        tests=_PROCESSES,
    ),
    Mutant(
        name="folder/checkpoint-without-its-shards",
        kind=Kind.MISSING_CHECK,
        file=f"{_FOLDER}choice.py",
        original="    if missing:\n        raise NotFoundError(",
        replacement="    if len(missing) > 1:\n        raise NotFoundError(",
        loses="A run chooses a checkpoint that it cannot restore, although an older one is complete.",
        tests=_CHOICE,
    ),
)
