"""Decisions that several parts take: when a save is due, which checkpoints may be pruned. Pure."""
