"""The bulk protocol, which moves shards between sidecars on its own connections."""
