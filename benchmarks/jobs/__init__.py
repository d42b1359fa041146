"""The four jobs that every contender trains: a network, its samples and its loss."""

from benchmarks.jobs import dqn, layers, mlp, vit
from benchmarks.jobs.job import Job, Parts

__all__ = ["JOBS", "Job", "Parts"]

JOBS = {"vit": vit.JOB, "mlp": mlp.JOB, "dqn": dqn.JOB, "layers": layers.JOB}
