"""Node tiers for tests: one in memory, one with faults, and the contract that every node tier meets."""
