"""Doubles for training code: a device, a store of the gang, and the launcher as a process."""
