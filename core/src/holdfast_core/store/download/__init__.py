"""Fetch shards from the store: whole or by ranges, each chunk verified."""
