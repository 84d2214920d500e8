"""Documents of a checkpoint: manifest, layouts, references, payload headers and keys. Pure."""
