"""The ring of shared-memory slots, and copies into it from the host and from a device."""
