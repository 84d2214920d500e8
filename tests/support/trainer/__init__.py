"""Doubles for training code: a device, a store of the gang, and `holdfast run` as a process."""
