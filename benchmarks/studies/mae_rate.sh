#!/usr/bin/env bash
# When does the decay help a small MAE on CIFAR-10, and is it more than a learning rate? The map of alpha_min and rate,
# then three seeds of the best rate of each arm, and the controls: `gain`, and the last layers of the branches at the
# rate over their gain (under Adam a decayed branch moves up to 1/P times as far in the function, docs/how_it_works.md).
#
#     nice -n 19 benchmarks/studies/mae_rate.sh TRAIN TEST map            # class folders or zips of class folders
#     nice -n 19 benchmarks/studies/mae_rate.sh TRAIN TEST seeds 0.8=5e-4 1.0=5e-4 ...    # the best pairs of the map
#
# Run again to continue after an interruption. STEPS=8000 by default; checkpoints of every 2000 steps are probed.
set -euo pipefail
cd "$(dirname "$0")/../.."
train=$1 test=$2 part=$3
shift 3
export OMP_NUM_THREADS=1

run() { # alpha_min, rate, seed, then more flags after a name for them
    local name="mae_rate_$1_$2_s$3${4:+_$4}" step folder flags=(--model.net.alpha_min "$1" --model.optim.lr "$2")
    python train.py fit --config benchmarks/studies/mae_rate.yaml --data.path "$train" \
        --trainer.max_steps "${STEPS:-8000}" --seed_everything "$3" "${flags[@]}" "${@:5}" \
        --trainer.logger.experiment "$name" --ckpt_path auto
    folder=$(ls -d "runs/$name"/version_* | tail -1)
    for step in 2000 4000 "${STEPS:-8000}"; do
        [ -e "$folder/probes_$step/probes.csv" ] || python evaluate.py probe --data "$train" --test "$test" \
            --ckpt "$folder/checkpoints/step_$(printf %08d "$step").ckpt" --out "$folder/probes_$step"
    done
}

case $part in
map)
    for alpha_min in 1.0 0.9 0.8 0.7 0.6; do
        for rate in 1e-3 5e-4 2.5e-4 1.25e-4; do run "$alpha_min" "$rate" 0; done
    done
    ;;
seeds)
    for pair in "$@"; do
        for seed in 0 1 2; do
            alpha_min=${pair%=*} rate=${pair#*=}
            run "$alpha_min" "$rate" "$seed"
            if [ "$alpha_min" != 1.0 ]; then
                run "$alpha_min" "$rate" "$seed" over_gain --model.optim.rate_over_gain true
                run "$alpha_min" "$rate" "$seed" gain_over_gain --model.net.schedule gain --model.optim.rate_over_gain true
            fi
        done
    done
    ;;
esac
