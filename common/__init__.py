"""Helpers that have nothing to do with training: disks, checksums, plugins, and end tokens."""
