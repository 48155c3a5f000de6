"""The configuration: its schema, shipped presets, and how files and overrides are read."""
