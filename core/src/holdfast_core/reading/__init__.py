"""Reads of parts of a checkpoint into memory, from verified chunks of the places that have them."""
