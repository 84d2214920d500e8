"""The connection of a rank to its sidecar, or to the persister of a folder."""
