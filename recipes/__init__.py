"""Real jobs that use only the public interface of samestep."""
