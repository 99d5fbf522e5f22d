"""The documents: frozen data that is checked where it is made, without torch."""
