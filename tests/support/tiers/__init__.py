"""Tiers for tests: in memory, failing on purpose, and the contract that every node tier passes."""
