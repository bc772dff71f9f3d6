#!/bin/bash
# Slurm: a run longer than the time limit, and one that may be preempted.
#
# Edit the time, the resources and the command; submit it in the folder of the repository: sbatch recipes/slurm.sh
# runs/ has to be on a disk that all nodes see, else add --mirror s3://MY-BUCKET/runs.
#
# Linted with shellcheck and tried with played srun and scontrol; Slurm's own part is taken from its manual and source,
# not run on a cluster. Needs Slurm 19.05.
#
# Two minutes before the limit (Slurm may be a minute early) USR1 goes to the steps, so to Python and not to this shell:
# no B: in --signal. A preemption with a GraceTime sends them SIGTERM in the same way.
#SBATCH --job-name=breakout
#SBATCH --time=04:00:00
#SBATCH --gpus=1
#SBATCH --cpus-per-task=8
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=USR1@120

# A preemption without GraceTime, the time limit and scancel send SIGTERM to this shell too. It has to outlive srun: when
# it ends, srun is killed. Not '', which srun would inherit.
trap : TERM

# srun of Slurm 22.05 to 23.02 doesn't take --cpus-per-task over from the job
export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}" PYTHONUNBUFFERED=1
srun .venv/bin/python ppo_atari.py --env-id BreakoutNoFrameskip-v4 --amp
status=$?

# Incomplete: or a job that was cancelled would come back. One preempted without grace is requeued by Slurm itself.
if [ "$status" -eq 75 ]; then
  scontrol requeue Incomplete "$SLURM_JOB_ID" || echo "not requeued: sbatch the same script again" >&2
fi
exit "$status"
