"""The ViT job, written for each peer as its documentation teaches."""
