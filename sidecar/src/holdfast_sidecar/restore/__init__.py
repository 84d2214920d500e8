"""The components of a restore, from the tiers to the node's disk and into the slots of the ranks."""
