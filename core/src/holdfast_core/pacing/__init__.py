"""Rate control: a limit on background transfers that pauses during saves, and a minimum rate of peers."""
