"""The choice of the step from which a round starts."""
