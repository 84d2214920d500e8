"""The node tier: shards, manifests and layouts on the node's own disk, durable and verified."""
