"""What training holds, as tensors and JSON, and back: nothing here knows slots, sockets or rounds."""
