"""`make soak`: trainings under random faults, while the operator is killed every 30 seconds (C4)."""
