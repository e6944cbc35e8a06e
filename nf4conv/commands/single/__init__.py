"""One checkpoint that is written: the plan of each command, and how it is carried out."""
