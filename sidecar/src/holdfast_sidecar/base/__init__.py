"""What every journey of the sidecar uses: settings, logs, metrics, tasks, thread pools, and the
round that it is in.
"""
