"""Rules for which checkpoints may be pruned. Pure."""
