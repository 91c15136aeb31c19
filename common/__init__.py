"""Helpers that have nothing to do with training, used everywhere: disks, checksums, plugins."""
