"""Shows results on a terminal: as lines and tables; notes and progress on stderr."""
