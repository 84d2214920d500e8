"""Mutants of the sidecar's coordinator: the ledger, the plan, the outbox, retention and uploads."""

from __future__ import annotations

from tools.mutants.model import Kind, Mutant

_COORDINATOR = "sidecar/src/holdfast_sidecar/coordinator/"
_TESTS = "tests/sidecar/coordinator/"
_COMMIT = (f"{_TESTS}test_commit.py",)
_LEDGER = (f"{_TESTS}test_ledger.py",)
_PLAN = (f"{_TESTS}test_plan.py",)
_OUTBOX = (f"{_TESTS}test_outbox.py",)
_GIVING_UP = (f"{_TESTS}test_giving_up_steps.py",)
_CHOICE = (f"{_TESTS}test_choice.py",)
_DUE = (f"{_TESTS}test_uploads_due.py",)
_DOCUMENTS = (f"{_TESTS}test_documents.py",)

OF_COORDINATOR = (
    Mutant(
        name="coordinator/local-steps-protect",
        kind=Kind.CHANGED_CONSTANT,
        file=f"{_COORDINATOR}plan.py",
        original="    protecting = Level.REPLICATED if ledger.expects_copies else Level.LOCAL\n",
        replacement="    protecting = Level.LOCAL\n",
        loses="The only replicated step is pruned, and the loss of one node costs all progress.",
        tests=_GIVING_UP,
    ),
    Mutant(
        name="coordinator/protected-steps-are-pruned",
        kind=Kind.MISSING_CHECK,
        file=f"{_COORDINATOR}plan.py",
        original="{*plan.prune_steps, *abandoned} - protected_steps(message, safe)",
        replacement="{*plan.prune_steps, *abandoned}",
        loses="A step that the user has pinned, or the restore point, is deleted.",
        tests=_GIVING_UP,
    ),
    Mutant(
        name="coordinator/recent-steps-are-given-up",
        kind=Kind.COMPARISON,
        file=f"{_COORDINATOR}plan.py",
        original="(pressed and step not in recent)",
        replacement="pressed",
        loses="A full node costs the step that a rank is copying now.",
        tests=_GIVING_UP,
    ),
    Mutant(
        name="coordinator/quarantined-checkpoints-count-as-kept",
        kind=Kind.MISSING_CHECK,
        file=f"{_COORDINATOR}commit.py",
        original="c.step <= base and c not in apart",
        replacement="c.step <= base",
        loses="A checkpoint that cannot be restored takes the place of one that can.",
        tests=_COMMIT,
    ),
    Mutant(
        name="coordinator/end-of-the-job-uploads-an-older-step",
        kind=Kind.COMPARISON,
        file=f"{_COORDINATOR}ending.py",
        original="return None if comes or self._commits.choice().pending else",
        replacement="return",
        loses="The end of a job uploads a step that is replaced at once, and takes twice as long.",
        tests=_COMMIT,
    ),
    Mutant(
        name="coordinator/second-checkpoint-of-the-restore-point",
        kind=Kind.OFF_BY_ONE,
        file=f"{_COORDINATOR}commit.py",
        original="if base is not None and step <= base:",
        replacement="if base is not None and step < base:",
        loses="Two different checkpoints have the step that the round was restored from.",
        tests=_COMMIT,
    ),
    Mutant(
        name="coordinator/newest-persisted-step-leaves-the-store",
        kind=Kind.MISSING_CHECK,
        file=f"{_COORDINATOR}commit.py",
        original="kept |= {newest.step}",
        replacement="pass",
        loses="The operator's retention deletes the newest checkpoint of the store.",
        tests=_COMMIT,
    ),
    Mutant(
        name="coordinator/restore-point-leaves-the-store",
        kind=Kind.MISSING_CHECK,
        file=f"{_COORDINATOR}commit.py",
        original="kept = protected_steps(self._parts.message) | self._ledger.on_way_to_store",
        replacement="kept = self._ledger.on_way_to_store",
        loses="The checkpoint from which the gang has started is deleted from the store.",
        tests=_COMMIT,
    ),
    Mutant(
        name="coordinator/restarted-sidecar-has-the-plan",
        kind=Kind.MISSING_CHECK,
        file=f"{_COORDINATOR}outbox.py",
        original="""            self._acknowledged[worker] = _Acknowledged(self._nothing)
            self._wakes[worker].set()""",
        replacement="""            drop = self._plan(worker).drop
            kept = Plan(self._ledger.round, drop=drop)
            self._acknowledged[worker] = _Acknowledged(kept)
            self._wakes[worker].set()""",
        loses="A sidecar that restarts keeps pruned shards, until its node has no room.",
        tests=_OUTBOX,
    ),
    Mutant(
        name="coordinator/plan-has-one-level-for-a-step",
        kind=Kind.CHANGED_CONSTANT,
        file=f"{_COORDINATOR}plan.py",
        original="levels=tuple(level for level in wanted.levels if level not in levels),",
        replacement="levels=wanted.levels[len(levels) :],",
        loses="A rank waits for ever for a level that its step reached after a lower one.",
        tests=_PLAN,
    ),
    Mutant(
        name="coordinator/manifest-at-others-first",
        kind=Kind.SWAPPED_WRITES,
        file=f"{_COORDINATOR}outbox.py",
        original=(
            "        if worker != self._own and self._own not in entry.acknowledged:\n"
            "            return None\n"
        ),
        replacement="",
        loses="A manifest exists on a member only, and a new coordinator builds another one.",
        tests=_OUTBOX,
    ),
    Mutant(
        name="coordinator/own-pod-is-released-first",
        kind=Kind.MISSING_CHECK,
        file=f"{_COORDINATOR}outbox.py",
        original=(
            "        if worker == self._own:\n"
            "            return [other for other in self._acknowledged if other != worker]\n"
        ),
        replacement="",
        loses="The coordinator's pod ends before the others are released, and they wait for ever.",
        tests=_OUTBOX,
    ),
    Mutant(
        name="coordinator/step-that-is-copied-is-given-up",
        kind=Kind.OFF_BY_ONE,
        file=f"{_COORDINATOR}ledger.py",
        original="            return tuple(behind[1:])\n",
        replacement="            return tuple(behind)\n",
        loses="On a full node no step ever becomes replicated.",
        tests=_LEDGER,
    ),
    Mutant(
        name="coordinator/newest-steps-are-given-up",
        kind=Kind.OFF_BY_ONE,
        file=f"{_COORDINATOR}ledger.py",
        original="tuple(behind[1:-2])",
        replacement="tuple(behind[1:-1])",
        loses="A slow peer costs one of the newest two steps.",
        tests=_LEDGER,
    ),
    Mutant(
        name="coordinator/local-without-the-last-member",
        kind=Kind.OFF_BY_ONE,
        file=f"{_COORDINATOR}ledger.py",
        original="if entry.local or len(entry.acknowledged) < len(self.workers):",
        replacement="if entry.local or len(entry.acknowledged) < len(self.workers) - 1:",
        loses="A step counts as committed although one node has no manifest of it.",
        tests=_LEDGER,
    ),
    Mutant(
        name="coordinator/replicated-without-the-last-rank",
        kind=Kind.OFF_BY_ONE,
        file=f"{_COORDINATOR}ledger.py",
        original="if entry.copied or not entry.local or len(entry.replicated) < entry.world_size:",
        replacement="if entry.copied or not entry.local or len(entry.replicated) < entry.world_size - 1:",
        loses="A step counts as replicated although a shard has no copy, and older ones are pruned.",
        tests=_LEDGER,
    ),
    Mutant(
        name="coordinator/durable-counts-as-replicated",
        kind=Kind.MISSING_CHECK,
        file=f"{_COORDINATOR}ledger.py",
        original="        if found.replicated:\n            entry.replicated.add(rank)",
        replacement="        entry.replicated.add(rank)",
        loses="A step without copies counts as replicated: older ones are pruned, and one node loses it.",
        tests=_LEDGER,
    ),
    Mutant(
        name="coordinator/persisted-without-the-last-rank",
        kind=Kind.OFF_BY_ONE,
        file=f"{_COORDINATOR}ledger.py",
        original="return entry.manifest is not None and len(entry.uploaded) == entry.world_size",
        replacement="return entry.manifest is not None and len(entry.uploaded) >= entry.world_size - 1",
        loses="A manifest is put into the store before all of its shards are there.",
        tests=_LEDGER,
    ),
    Mutant(
        name="coordinator/uploading-step-is-forgotten",
        kind=Kind.MISSING_CHECK,
        file=f"{_COORDINATOR}ledger.py",
        original="for step in sorted(set(steps) - self.on_way_to_store):",
        replacement="for step in sorted(set(steps)):",
        loses="The shards of a step are deleted while they are being uploaded.",
        tests=_LEDGER,
    ),
    Mutant(
        name="coordinator/newest-step-in-slots-is-dropped",
        kind=Kind.COMPARISON,
        file=f"{_COORDINATOR}plan.py",
        original="(step < replaced_below or",
        replacement="(step <= replaced_below or",
        loses="The newest step in shared memory is dropped before it is on any disk.",
        tests=_CHOICE,
    ),
    Mutant(
        name="coordinator/forgotten-steps-come-back",
        kind=Kind.CHANGED_CONSTANT,
        file=f"{_COORDINATOR}ledger.py",
        original="self._below = max(self._below, oldest)",
        replacement="self._below = min(self._below, oldest)",
        loses="A repeated message brings a pruned step back, which can never be complete again.",
        tests=_GIVING_UP,
    ),
    Mutant(
        name="coordinator/manifest-of-another-round",
        kind=Kind.MISSING_CHECK,
        file=f"{_COORDINATOR}plan.py",
        original="wanted = (contract.job_uid, message.round, message.step)",
        replacement="wanted = (contract.job_uid, manifest.restart_round, message.step)",
        loses="A late coordinator of an older round stores its manifests on the nodes.",
        tests=_DOCUMENTS,
    ),
    Mutant(
        name="coordinator/multiple-is-uploaded-twice",
        kind=Kind.COMPARISON,
        file=f"{_COORDINATOR}uploads.py",
        original="return step // every > self._since // every",
        replacement="return step // every >= self._since // every",
        loses="Every step is uploaded, and the store fills up.",
        tests=_DUE,
    ),
)
