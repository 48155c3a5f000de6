"""Resource plan of a training: memory, time and price, computed before it starts."""
