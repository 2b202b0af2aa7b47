"""The version, in one place: CMake and the wheel's metadata read this file."""

__version__ = "0.1.0"
