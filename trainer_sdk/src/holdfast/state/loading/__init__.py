"""How a restore loads a saved state into the current one."""
