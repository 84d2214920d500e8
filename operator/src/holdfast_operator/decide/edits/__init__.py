"""Edits of the spec of a gang that runs: which of them its pods do not have yet, and when they get them."""
