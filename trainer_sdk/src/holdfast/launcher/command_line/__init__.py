"""The command line of `holdfast run`: options, the nodes of a run, the variables of srun, and the command."""
