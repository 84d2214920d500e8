"""The ring of slots in shared memory, and the copies into it from host memory and from devices."""
