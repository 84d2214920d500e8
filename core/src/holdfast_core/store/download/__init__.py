"""Download of shards from the store, whole or by ranges. Each chunk is verified."""
