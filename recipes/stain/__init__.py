"""Stain translation and segmentation of tissue with the networks of DeepLIIF."""
