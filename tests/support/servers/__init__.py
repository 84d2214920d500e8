"""Real servers on loopback: S3 stores, a Kubernetes API, certificates and a fault-injecting proxy."""
