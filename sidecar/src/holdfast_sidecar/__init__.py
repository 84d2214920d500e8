"""The sidecar of a worker pod: owns every byte after the hand-off from the ranks.

It digests shards and writes them to the node tier, copies them to peers, uploads them, brings them
back, and prunes them. It never calls the operator or Kubernetes, and it may never hurt training: a
failed save never fails a step.
"""
