#!/usr/bin/env bash
# When does the decay help a small MAE on CIFAR-10, and is it more than a learning rate? Pairs of alpha_min and rate are
# trained to STEPS steps (default 4000) with each of SEEDS (default "0") and probed; docs/results.md has the results.
#
#     nice -n 19 benchmarks/studies/mae_rate.sh TRAIN TEST 1.0=1e-3 1.0=5e-4 1.0=2.5e-4 0.8=1e-3 ...      # the map
#     SEEDS="1 2" nice -n 19 benchmarks/studies/mae_rate.sh TRAIN TEST 1.0=5e-4 0.8=5e-4        # the best of each arm
#     nice -n 19 benchmarks/studies/mae_rate.sh TRAIN TEST 0.8=5e-4=over_gain 0.8=5e-4=gain     # the controls
#
# TRAIN and TEST are class folders or zips of class folders. Under Adam a decayed branch moves up to 1/P times as far in
# the function (docs/equivalence.md): `over_gain` divides the rate of the branches' last layers by that gain; `gain` is
# the plain network with branches times 1/P and that rate; `patch4` has four times the tokens. Run again to continue
# after an interruption.
set -euo pipefail
cd "$(dirname "$0")/../.."
train=$1 test=$2 steps=${STEPS:-4000}
shift 2
export OMP_NUM_THREADS=1

for pair in "$@"; do
    IFS='=' read -r alpha_min rate control <<<"$pair"
    case "$control" in
        "") flags=() ;;
        over_gain) flags=(--model.optim.rate_over_gain true) ;;
        gain) flags=(--model.optim.rate_over_gain true --model.net.schedule gain) ;;
        patch4) flags=(--model.net.patch_size 4) ;;
        *) echo "$control is none of over_gain, gain, patch4" >&2 && exit 2 ;;
    esac
    for seed in ${SEEDS:-0}; do
        name="mae_rate_${alpha_min}_${rate}_s$seed${control:+_$control}"
        python train.py fit --config benchmarks/studies/mae_rate.yaml --data.path "$train" --trainer.max_steps "$steps" \
            --model.net.alpha_min "$alpha_min" --model.optim.lr "$rate" --seed_everything "$seed" ${flags+"${flags[@]}"} \
            --trainer.logger.experiment "$name" --ckpt_path auto
        folder=$(ls -d "runs/$name"/version_* | tail -1)
        [ -e "$folder/probes_$steps/probes.csv" ] || python evaluate.py probe --data "$train" --test "$test" \
            --max-train 20000 --ckpt "$folder/checkpoints/last.ckpt" --out "$folder/probes_$steps"
    done
done
python -m benchmarks.studies.mae_rate "$steps"
