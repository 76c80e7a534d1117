#!/bin/bash
# On each machine, with the number of the machine and the address of machine 0 before what torchrun shall run:
#
#   examples/clusters/torchrun.sh 0 10.0.0.1 -m zero_train run.dir=/shared/runs/first run.resume=auto
#   examples/clusters/torchrun.sh 1 10.0.0.1 -m zero_train run.dir=/shared/runs/first run.resume=auto
#
# MACHINES=2, RANKS=gpu (of each machine: a number, or one for each GPU), RESTARTS=3 and PORT=29500 may be set.

set -euo pipefail
number=$1 first=$2
shift 2
exec "${PYTHON:-python}" -m torch.distributed.run \
    --nnodes "${MACHINES:-2}" --node-rank "$number" --nproc-per-node "${RANKS:-gpu}" \
    --master-addr "$first" --master-port "${PORT:-29500}" --max-restarts "${RESTARTS:-3}" "$@"
