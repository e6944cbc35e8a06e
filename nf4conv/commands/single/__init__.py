"""One checkpoint: the plan of each command, and how it is carried out."""
