"""Studies: the claims of the paper as sets of trainings, run and decided by one command."""
