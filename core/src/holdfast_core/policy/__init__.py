"""Decisions that several parts take alike: when a save is due, what may be pruned. Pure."""
