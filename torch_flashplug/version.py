"""The version of the package. The build reads the version from this file."""

__version__ = "0.2.0"
