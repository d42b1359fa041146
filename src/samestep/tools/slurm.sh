#!/bin/bash
#SBATCH --job-name=@{name}
#SBATCH --nodes=@{nodes}
#SBATCH --ntasks-per-node=@{workers}
#SBATCH --cpus-per-task=@{cpus}
#SBATCH --gpus-per-node=@{gpus}
#SBATCH --mem=@{memory}
#SBATCH --time=@{time}
#SBATCH --partition=@{partition}
#SBATCH --account=@{account}
#SBATCH --chdir=@{folder}
#SBATCH --output=@{output}
#SBATCH --open-mode=append
#SBATCH --signal=TERM@@{grace_seconds}
#SBATCH --requeue
#SBATCH @{sbatch}

@{setup}
export @{variables}
# Workers sign the objects that they exchange with a token that only this job has.
export SAMESTEP_TOKEN=$(head -c 32 /dev/urandom | od -A n -t x1 | tr -d ' \n')
# A requeued job resumes, whatever --resume was when it started.
[ "${SLURM_RESTART_COUNT:-0}" -eq 0 ] || export SAMESTEP_RESUME=auto

# A worker that exits must not stop others that still write their part of the snapshot.
srun --kill-on-bad-exit=0 --wait=0 @{command}
status=$?
# Workers exit with 143 after a snapshot on SIGTERM.
[ "$status" -ne 143 ] || scontrol requeue "$SLURM_JOB_ID"
exit "$status"
