"""The command line of `holdfast run`: options, and the command."""
