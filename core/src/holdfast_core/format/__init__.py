"""Bytes on disk and in the store: shard, layout, manifest, slot, keys. Pure: no I/O but on buffers."""
