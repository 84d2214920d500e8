"""TODO-docstring."""
