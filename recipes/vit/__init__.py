"""Vision Transformer (Dosovitskiy et al. 2021, https://arxiv.org/abs/2010.11929): training, evaluation, pretrained weights."""
