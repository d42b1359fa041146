"""`samestep submit`: a training script as a job of Slurm or Kubernetes that goes on where it was stopped."""
