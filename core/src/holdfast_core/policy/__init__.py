"""Rules for when a save is due and which checkpoints may be pruned. Pure."""
