"""Hugging Face models: building, packed attention, heads."""
