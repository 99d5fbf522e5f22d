"""Documents in the formats of other tools."""
