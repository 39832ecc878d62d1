"""The version of lightstep; setup.cfg reads it from here."""

__version__ = "0.1.0"
