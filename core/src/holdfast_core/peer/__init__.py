"""The bulk protocol: shards between sidecars, on connections of their own."""
