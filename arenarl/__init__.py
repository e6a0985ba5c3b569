"""arenarl: train tool-using language-model agents on the ranking of a tournament between their own attempts."""

__version__ = "0.1.0"
