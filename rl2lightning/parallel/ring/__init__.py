"""Ring attention over packed sequences: who holds which token, how keys travel, and the plugin that arranges it."""
