"""Names the release. It stands below all rooms, because records and cards name it."""

__version__ = "0.1.0"
