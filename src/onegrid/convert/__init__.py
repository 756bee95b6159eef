"""Checkpoints in the published low-precision layouts, read and written tensor by tensor."""
