#!/bin/bash
# Add what your cluster needs, as here or as an option of sbatch, which overrides these lines.
#SBATCH --nodes=@{nodes}
#SBATCH --ntasks-per-node=@{workers}
#SBATCH --open-mode=append
#SBATCH --signal=TERM@@{grace_seconds}
#SBATCH --requeue

export @{variables}
# Workers sign the objects that they exchange with a token that only this job has.
export SAMESTEP_TOKEN=$(head -c 32 /dev/urandom | od -A n -t x1 | tr -d ' \n')
# A requeued job resumes, whatever --resume was when it started.
[ "${SLURM_RESTART_COUNT:-0}" -eq 0 ] || export SAMESTEP_RESUME=auto
# Without this, srun ignores --cpus-per-task of sbatch.
[ -z "${SLURM_CPUS_PER_TASK:-}" ] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK

# A worker that exits must not stop others that still write their part of the snapshot.
srun --kill-on-bad-exit=0 --wait=0 @{command}
status=$?
# Workers exit with 143 after a snapshot on SIGTERM.
[ "$status" -ne 143 ] || scontrol requeue "$SLURM_JOB_ID"
exit "$status"
