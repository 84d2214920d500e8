"""What a save costs a training whose state is on a GPU: `make bench-gpu`."""
