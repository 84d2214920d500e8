"""What all parts of the sidecar use: settings, logs, metrics, tasks, pools, the round's state."""
