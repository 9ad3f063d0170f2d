"""The mathematics, pure: tensors and keyword-only scalars in, tensors out. Imports torch and nothing else."""
