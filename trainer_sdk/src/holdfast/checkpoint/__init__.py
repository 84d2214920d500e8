"""A rank's saves and restores: which steps are saved, how, and how each save ends."""
