"""The coordinator of a round: which step is committed at which level, and what each member is sent."""
