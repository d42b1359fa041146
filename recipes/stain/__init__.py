"""Stain translation and segmentation of tissue."""
