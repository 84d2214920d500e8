"""The connection of a rank to what takes its slots, a sidecar or a process over a folder."""
