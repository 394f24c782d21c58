#!/usr/bin/env bash
# Does one number, -log10 of the product P of the alphas, order the shortcuts of a small MAE on CIFAR-10, as it orders
# the paper's Table 3, and does the control `gain` (plain identity, branches times 1/P) do what the decay does?
#
#     nice -n 19 benchmarks/studies/one_number.sh TRAIN TEST      # class folders or zips of class folders
#
# Twenty runs of 1000 steps; run again to continue after an interruption. Results: docs/results.md.
set -euo pipefail
cd "$(dirname "$0")/../.."
train=$1 test=$2
export OMP_NUM_THREADS=1

arm() { # its name, then its flags
    local name=$1
    shift
    python train.py fit --config benchmarks/studies/one_number.yaml --data.path "$train" --data.test_path "$test" \
        --seed_everything "$seed" --trainer.logger.experiment "one_number_${name}_$seed" --ckpt_path auto \
        --model.net.alpha_min "$@"
}

for seed in 0 1; do
    arm plain 1.0
    arm 0.7 0.7
    arm gain 0.7 --model.net.schedule gain
    arm constant-branch 1.0 --model.net.schedule constant-branch # x + sqrt(.5) f
    arm constant 1.0 --model.net.schedule constant               # sqrt(.5) (x + f)
    arm attention 0.7 --model.net.branches attention
    arm mlp 0.7 --model.net.branches mlp
    arm 0.8 0.8
    arm 0.9 0.9
done
seed=0 # no SkipLayers, which read the stream without a norm: here `gain` is the decay, to rounding
arm official 0.7 --model.net.wiring official
arm official_gain 0.7 --model.net.wiring official --model.net.schedule gain
python evaluate.py compare runs/one_number_{plain,0.9,0.8,0.7}_{0,1}/version_* --by alpha_min --x step --out runs/one_number_compare.png
python -m benchmarks.studies.one_number
