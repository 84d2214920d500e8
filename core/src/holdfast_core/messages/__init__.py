"""The messages between launcher, ranks, sidecars and operator, and their strict codec."""
