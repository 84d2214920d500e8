"""The places of checkpoints, a pod or a folder: which process serves a rank there, and by which rules."""
