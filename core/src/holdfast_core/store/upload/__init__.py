"""Upload of one object to the store: parts, compression, and continuation of an interrupted upload."""
