"""The bytes of shard files and packs: chunks, chunk tables, digests and compression.

Pure: the modules work on buffers and do no I/O.
"""
