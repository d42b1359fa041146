"""Image classification with Vision Transformers (Dosovitskiy et al. 2021)."""
