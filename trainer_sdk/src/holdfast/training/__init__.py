"""Training loop: numbers of steps, signals, late data loader iterators, and warm-up."""
