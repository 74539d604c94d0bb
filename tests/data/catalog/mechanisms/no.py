"""A mechanism whose name YAML 1.1 reads as false."""


class Mixer:
    """No parameters."""
