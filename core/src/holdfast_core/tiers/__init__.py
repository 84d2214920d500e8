"""Places that hold shards, behind one contract: node (disk), object (S3), memory (tests)."""
