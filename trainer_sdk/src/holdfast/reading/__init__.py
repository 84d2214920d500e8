"""Reads checkpoints without the training script, as whole tensors that are assembled when needed."""
