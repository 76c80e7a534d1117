#!/bin/bash
# A sweep whose jobs run side by side, each in a process of its own, by Hydra's submitit launcher. Other keys follow:
#
#   examples/clusters/submitit.sh recipe=tiny zero.stage=1,2,3 run.dir=/shared/sweeps/first
#
# pip install --no-deps hydra-submitit-launcher submitit cloudpickle. LAUNCHER=submitit_slurm submits each job to Slurm.

set -euo pipefail
exec "${PYTHON:-python}" -m zero_train -m "hydra/launcher=${LAUNCHER:-submitit_local}" "$@"
