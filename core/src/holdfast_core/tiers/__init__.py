"""The interfaces of the tiers, and the local commit, which works on any node tier."""
