"""Access to the Kubernetes API: one session, all writes, and Events."""
