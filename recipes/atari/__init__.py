"""Deep Q-learning on Atari games (Mnih et al. 2015): dueling, double, n-step, prioritized."""
