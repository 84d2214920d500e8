"""The persister: the process that writes a rank's checkpoints to a folder and uploads them to its store."""
