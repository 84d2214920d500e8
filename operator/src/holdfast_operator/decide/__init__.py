"""Decide what one pass does about one job. Pure: no clock, no I/O, no randomness."""
