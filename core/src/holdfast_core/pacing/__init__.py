"""Rate control: a limit on background transfers, their pause during saves, and a peer's minimum rate."""
