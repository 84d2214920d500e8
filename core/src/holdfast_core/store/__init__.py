"""The object tier: checkpoints in an S3-compatible store, or in a directory that serves as the store."""
