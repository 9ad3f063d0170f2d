"""Mesh, strategy, sharding and checkpoints."""
