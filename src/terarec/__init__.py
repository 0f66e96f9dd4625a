"""Recommender models with embedding tables too large for one device: training, preparation and serving."""

__version__ = "0.1.0"
