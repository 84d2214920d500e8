"""Layouts in the object store that no manifest names any more, and manifests whose layout is missing.

A layout is put before the manifest that names it, and is shared by all steps whose tensors lie the same
way, so an old one may be needed by the next commit. Why no interleaving deletes one that is needed: ADR
0043.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from datetime import timedelta

from holdfast_core.contract import SidecarContract
from holdfast_core.errors import HoldfastError
from holdfast_core.format.manifest import parse_manifest_of
from holdfast_core.ids import CheckpointId, Digest
from holdfast_core.tiers.base import NodeTier, ObjectTier
from holdfast_sidecar.base import logs


class StoreLayouts:
    """One for each life of a coordinator. Blocking; one thread at a time."""

    def __init__(
        self,
        contract: SidecarContract,
        node: NodeTier,
        store: ObjectTier,
        quiet: timedelta,
        uploading: Callable[[], Collection[CheckpointId]],
    ) -> None:
        """`uploading`: what is on its way to the store."""
        self._name = (contract.namespace, contract.job_uid)
        self._node = node
        self._store = store
        self._quiet = quiet
        self._uploading = uploading
        self._layout_of: dict[CheckpointId, Digest] = {}
        """Of manifests that were read before: they never change."""
        self._unnamed: frozenset[Digest] = frozenset()
        """What no manifest named at the last look."""

    def look(self) -> frozenset[Digest]:
        """Delete what no manifest named, neither at the last look nor at this one, while nothing is on its
        way to the store; returns what was deleted. Raises what the store raises, CorruptionError and
        FormatError: while one manifest cannot be read, every layout may be its own."""
        before, self._unnamed = self._unnamed, frozenset()
        stored = self._store.list_layouts(*self._name, timedelta(0))
        old = self._store.list_layouts(*self._name, self._quiet)
        named = self._named()
        for digest in named - stored:
            self._restore(digest)
        if self._uploading():
            return frozenset()
        self._unnamed = old - named
        gone = before & self._unnamed
        for digest in sorted(gone):
            if self._uploading():
                return frozenset()  # it may put the same layout; the next look begins anew
            self._store.delete_layout(*self._name, digest)
        return gone

    def _named(self) -> frozenset[Digest]:
        """After the layouts were listed: a manifest that comes later has put, or found, its layout."""
        listed = self._store.list_manifests(*self._name)
        self._layout_of = {c: d for c, d in self._layout_of.items() if c in listed}
        namespace, job_uid = self._name
        for checkpoint in listed:
            if checkpoint not in self._layout_of:
                document = self._store.get_manifest(namespace, job_uid, checkpoint)
                manifest = parse_manifest_of(document, job_uid, checkpoint, namespace=namespace)
                self._layout_of[checkpoint] = manifest.layout
        return frozenset(self._layout_of.values())

    def _restore(self, digest: Digest) -> None:
        """A manifest names it and it is not there: put it again, if this node has it."""
        try:
            self._store.put_layout(*self._name, self._node.get_layout(digest))
            logs.warning("a layout was missing in the store: put again", layout=digest)
        except HoldfastError as error:
            logs.warning("a layout is missing in the store", layout=digest, error=str(error))
