"""A rank's saves and restores: which process serves them, and how each save ends."""
