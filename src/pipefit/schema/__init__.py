"""The documents: frozen data, checked at construction, without torch."""
