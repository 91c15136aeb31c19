"""Helpers that know nothing of training, used by every room: disks, checksums, plugins."""
