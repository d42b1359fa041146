"""Deep Q-learning on Atari games (Mnih et al. 2015): dueling, double, several steps, prioritised; collected by lanes."""
