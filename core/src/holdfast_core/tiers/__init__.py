"""The contract of the tiers, and the local commit that is written once above any node tier."""
