"""Checks, repairs and deletes what is stored: the scrub, replacement of bad copies, and pruning."""
