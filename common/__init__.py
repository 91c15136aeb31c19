"""Helpers that have nothing to do with training: disks, checksums, plugins, imports, end tokens."""
