"""Documents in the formats of other tools."""

__all__ = []
