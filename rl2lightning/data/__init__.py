"""Rows to batches: sources, chat templates and masks, resumable loaders, and the LightningDataModules."""

from rl2lightning.data.datamodules import ChatDataModule, PreferenceDataModule, PromptDataModule, UnpairedDataModule
from rl2lightning.data.sources import Source

__all__ = ["ChatDataModule", "PreferenceDataModule", "PromptDataModule", "Source", "UnpairedDataModule"]
