"""Conversion between checkpoints in a folder and formats of other tools: `holdfast export` and `import`."""
