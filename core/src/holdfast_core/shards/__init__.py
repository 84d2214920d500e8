"""The bytes of a shard file and of a pack: chunks, their tables, digests and compression. Pure:
buffers only.
"""
