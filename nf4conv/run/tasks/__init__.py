"""Tasks: what a worker takes next. They are written once, for all devices."""
