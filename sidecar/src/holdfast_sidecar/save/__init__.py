"""The components of a save, from a full slot to the node tier, to peers and to the object store."""
