"""Settings, logs and metrics of the operator process."""
