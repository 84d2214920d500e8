"""The loop of the operator: queue, observe, decide, apply."""
