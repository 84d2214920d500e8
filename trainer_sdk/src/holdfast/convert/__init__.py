"""Conversion between checkpoints and formats of other tools: `holdfast export`, `import` and `merge`."""
