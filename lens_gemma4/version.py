"""The version, said once: packaging reads it here."""

__version__ = "0.1.0"
