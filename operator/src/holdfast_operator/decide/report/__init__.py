"""What the status and the Events of a job say: conditions, phase, times of recoveries. Pure."""
