"""Pretraining of decoder language models, in the shape of Llama (Touvron et al. 2023)."""
