"""What a training loop needs around its checkpoints: steps, signals, data loaders and warm-up."""
