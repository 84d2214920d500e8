"""The engine of a save: from a staged slot to its durable shard, in a pod and in a folder."""
