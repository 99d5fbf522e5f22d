"""Messages and collectives between devices."""
