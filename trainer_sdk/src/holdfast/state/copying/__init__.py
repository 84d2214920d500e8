"""Copies the bytes of a snapshot into memory, as its plan says."""
