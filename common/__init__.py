"""Helpers that have nothing to do with training.

They are about disks, checksums, JSON files, plugins, imports and end tokens.
"""
