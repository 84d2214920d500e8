"""The state of a training as tensors and JSON: how it is read for a save and loaded by a restore."""
