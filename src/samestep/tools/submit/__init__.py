"""`samestep submit`: submit a training script to Slurm or Kubernetes as a job that resumes."""

from __future__ import annotations

import argparse

from samestep.tools.submit import kubernetes, slurm

SYSTEMS = {"slurm": slurm, "kubernetes": kubernetes}
EXAMPLES = """\
examples:
  samestep submit slurm --nodes 2 -n 4 --gpus 4 --time 8:00:00 --dir runs/one train.py --epochs 10
  samestep submit slurm --setup 'source venv/bin/activate' --dir runs/one --dry-run train.py
  samestep submit kubernetes --image train:1 --nodes 4 --claim runs:/runs --dir /runs/one train.py

See also samestep submit slurm --help and samestep submit kubernetes --help.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `samestep submit` to its parser."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EXAMPLES
    systems = parser.add_subparsers(dest="system", metavar="slurm|kubernetes", required=True)
    for name, system in SYSTEMS.items():
        description = f"{system.SUMMARY[0].upper()}{system.SUMMARY[1:]}."
        options = {"help": system.SUMMARY, "description": description, "allow_abbrev": False}
        system.add_arguments(systems.add_parser(name, **options))


def main(arguments: argparse.Namespace) -> int:
    """Write the job, submit it, and return the exit status."""
    return int(SYSTEMS[arguments.system].main(arguments))
