"""Bytes on disk and in the store: shard, layout, manifest, slot, keys. Pure: buffers only."""
