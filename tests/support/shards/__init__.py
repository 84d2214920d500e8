"""Builders of shards, layouts, manifests and packs with defaults."""
