"""Studies: the paper's claims as sets of trainings (cells), run, resumed and decided by one command."""
