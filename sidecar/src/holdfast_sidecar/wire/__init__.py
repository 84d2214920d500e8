"""Connections of the sidecar: its servers, its requests to other sidecars, and certificates."""
