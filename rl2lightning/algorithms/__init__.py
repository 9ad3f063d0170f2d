"""The algorithms, a LightningModule each."""
