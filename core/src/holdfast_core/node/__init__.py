"""The node tier: durable, verified shards, manifests and layouts on the node's disk."""
