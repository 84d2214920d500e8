"""Delete layouts in the object store that no manifest names, and restore those that a manifest lacks.

A layout is put before the manifest that names it. All steps with the same tensor layout share it, so the
next commit may need an old one. ADR 0043 shows why no interleaving deletes a layout that is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from datetime import timedelta

from holdfast_core.contract import SidecarContract
from holdfast_core.errors import HoldfastError
from holdfast_core.format.manifest import parse_manifest_of
from holdfast_core.ids import CheckpointId, Digest
from holdfast_core.store.tier import ObjectTier
from holdfast_core.tiers.base import NodeTier
from holdfast_sidecar.base import logs


class StoreLayouts:
    """State of the looks at the store's layouts, one for each coordinator.

    Calls block and must not run in parallel.
    """

    def __init__(
        self,
        contract: SidecarContract,
        node: NodeTier,
        store: ObjectTier,
        quiet: timedelta,
        uploading: Callable[[], Collection[CheckpointId]],
    ) -> None:
        """Create the state before the first look.

        Args:
            contract: The contract of this pod, which names the job.
            node: The node tier, from which a missing layout is put again.
            store: The object store.
            quiet: Layouts that were written within this time are not deleted.
            uploading: Returns the checkpoints that are being uploaded.
        """
        self._name = (contract.namespace, contract.job_uid)
        self._node = node
        self._store = store
        self._quiet = quiet
        self._uploading = uploading
        self._layout_of: dict[CheckpointId, Digest] = {}
        """Digest of the layout that each manifest names. Manifests never change, so each is read once."""
        self._unnamed: frozenset[Digest] = frozenset()
        """Old layouts that no manifest named at the last look."""

    def look(self) -> frozenset[Digest]:
        """Delete the old layouts that no manifest named, both at the last look and at this one.

        Nothing is deleted while an upload is under way. A layout that a manifest names and the store lacks
        is put again, if this node has it.

        Returns:
            The layouts that were deleted. Empty if an upload began before the last of them was.

        Raises:
            CorruptionError: A manifest is damaged. It could name any layout, so none is deleted.
            FormatError: A manifest cannot be parsed. None is deleted for the same reason.
            HoldfastError: Any other error of the object store.
        """
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
                return frozenset()  # the upload may rely on this layout; two more looks are needed
            self._store.delete_layout(*self._name, digest)
        return gone

    def _named(self) -> frozenset[Digest]:
        """Return the layouts that the store's manifests name. Call this after the layouts are listed.

        Manifests that are put later have put their layout before, or found it (ADR 0043).
        """
        listed = self._store.list_manifests(*self._name)
        exists = frozenset(listed)
        self._layout_of = {c: d for c, d in self._layout_of.items() if c in exists}
        namespace, job_uid = self._name
        for checkpoint in listed:
            if checkpoint not in self._layout_of:
                document = self._store.get_manifest(namespace, job_uid, checkpoint)
                manifest = parse_manifest_of(document, job_uid, checkpoint, namespace=namespace)
                self._layout_of[checkpoint] = manifest.layout
        return frozenset(self._layout_of.values())

    def _restore(self, digest: Digest) -> None:
        """Put a layout that the store lacks although a manifest names it, if this node has it.

        A failure is only logged.
        """
        try:
            self._store.put_layout(*self._name, self._node.get_layout(digest))
            logs.warning("a layout was missing in the store and was written again", layout=digest)
        except HoldfastError as error:
            logs.warning("a layout is missing in the store", layout=digest, error=str(error))
