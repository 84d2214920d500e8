"""The object tier: checkpoints in an object store, or in a directory that serves as the store."""
