"""Connections of the sidecar: its servers, and its requests to other sidecars."""
