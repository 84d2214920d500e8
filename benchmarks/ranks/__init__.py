"""What a gang of many workers costs its coordinator: `make bench-ranks`.

Two sidecars are real processes. One of them is the coordinator; the other one lends a figure for a member.
Each has one scripted rank, whose small shards are really staged, written and copied to the other sidecar. One
process plays all other members: real TLS, one certificate and one address for each member, real messages, no
tensor bytes.
"""
