"""A checkpoint of N ranks as payloads of M ranks: which bytes of which shards, read in whole chunks.

Pure but for `assemble`, which reads through a reader and writes through a target that it is given.
Knows layouts and byte ranges; no slots, no sockets, no tensors.
"""
