"""The loop of the operator: queue, observe, decide, apply; kopf and the plain ports around it."""
